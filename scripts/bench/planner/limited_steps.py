"""What PyTorch's allocator needs for a step on a GPU: the step with less and less that it may reserve."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch

from nxd_memopt.backends import backend
from nxd_memopt.backends.cuda.backend import CudaBackend

FRACTIONS = (0.025, 0.01)
"""Limits besides the planned one: parts of what is allocated that may be reserved in addition."""
FRACTIONS_OF_OFFLOAD = (0.01, 0.0, -0.01)
"""The same for a step whose offload waits only where memory is short: parts of the planned allocated bytes."""
PAGE_BYTES = 20 << 20
"""PyTorch's allocator maps pages of this size, and compares a limit with what it was asked for: it may exceed it."""
QUICK_S = 1.0
"""Steps that are longer run with the planned limit only, unless their offload takes what is left."""


def least_reserved(run: Callable[[], object], *, limits: Iterable[int], planned: int, fails_alone: bool = True) -> int:
    """Return what the allocator reserves in the step with the smallest of the limits with which it runs.

    The limits fall from the planned one on, because nothing is run after a step that was out of memory. Peer memory
    counts in every figure. Returns 0 without an allocator that has limits.

    Args:
        run: runs a step.
        limits: bytes; those above the planned one are not tried.
        planned: planned bytes, the largest limit.
        fails_alone: a step that is out of memory leaves no other rank waiting. Otherwise the planned limit is
            the only one.

    Raises:
        torch.OutOfMemoryError: the step does not run with the planned limit.
    """
    if not isinstance(backend, CudaBackend):
        return 0
    found = limited_step(run, planned)
    if not fails_alone:
        return found
    for limit in sorted((limit for limit in limits if limit < planned), reverse=True):
        try:
            found = limited_step(run, limit)
        except torch.OutOfMemoryError:
            break
    return found


def limited_step(run: Callable[[], object], limit_bytes: int) -> int:
    """Run a step on a GPU that may reserve ``limit_bytes`` and return what it reserved, both with peer memory.

    Raises:
        torch.OutOfMemoryError: the step needs more.
    """
    assert isinstance(backend, CudaBackend)
    peers = backend.peer_memory_bytes()
    total = torch.cuda.get_device_properties(backend.device).total_memory
    clean()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, max(0, limit_bytes - peers - PAGE_BYTES) / total), backend.device
    )
    try:
        run()
        backend.synchronize()
        return torch.cuda.max_memory_reserved() + peers
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, backend.device)


def clean() -> None:
    """Free what a cell has left, so that the next one starts as in a process of its own."""
    gc.collect()
    if backend.name == "cuda":
        # cuBLAS keeps a workspace for each stream that has used it.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
