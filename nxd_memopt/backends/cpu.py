"""The CPU backend: gloo collectives, and the process's resident set size as memory statistics."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

import torch
from torch import Tensor

from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.backends.c10d import C10dBackend
from nxd_memopt.backends.neuron.topology import (
    PLATFORM_OVERRIDE,
    neuron_kv_rank_stride,
    neuron_order,
)


class CpuBackend(C10dBackend):
    """CPU device. Memory figures are the process's resident bytes, from Linux's /proc if it exists.

    If ``NEURON_PLATFORM_TARGET_OVERRIDE`` names a platform, ranks are ordered as on that platform.
    """

    name = "cpu"
    distributed_backend = "gloo"
    attention_implementations = ("sdpa", "tiled", "math")

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    def attention_refusal(self, implementation: str, call: AttentionCall) -> str | None:
        # The number of calls depends on the batch, so one static graph cannot have them.
        if implementation == "sdpa" and call.packed and torch.compiler.is_compiling():
            return "for packed documents, sdpa runs once per document, which a compiled layer cannot"
        return None

    def device_order(self, world_size: int, tensor_model_parallel_size: int) -> list[int]:
        # Consecutive ranks even on a Trainium host: gloo does not use its links. The variable asks
        # for the order of another platform, for example to inspect its groups without the device.
        if PLATFORM_OVERRIDE not in os.environ:
            return super().device_order(world_size, tensor_model_parallel_size)
        return neuron_order(os.environ, world_size, tensor_model_parallel_size)

    def kv_rank_stride(self, tensor_model_parallel_size: int, replicas: int) -> int:
        if PLATFORM_OVERRIDE not in os.environ:
            return super().kv_rank_stride(tensor_model_parallel_size, replicas)
        return neuron_kv_rank_stride(os.environ, tensor_model_parallel_size, replicas)

    def gradient_sharding_refusal(self) -> None:
        return None

    def allocations_refusal(self) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def memory_allocated(self) -> int:
        return resident_bytes("VmRSS")

    def max_memory_allocated(self) -> int:
        return resident_bytes("VmHWM")

    def freed_bytes_kept(self) -> int | None:
        return _free_heap_bytes()

    def reset_peak_memory_stats(self) -> None:
        """Restart the peak at the current figure, if the kernel allows it (Linux 4.0 and newer)."""
        reset_resident_peak()


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``: bytes and numbers of blocks of its heaps."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _free_heap_bytes() -> int | None:
    """Return the bytes of freed blocks that malloc has not given back to the system; None without glibc 2.33.

    malloc raises the size from which it maps a block by itself to the largest one that was freed, up
    to 32 MiB: from then on most tensors lie in heaps, between blocks that are in use.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _Mallinfo2
    return int(library.mallinfo2().fordblks)


def reset_resident_peak() -> None:
    """Reset VmHWM of this process to its VmRSS; do nothing without Linux's /proc."""
    clear_refs = Path("/proc/self/clear_refs")
    if clear_refs.exists():
        # proc(5): writing 5 resets the peak resident set size of the process to its current size
        clear_refs.write_text("5", encoding="ascii")


def resident_bytes(field: str) -> int:
    """Return ``VmRSS`` (resident now) or ``VmHWM`` (peak) of this process, in bytes.

    Without /proc return the peak of getrusage for both.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for line in status.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
