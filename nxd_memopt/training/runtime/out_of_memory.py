"""Adds what to change to an error of a device without free memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from nxd_memopt.backends import backend
from nxd_memopt.backends.base import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS
from nxd_memopt.planner.hardware import GIB


@contextlib.contextmanager
def out_of_memory_advice() -> Iterator[None]:
    """Add a note to ``torch.OutOfMemoryError``: what the memory is used for and what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The frames of the traceback still hold their tensors, so that the figures are the error's.
        settings = [os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ]
        error.add_note(advice(backend.memory_allocated() or 0, backend.unused_bytes(), settings))
        raise


def advice(tensor_bytes: int, unused_bytes: int, settings: list[str]) -> str:
    """Return what the memory is used for and what to change.

    Args:
        tensor_bytes: bytes of tensors.
        unused_bytes: bytes that the allocator holds and no tensor uses.
        settings: values of ``ALLOCATOR_VARIABLES`` that are set; none is the program's own setting.
    """
    used = f"{tensor_bytes / GIB:.1f} GiB of tensors and {unused_bytes / GIB:.1f} GiB of fragments between them"
    remedies = ["turn on memory techniques in the order of docs/memory.md, or let the planner choose with memory: auto"]
    # LLaMA-3-8B with 393,216 tokens on an H200 has 31 GiB of fragments without the setting, at which
    # it fails, and runs with it.
    if settings and unused_bytes > tensor_bytes // 20 and not any(EXPANDABLE_SEGMENTS in each for each in settings):
        remedies.insert(0, f"set {ALLOCATOR_VARIABLES[1]}={EXPANDABLE_SEGMENTS}")
    return f"the device has {used}: {', then '.join(remedies)}"
