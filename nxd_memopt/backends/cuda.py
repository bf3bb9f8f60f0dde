"""Owns the CUDA backend: NCCL collectives and the caching allocator's memory figures."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends.c10d import C10dBackend


class CudaBackend(C10dBackend):
    """NVIDIA GPUs, one per process: the one that torchrun's LOCAL_RANK names."""

    name = "cuda"
    distributed_backend = "nccl"
    attention_implementations = ("sdpa", "tiled", "math")

    def __init__(self) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK {local_rank} needs {local_rank + 1} GPUs, {torch.cuda.device_count()} visible: "
                "lower --nproc_per_node or set NXD_MEMOPT_BACKEND=cpu"
            )
        self.device = torch.device("cuda", local_rank)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        if not torch.backends.cuda.is_built():
            return f"torch {torch.__version__} is built without CUDA"
        return None if torch.cuda.is_available() else "no CUDA device is visible"

    def init_process_group(self, **kwargs: Any) -> None:
        torch.cuda.set_device(self.device)
        super().init_process_group(**{"device_id": self.device, **kwargs})

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
