"""Keeps the bytes of a training state as they were when a save began, while training goes on.

Parameters, masters and optimizer states change only in ``optimizer.step()``. A snapshot must
therefore be complete at the next update, not when the save begins:

- Tensors on the host are read in place by the writer. ``before_update`` copies the ones that are
  not yet read. If forward and backward take long enough, nothing is copied.
- Tensors on a GPU are copied to pinned memory on a separate stream, overlapped with forward and
  backward. The writer's thread launches the copies. ``before_update`` makes the update wait for
  the copies on the device.
- Tensors of other devices (XLA) are copied one at a time when the save begins.

A write to a tensor before it is copied is an error, detected by the version counter. On a GPU
every write before ``before_update`` is an error, because the copies may be running. Writes
through ``Tensor.data`` are not counted and not detected.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nxd_memopt.backends import HostTransfers, Transfer
from nxd_memopt.checkpoint.layout import Part
from nxd_memopt.checkpoint.stream import PIECE_BYTES, Entry, bytes_of
from nxd_memopt.memory.host_pool import HostPool

OWNER = "checkpoint snapshot"
# Copies are launched in windows of 32 chunks (of up to 32 MiB); about two windows are queued at a
# time.
_WINDOW_PIECES, _WINDOWS = 32, 2


@dataclass(frozen=True)
class Source:
    """The content of one file entry: a part of a tensor that may be on a device.

    Attributes:
        entry: the entry of the file.
        stored: this rank's tensor.
        part: the box of ``stored`` that is written.
        is_updated_by_optimizer: whether the tensor changes only in ``optimizer.step()`` and not
            in forward.
    """

    entry: Entry
    stored: Tensor
    part: Part
    is_updated_by_optimizer: bool = True

    def flat(self, stored: Tensor | None = None) -> Tensor:
        """Return the part's bytes, 1-D uint8, on the device of ``stored``; a view if the part is
        contiguous.
        """
        stored = self.stored if stored is None else stored
        return bytes_of(self.part.of(stored.contiguous()).contiguous())


class HostReader:
    """Reads the bytes of sources, in order, on the host, without compiling graphs on
    graph-compiling devices.

    Slicing a tensor on such a device would compile a graph for each slice. The full tensor is
    copied instead, once for all of its parts, which are consecutive in a file. One such copy
    exists at a time.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None  # a device tensor and its host copy

    def flat(self, source: Source) -> Tensor:
        """Return the current bytes of ``source``, 1-D uint8, on the host or on a GPU."""
        if source.stored.device.type in ("cpu", "cuda"):
            return source.flat()
        if self._last is None or self._last[0] is not source.stored:
            self._last = None  # free the previous copy before the next one is made
            self._last = (source.stored, source.stored.cpu())
        return source.flat(self._last[1])

    def pieces(self, source: Source) -> Iterator[Tensor]:
        """Yield the current bytes of ``source`` on the host, in chunks of bounded size."""
        flat = self.flat(source)
        for begin in range(0, flat.numel(), PIECE_BYTES):
            yield flat[begin : begin + PIECE_BYTES].cpu()


@dataclass
class _Piece:
    """A chunk of consecutive bytes of a source, inside one block.

    Attributes:
        source: the source.
        begin: first byte in the source.
        end: one after the last byte in the source.
        block: index of the block.
        at: first byte in the block.
        is_copied: whether the block contains the bytes, or a copy was launched.
    """

    source: Source
    begin: int
    end: int
    block: int
    at: int
    is_copied: bool = False

    def place(self, block: Tensor) -> Tensor:
        """Return the chunk's bytes in ``block``."""
        return block[self.at : self.at + self.end - self.begin]


@dataclass
class _Block:
    """A block of the snapshot.

    Attributes:
        waiting: number of chunks that are not yet written.
        memory: the block's memory, allocated at the first copy.
        copied: device copies into the block.
    """

    waiting: int = 0
    memory: Tensor | None = None
    copied: list[Transfer] = field(default_factory=list)


