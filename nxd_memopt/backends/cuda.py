"""Owns the CUDA backend: NCCL collectives and the caching allocator's memory figures."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.backends.c10d import C10dBackend


@dataclass(frozen=True)
class _AttentionLimits:
    """What one of PyTorch's kernels can serve; ``switch`` is Transformer Engine's environment variable."""

    torch_switch: str
    switch: str | None
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int
    masks: bool = False
    dropout: bool = True

    def enabled(self) -> bool:
        return getattr(torch.backends.cuda, f"{self.torch_switch}_sdp_enabled")()


_HALF = (torch.bfloat16, torch.float16)
_ATTENTION = {
    "cudnn": _AttentionLimits("cudnn", "NVTE_FUSED_ATTN", _HALF, 128, dropout=False),
    "flash": _AttentionLimits("flash", "NVTE_FLASH_ATTN", _HALF, 256),
    "efficient": _AttentionLimits("mem_efficient", None, (*_HALF, torch.float32), 256, masks=True),
}


class CudaBackend(C10dBackend):
    """NVIDIA GPUs, one per process: the one that torchrun's LOCAL_RANK names."""

    name = "cuda"
    distributed_backend = "nccl"
    attention_implementations = ("cudnn", "flash", "efficient", "tiled", "math")
    equal_heads_implementations = ("efficient",)

    def __init__(self) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK {local_rank} needs {local_rank + 1} GPUs, {torch.cuda.device_count()} visible: "
                "lower --nproc_per_node or set NXD_MEMOPT_BACKEND=cpu"
            )
        self.device = torch.device("cuda", local_rank)
        if torch.cuda.get_device_capability(self.device) < (9, 0):  # before Hopper, flash is the faster of the two
            self.attention_implementations = ("flash", "cudnn", "efficient", "tiled", "math")

    @classmethod
    def unavailable_reason(cls) -> str | None:
        if not torch.backends.cuda.is_built():
            return f"torch {torch.__version__} is built without CUDA"
        return None if torch.cuda.is_available() else "no CUDA device is visible"

    def init_process_group(self, **kwargs: Any) -> None:
        torch.cuda.set_device(self.device)
        super().init_process_group(**{"device_id": self.device, **kwargs})

    def attention_refusal(self, implementation: str, call: AttentionCall) -> str | None:
        """PyTorch's own switches and Transformer Engine's count; then what each kernel can serve, backward included."""
        limits = _ATTENTION.get(implementation)
        if limits is None:
            return None
        variable = limits.switch
        if variable is not None and os.environ.get(variable) == "0":
            return f"{variable}=0 switches it off"
        if not limits.enabled():
            return f"torch.backends.cuda.enable_{limits.torch_switch}_sdp(False) switched it off"
        if call.dtype not in limits.dtypes:
            return f"{implementation} attention takes {[str(dtype) for dtype in limits.dtypes]}, got {call.dtype}"
        if torch.cuda.get_device_capability(self.device) < (8, 0) and implementation != "efficient":
            return f"{implementation} attention needs compute capability 8.0"
        if call.masked and not limits.masks:
            return f"{implementation} attention takes no mask"
        if call.packed and (implementation != "flash" or call.dropout_p > 0):
            return f"{implementation} attention is used for packed documents by flash alone, and without dropout"
        if call.packed and find_spec("torch.nn.attention.varlen") is None:
            return f"torch {torch.__version__} has no flash attention for packed documents: 2.10 has"
        if call.dropout_p > 0 and not limits.dropout:
            return f"{implementation} attention is used without dropout, got {call.dropout_p}"
        if call.head_dim > limits.max_head_dim or call.head_dim % 8:
            wanted = f"a multiple of 8 up to {limits.max_head_dim}"
            return f"head size {call.head_dim} is not what {implementation} attention takes, {wanted}"
        return None

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def get_rng_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def max_memory_allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak_memory_stats(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
