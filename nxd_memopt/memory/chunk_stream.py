"""Passes host tensors through a ring of device buffers in chunks: prefetch, use, write-back, in a fixed order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nxd_memopt.backends import Transfer
from nxd_memopt.memory.paced_copies import runs_in_copy_thread


class Copies(Protocol):
    """The part of ``HostTransfers`` that a stream of chunks needs; ``PacedCopies`` has it too."""

    @property
    def device(self) -> torch.device: ...

    def mark(self) -> Transfer: ...

    def copy_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Transfer) -> Transfer: ...

    def copy_in(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Transfer) -> Transfer: ...


@dataclass
class _Slot:
    """Device buffers of one chunk, and the copies to or from them.

    Attributes:
        buffers: one tensor per host tensor, ``[chunk elements]``.
        arrived: copy of the present chunk to the device.
    """

    buffers: list[Tensor]
    arrived: Transfer


class ChunkStream:
    """Streams flat host tensors of equal length through the device, chunk by chunk, pass after pass.

    A pass visits every chunk once, in ascending order unless ``reorder`` sets another. Each visit
    takes a chunk, changes it on the device and gives it back; the chunk is written to the host, and
    its buffers are filled with the chunk that is ``slots`` visits ahead, which belongs to the next
    pass at the end of this one.
    Copies in both directions run on streams of their own, so they overlap with each other and with
    the work between two passes.

    The host tensors may be read or written by the caller only between ``synchronize`` and the next
    ``take``. After a write, ``take`` copies the prefetched chunks again. A stream that is dropped waits
    for its copies: the memory of buffers and host tensors is unmapped afterwards.

    Args:
        host: flat tensors of N elements each, in memory of ``transfers.host_buffer``.
        chunk_elements: elements of each tensor in one chunk; the last chunk may be shorter.
        slots: chunks on the device at a time, at least 1; device memory is ``slots`` times
            ``chunk_elements`` elements of each host tensor.
        transfers: copies between device and host.
    """

    def __init__(self, host: Sequence[Tensor], *, chunk_elements: int, slots: int, transfers: Copies) -> None:
        self._host = host
        self._chunk_elements = chunk_elements
        self._transfers = transfers
        self.num_chunks = -(-host[0].numel() // chunk_elements)
        self._num_slots = min(slots, self.num_chunks)
        self._ring: deque[_Slot] = deque()
        self._order = list(range(self.num_chunks))
        self._position = 0  # in the order, of the chunk that ``take`` returns next
        self._written: Transfer | None = None
        self._versions = self._current_versions()
        # ``data`` has a version counter of its own: ``host``'s counts the writes of others only.
        self._bytes = [tensor.data.view(torch.uint8) for tensor in host]

    def __del__(self) -> None:
        # A copy into memory that is no longer mapped is an error after which the process cannot use the
        # device. A failed copy is over.
        with suppress(Exception):
            if runs_in_copy_thread():
                # The garbage collector runs in the thread that would queue the copies: another one waits.
                threading.Thread(target=self.synchronize).start()
            else:
                self.synchronize()

    @property
    def device_bytes(self) -> int:
        """Bytes of all buffers on the device."""
        element_bytes = sum(tensor.element_size() for tensor in self._host)
        return self._num_slots * self._chunk_elements * element_bytes

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Return the first element of ``chunk`` and the one after its last."""
        start = chunk * self._chunk_elements
        return start, min(start + self._chunk_elements, self._host[0].numel())

    def reorder(self, order: Sequence[int]) -> None:
        """Visit the chunks in ``order`` from the next pass on. Call it between two passes."""
        assert self._position == 0 and sorted(order) == sorted(self._order)
        self._order = list(order)
        if self._ring:
            self.synchronize()
            self._fill([slot.buffers for slot in self._ring])

    def prefetch(self) -> None:
        """Start the copies of the first chunks, unless they are under way."""
        if self._ring and self._versions != self._current_versions():
            # The host tensors were written to: the buffers have older values.
            self.synchronize()
            self._fill([slot.buffers for slot in self._ring])
        elif not self._ring:
            self._fill([self._allocate() for _ in range(self._num_slots)])

    def take(self) -> list[Tensor]:
        """Return the next chunk of each host tensor on the device; the current stream waits for it.

        Call ``give_back`` before the next ``take``.
        """
        if self._position == 0:
            self.prefetch()
        self._ring[0].arrived.wait()
        return self._of_chunk(self._ring[0].buffers, self._order[self._position])

    def give_back(self) -> None:
        """Write the taken chunk to the host after the work queued so far, and reuse its buffers."""
        slot = self._ring.popleft()
        chunk = self._order[self._position]
        device = self._of_chunk(slot.buffers, chunk)
        pairs = zip(self._host_chunk(chunk), _bytes(device), strict=True)
        self._written = self._transfers.copy_out(pairs, self._transfers.mark())
        # The write-backs run in order: if this one is done, so is the one of the chunk that follows
        # into these buffers, which was written in this or in the last pass.
        ahead = self._order[(self._position + self._num_slots) % self.num_chunks]
        self._ring.append(_Slot(slot.buffers, self._fetch(slot.buffers, ahead, self._written)))
        self._position = (self._position + 1) % self.num_chunks

    def synchronize(self) -> None:
        """Wait until the host tensors have every chunk that was given back."""
        if self._written is not None:
            self._written.synchronize()
        # Copies of the prefetched chunks read the host tensors, which the caller may write to now.
        for slot in self._ring:
            slot.arrived.synchronize()

    def _fill(self, free: list[list[Tensor]]) -> None:
        """Fill the ring with the first chunks."""
        after = self._transfers.mark()
        first = zip(self._order, free, strict=False)
        self._ring = deque(_Slot(buffers, self._fetch(buffers, chunk, after)) for chunk, buffers in first)
        self._versions = self._current_versions()

    def _fetch(self, buffers: list[Tensor], chunk: int, after: Transfer) -> Transfer:
        """Start the copies of ``chunk`` into ``buffers``, once ``after`` is done."""
        pairs = zip(_bytes(self._of_chunk(buffers, chunk)), self._host_chunk(chunk), strict=True)
        return self._transfers.copy_in(pairs, after)

    def _allocate(self) -> list[Tensor]:
        device = self._transfers.device
        return [torch.empty(self._chunk_elements, dtype=tensor.dtype, device=device) for tensor in self._host]

    def _of_chunk(self, buffers: list[Tensor], chunk: int) -> list[Tensor]:
        """Return the part of ``buffers`` that ``chunk`` fills."""
        start, stop = self.bounds(chunk)
        return [buffer[: stop - start] for buffer in buffers]

    def _host_chunk(self, chunk: int) -> list[Tensor]:
        """Return the bytes of ``chunk`` of each host tensor."""
        start, stop = self.bounds(chunk)
        sizes = [tensor.element_size() for tensor in self._host]
        return [view[start * size : stop * size] for view, size in zip(self._bytes, sizes, strict=True)]

    def _current_versions(self) -> list[int]:
        return [tensor._version for tensor in self._host]


def _bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return ``tensors`` as 1-D uint8."""
    return [tensor.view(torch.uint8) for tensor in tensors]