@dataclass
class Snapshot:
    """The bytes of ``sources``, in order, at the time of construction.

    Args:
        sources: the sources in the order of the file.
        pool: host memory for copies.
        transfers: asynchronous copies of the device, or None if it has none.
    """

    sources: Sequence[Source]
    pool: HostPool
    transfers: HostTransfers | None
    _blocks: list[_Block] = field(default_factory=list)
    _pieces: list[list[_Piece]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        # Version counters at the start of the save; any later difference is a write.
        self._versions = [source.stored._version for source in self.sources]
        self._staging = np.empty(self.pool.block_bytes, dtype=np.uint8)
        self._by_device: list[int] = []  # sources that are copied asynchronously by the device
        self._begun: Transfer | None = None
        self._started: list[Transfer] = []
        self._copies_launched = threading.Event()
        self._failure: Exception | None = None
        self._is_complete = False
        self._cut()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _cut(self) -> None:
        """Assign the bytes of the sources to blocks, one after the other."""
        position, block_bytes = 0, self.pool.block_bytes
        for source in self.sources:
            pieces, begin, size_bytes = [], 0, source.entry.size_bytes
            while begin < size_bytes:
                # A source may span several blocks, and a block may contain several small sources.
                block, at = divmod(position, block_bytes)
                count = min(size_bytes - begin, block_bytes - at)
                pieces.append(_Piece(source, begin, begin + count, block, at))
                if block == len(self._blocks):
                    self._blocks.append(_Block())
                self._blocks[block].waiting += 1
                begin, position = begin + count, position + count
            self._pieces.append(pieces)

    def _begin(self) -> None:
        """Copy the sources that may change before ``before_update``, or that cannot be copied
        asynchronously.
        """
        # GPU tensors that forward changes are copied now; GPU tensors that only the optimizer
        # changes are copied later by the writer's thread; the host tensors of the optimizer wait
        # for the update.
        now: list[int] = []
        reader, waits_for_update = HostReader(), False
        for i, source in enumerate(self.sources):
            if self._has_async_copies(source):
                (self._by_device if source.is_updated_by_optimizer else now).append(i)
            elif source.stored.device.type == "cpu" and source.is_updated_by_optimizer:
                waits_for_update = True
            else:
                flat = reader.flat(source)
                for piece in self._pieces[i]:
                    self._copy(piece, flat)
        if self.transfers is not None:
            self._begun = self.transfers.mark()
        for transfer in self._copy_on_device(now):
            # Forward changes these tensors: make the device's next work wait for the copies.
            transfer.wait()
        self._is_complete = not (waits_for_update or self._by_device)

    def start_copies(self) -> None:
        """Launch the asynchronous device copies. The thread that reads the snapshot calls it.

        Launching a thousand copies takes a tenth of a second, and a thread that fills the
        device's queue blocks. Neither should happen in the training thread. At most two windows
        of copies are queued at a time.
        """
        try:
            for _ in self._copy_on_device(self._by_device):
                if len(self._started) > _WINDOWS:
                    self._started[-_WINDOWS - 1].synchronize()
        finally:
            self._copies_launched.set()

    def _has_async_copies(self, source: Source) -> bool:
        """Return whether the tensor of ``source`` is on the device of ``transfers``."""
        return self.transfers is not None and source.stored.device.type == self.transfers.device.type

    def _copy_on_device(self, chosen: Sequence[int]) -> Iterator[Transfer]:
        """Launch the copies of the sources ``chosen`` window by window, and yield each window's
        transfer.

        Versions are compared later, when an update begins or the copy is done: a write may
        overlap with a running copy.
        """
        pieces = [piece for i in chosen for piece in self._pieces[i]]
        for first in range(0, len(pieces), _WINDOW_PIECES):
            # One transfer (one event) per window instead of one per chunk.
            window = pieces[first : first + _WINDOW_PIECES]
            assert self.transfers is not None and self._begun is not None
            transfer = self.transfers.copy_out(self._pairs(window), self._begun)
            self._started.append(transfer)
            for piece in window:
                self._blocks[piece.block].copied.append(transfer)
            yield transfer

    def _pairs(self, window: Iterable[_Piece]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (host chunk, device chunk) for each chunk of ``window``."""
        for piece in window:
            with self._lock:
                target = piece.place(self._memory(piece))
                piece.is_copied = True
            yield target, piece.source.flat()[piece.begin : piece.end]

    def _memory(self, piece: _Piece) -> Tensor:
        """Return the memory of the chunk's block, taking it from the pool if needed."""
        block = self._blocks[piece.block]
        # Blocks whose chunks are all read in place never take memory.
        if block.memory is None:
            block.memory = self.pool.take(OWNER)
        return block.memory

    def _copy(self, piece: _Piece, flat: Tensor) -> None:
        """Copy one chunk synchronously."""
        piece.place(self._memory(piece)).copy_(flat[piece.begin : piece.end])
        piece.is_copied = True

    def before_update(self) -> None:
        """Complete the snapshot. Call it before any write to the tensors; later calls do nothing.

        Errors are raised in the writer's thread, so that ``step()`` never fails on one rank only.
        """
        if self._is_complete:
            return
        # Wait until all copies are launched, then make the device's next work wait for the
        # copies. The host does not wait for the copies themselves.
        if self._by_device:
            self._copies_launched.wait()
        for transfer in self._started:
            transfer.wait()
        # Writer and training thread may reach a chunk at the same time: only one of them copies
        # it.
        with self._lock:
            if self._is_complete:  # the writer failed and closed the snapshot meanwhile
                return
            try:
                self._copy_remaining()
            except Exception as error:  # also RuntimeError: pinned memory cannot be allocated
                self._failure = error
            self._is_complete = True

    def _copy_remaining(self) -> None:
        """Check the versions of the sources and copy the chunks that are not yet copied or read."""
        for i in self._by_device:
            self._require_unchanged(i)  # the copies may have been under way when it was written to
        for i, pieces in enumerate(self._pieces):
            remaining = [piece for piece in pieces if not piece.is_copied]
            if remaining:
                self._require_unchanged(i)
                flat = self.sources[i].flat()
                for piece in remaining:
                    self._copy(piece, flat)

    def _require_unchanged(self, index: int) -> None:
        """Raise ``ValueError`` if the tensor was written to after the save began."""
        source = self.sources[index]
        if source.stored._version != self._versions[index]:
            raise ValueError(
                f"{source.entry.key} was written to (version {source.stored._version}, {self._versions[index]} when "
                "the save began) before it was copied: update parameters through the optimizer that is saved, or call "
                "before_update() first"
            )

    def pieces_of(self, index: int) -> Iterator[Tensor]:
        """Yield the bytes of source ``index``.

        One other thread may call it, in the order of the sources.

        Raises:
            ValueError: a tensor was written to before it was copied, or the pool has no block
                left.
            RuntimeError: host memory could not be allocated or pinned.
        """
        for piece in self._pieces[index]:
            yield self._read(piece, index)
            self._release(piece)

    def _read(self, piece: _Piece, index: int) -> Tensor:
        """Return the bytes of one chunk, from its block or directly from the tensor on the host."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            block = self._blocks[piece.block]
            # Read in place, from host memory: copied to the staging buffer under the lock, so
            # that ``before_update`` waits until the bytes are safe.
            if not piece.is_copied:
                self._require_unchanged(index)
                # numpy copies in this thread only; torch would use threads that compete with
                # training.
                live = piece.source.flat()[piece.begin : piece.end].numpy()
                np.copyto(self._staging[: len(live)], live)
                piece.is_copied = True
                return torch.from_numpy(self._staging[: len(live)])
        # A block may contain chunks of several windows: wait for all of the block's copies.
        for transfer in block.copied:
            transfer.synchronize()
        with self._lock:
            if not self._is_complete and self._has_async_copies(piece.source) and piece.source.is_updated_by_optimizer:
                self._require_unchanged(index)  # no update has begun: any write may have met the copy under way
        assert block.memory is not None
        return piece.place(block.memory)

    def _release(self, piece: _Piece) -> None:
        """Count a chunk as written, and return its block to the pool after the last chunk."""
        with self._lock:
            block = self._blocks[piece.block]
            block.waiting -= 1
            if not block.waiting:
                self._give_back(block)

    def _give_back(self, block: _Block) -> None:
        if block.memory is not None:
            memory, block.memory = block.memory, None
            self.pool.give_back(memory, OWNER)

    def close(self) -> None:
        """Return all memory to the pool.

        Nothing may be read afterwards, and ``before_update`` copies nothing.
        """
        self._copies_launched.set()
        for transfer in self._started:
            transfer.synchronize()  # a running copy still writes to the memory
        with self._lock:
            for block in self._blocks:
                self._give_back(block)
            self._is_complete = True
