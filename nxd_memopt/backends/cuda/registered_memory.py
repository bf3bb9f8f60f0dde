"""Large page-locked host buffers of an exact size, which a GPU copies to and from asynchronously."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

# Linux's madvise(MADV_POPULATE_WRITE), since 5.14; Python 3.11 has no name for it.
_POPULATE_WRITE = 23
_SLICE_BYTES = 1 << 30
_THREADS = 8


def registered_buffer(size_bytes: int) -> Tensor:
    """Return ``size_bytes`` of page-locked memory, 1-D uint8, zeros.

    torch's pinned allocator rounds sizes up to powers of two, which would double a buffer of 33 GiB,
    and it touches the pages from one thread. Here several threads touch slices of the memory, in
    huge pages where the system has them, before the driver locks all of it in one call.

    Raises:
        RuntimeError: the driver cannot lock the memory.
    """
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(lambda start: _populate(memory, start, size_bytes), range(0, size_bytes, _SLICE_BYTES)))
    # The storage keeps ``owner`` alive, and ``owner`` keeps ``memory``.
    owner = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
    buffer = torch.frombuffer(owner, dtype=torch.uint8, count=size_bytes)
    address = buffer.data_ptr()
    driver: Any = torch.cuda.cudart()
    error = driver.cudaHostRegister(address, size_bytes, 0)
    if int(error) != 0:
        raise RuntimeError(f"cudaHostRegister of {size_bytes} bytes failed with error {error}: free host memory")
    # The driver must unlock the pages before they are unmapped: another mapping may get their addresses at once.
    # ``mmap`` unmaps before its finalizers run, a ctypes array releases ``memory`` after them.
    weakref.finalize(owner, driver.cudaHostUnregister, address)
    return buffer


def _populate(memory: mmap.mmap, start: int, size_bytes: int) -> None:
    """Allocate the pages of one slice."""
    length = min(_SLICE_BYTES, size_bytes - start)
    try:
        memory.madvise(_POPULATE_WRITE, start, length)
    except OSError:
        # An older kernel: the driver touches the pages when it locks them.
        return
