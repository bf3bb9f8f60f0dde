"""Selects among the fused attention kernels of an NVIDIA GPU, fastest first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from nxd_memopt.backends.attention_call import AttentionCall

_SWITCHES = {
    "flash4": ("flash", "NVTE_FLASH_ATTN"),
    "cudnn": ("cudnn", "NVTE_FUSED_ATTN"),
    "flash": ("flash", "NVTE_FLASH_ATTN"),
    "efficient": ("mem_efficient", None),
}
"""Name in ``torch.backends.cuda.enable_*_sdp``, and Transformer Engine's environment variable."""


@dataclass(frozen=True)
class _Limits:
    """Inputs that one of PyTorch's kernels supports in forward and backward."""

    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int
    masks: bool = False
    packed: bool = False
    dropout: bool = True


_HAS_VARLEN = find_spec("torch.nn.attention.varlen") is not None
_HALF = (torch.bfloat16, torch.float16)
_LIMITS = {
    "cudnn": _Limits(_HALF, 128, dropout=False),
    "flash": _Limits(_HALF, 256, packed=True),
    "efficient": _Limits((*_HALF, torch.float32), 256, masks=True),
}


def implementations(major: int) -> tuple[str, ...]:
    """Return the attention implementations of a GPU in order of preference.

    The order for Hopper is measured, see docs/benchmarks.

    Args:
        major: major compute capability, such as 9 for Hopper.
    """
    # PyTorch's flash and cuDNN kernels need compute capability 8.0; flash4 is for 9.0 and newer.
    if major < 8:
        fused: tuple[str, ...] = ()
    elif major == 8:
        fused = ("flash", "cudnn")
    elif major == 9:
        fused = ("flash4", "cudnn", "flash")
    else:
        fused = ("cudnn", "flash", "flash4")
    return (*fused, "efficient", "tiled", "math")


def refusal(implementation: str, call: AttentionCall) -> str | None:
    """Return why the kernel cannot run ``call``, or None if nothing rules it out.

    Switches are checked first, then the kernel's limits.
    """
    reason = _switched_off_by(implementation)
    limits = _LIMITS.get(implementation)
    if reason is not None or limits is None:
        return reason
    if call.dtype not in limits.dtypes:
        supported = [str(dtype) for dtype in limits.dtypes]
        return f"{implementation} attention takes {supported}, got {call.dtype}"
    if call.masked and not limits.masks:
        return f"{implementation} attention takes no mask"
    if call.packed and not limits.packed:
        return f"{implementation} attention takes no packed documents"
    if call.packed and not _HAS_VARLEN:
        return f"torch {torch.__version__} has no flash attention for packed documents: 2.10 has"
    if call.dropout_p > 0 and (call.packed or not limits.dropout):
        # A kernel that has dropout refuses it only together with packed documents.
        packed = ""
        if limits.dropout:
            packed = " for packed documents"
        return f"{implementation} attention is used without dropout{packed}, got {call.dropout_p}"
    if call.head_dim > limits.max_head_dim or call.head_dim % 8:
        wanted = f"a multiple of 8 up to {limits.max_head_dim}"
        return f"head size {call.head_dim} is not what {implementation} attention takes, {wanted}"
    return None


def _switched_off_by(implementation: str) -> str | None:
    torch_switch, variable = _SWITCHES.get(implementation, (None, None))
    if variable is not None and os.environ.get(variable) == "0":
        return f"{variable}=0 switches it off: unset it"
    # torch._C's own function instead of torch.backends.cuda's: dynamo can trace this call
    if torch_switch is None or getattr(torch._C, f"_get_{torch_switch}_sdp_enabled")():
        return None
    return f"torch.backends.cuda.enable_{torch_switch}_sdp(False) switched it off"
