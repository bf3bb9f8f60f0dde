"""Keeps the bytes of a training state as they were when a save began, while training goes on.

Parameters, masters and optimizer states change in ``optimizer.step()`` alone. A snapshot therefore need not be complete
when the save begins, only when the next update does:

- tensors on the host are read by the writer where they are; what it has not read when ``before_update`` is called is
  copied then. The copy costs nothing where forward and backward give the writer time enough;
- tensors on a GPU are copied to pinned memory on a stream of their own, next to forward and backward; the writer's
  thread queues the copies. ``before_update`` lets the device's update wait for them;
- tensors of other devices (XLA) are copied one at a time when the save begins.

A tensor that was written to before it was copied is an error: its version counter tells. On a GPU every write before
``before_update`` is one, as the copies may be under way. Writes through ``Tensor.data`` are not counted, and
not seen.
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
_WINDOW_PIECES, _WINDOWS = 32, 2


@dataclass(frozen=True)
class Source:
    """What an entry of a file is made of: a part of a tensor that may be on a device.

    Attributes:
        is_updated_by_optimizer: the tensor changes in ``optimizer.step()`` alone, not in forward.
    """

    entry: Entry
    stored: Tensor
    part: Part
    is_updated_by_optimizer: bool = True

    def flat(self, stored: Tensor | None = None) -> Tensor:
        """Return the part's bytes, 1-D uint8, where ``stored`` is; a view of it where the part is contiguous."""
        stored = self.stored if stored is None else stored
        return bytes_of(self.part.of(stored.contiguous()).contiguous())


class HostReader:
    """Reads the bytes of sources, in order, on the host; devices that compile graphs compile none.

    A part of a tensor of such a device would be a graph of its own: the full tensor is copied, once for all of its
    parts, which follow each other in a file. One such copy exists at a time.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None  # a tensor and its copy on the host

    def flat(self, source: Source) -> Tensor:
        """Return the bytes of ``source``, 1-D uint8, as they are now: on the host, or on a GPU."""
        if source.stored.device.type in ("cpu", "cuda"):
            return source.flat()
        if self._last is None or self._last[0] is not source.stored:
            self._last = None  # frees it before the next one is made
            self._last = (source.stored, source.stored.cpu())
        return source.flat(self._last[1])

    def pieces(self, source: Source) -> Iterator[Tensor]:
        """Yield the bytes of ``source`` as they are now, on the host, in pieces of bounded size."""
        flat = self.flat(source)
        for begin in range(0, flat.numel(), PIECE_BYTES):
            yield flat[begin : begin + PIECE_BYTES].cpu()


@dataclass
class _Piece:
    """Consecutive bytes of a source, of one block at most."""

    source: Source
    begin: int
    end: int
    block: int
    at: int
    is_copied: bool = False

    def place(self, block: Tensor) -> Tensor:
        return block[self.at : self.at + self.end - self.begin]


@dataclass
class _Block:
    """A block of the snapshot: pieces that have yet to be written, and its memory once something was copied to it."""

    waiting: int = 0
    memory: Tensor | None = None
    copied: list[Transfer] = field(default_factory=list)


@dataclass
class Snapshot:
    """The bytes of ``sources``, in order, as they are when it is made.

    Args:
        sources: what is written, in the order of the file.
        pool: where copies go.
        transfers: of the device that most of the tensors are on, if it can copy next to its work.
    """

    sources: Sequence[Source]
    pool: HostPool
    transfers: HostTransfers | None
    _blocks: list[_Block] = field(default_factory=list)
    _pieces: list[list[_Piece]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._versions = [source.stored._version for source in self.sources]
        self._staging = np.empty(self.pool.block_bytes, dtype=np.uint8)
        self._by_device: list[int] = []  # sources whose copies the device makes next to its work
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
        """Lay the sources' bytes out over blocks, one after the other."""
        position, block_bytes = 0, self.pool.block_bytes
        for source in self.sources:
            pieces, begin, size_bytes = [], 0, source.entry.size_bytes
            while begin < size_bytes:
                block, at = divmod(position, block_bytes)
                count = min(size_bytes - begin, block_bytes - at)
                pieces.append(_Piece(source, begin, begin + count, block, at))
                if block == len(self._blocks):
                    self._blocks.append(_Block())
                self._blocks[block].waiting += 1
                begin, position = begin + count, position + count
            self._pieces.append(pieces)

    def _begin(self) -> None:
        """Copy what cannot wait for ``before_update``."""
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
            transfer.wait()  # what forward changes: the device's next work waits
        self._is_complete = not (waits_for_update or self._by_device)

    def start_copies(self) -> None:
        """Start the copies that a device makes next to its other work; the thread that reads the snapshot calls it.

        To queue a thousand copies takes a tenth of a second, and a thread that fills the device's queue waits in it:
        neither should be the training's. At most two windows of copies are queued at a time.
        """
        try:
            for _ in self._copy_on_device(self._by_device):
                if len(self._started) > _WINDOWS:
                    self._started[-_WINDOWS - 1].synchronize()
        finally:
            self._copies_launched.set()

    def _has_async_copies(self, source: Source) -> bool:
        return self.transfers is not None and source.stored.device.type == self.transfers.device.type

    def _copy_on_device(self, chosen: Sequence[int]) -> Iterator[Transfer]:
        """Start the copies of the sources ``chosen`` window by window, and yield each window's transfer.

        Versions are compared later, when an update begins or the copy has landed: a write may meet a copy under way.
        """
        pieces = [piece for i in chosen for piece in self._pieces[i]]
        for first in range(0, len(pieces), _WINDOW_PIECES):
            window = pieces[first : first + _WINDOW_PIECES]
            assert self.transfers is not None and self._begun is not None
            transfer = self.transfers.copy_out(self._pairs(window), self._begun)
            self._started.append(transfer)
            for piece in window:
                self._blocks[piece.block].copied.append(transfer)
            yield transfer

    def _pairs(self, window: Iterable[_Piece]) -> Iterator[tuple[Tensor, Tensor]]:
        for piece in window:
            with self._lock:
                target = piece.place(self._memory(piece))
                piece.is_copied = True
            yield target, piece.source.flat()[piece.begin : piece.end]

    def _memory(self, piece: _Piece) -> Tensor:
        block = self._blocks[piece.block]
        if block.memory is None:
            block.memory = self.pool.take(OWNER)
        return block.memory

    def _copy(self, piece: _Piece, flat: Tensor) -> None:
        piece.place(self._memory(piece)).copy_(flat[piece.begin : piece.end])
        piece.is_copied = True

    def before_update(self) -> None:
        """Complete the snapshot. Call it before anything writes to the tensors; later calls do nothing.

        Errors are raised in the writer, so that ``step()`` never fails on one rank only.
        """
        if self._is_complete:
            return
        if self._by_device:
            self._copies_launched.wait()
        for transfer in self._started:
            transfer.wait()
        with self._lock:
            if self._is_complete:  # closed meanwhile by the writer, which has failed
                return
            try:
                self._copy_remaining()
            except Exception as error:  # of pinned memory that cannot be allocated too, a RuntimeError
                self._failure = error
            self._is_complete = True

    def _copy_remaining(self) -> None:
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
        source = self.sources[index]
        if source.stored._version != self._versions[index]:
            raise ValueError(
                f"{source.entry.key} was written to (version {source.stored._version}, {self._versions[index]} when "
                "the save began) before it was copied: update parameters through the optimizer that is saved, or call "
                "before_update() first"
            )

    def pieces_of(self, index: int) -> Iterator[Tensor]:
        """Yield the bytes of source ``index``; for one other thread, which asks for the sources in order.

        Raises:
            ValueError: something wrote to a tensor before it was copied, or the pool has no block left.
            RuntimeError: the host's memory could not be allocated or pinned.
        """
        for piece in self._pieces[index]:
            yield self._read(piece, index)
            self._release(piece)

    def _read(self, piece: _Piece, index: int) -> Tensor:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            block = self._blocks[piece.block]
            if not piece.is_copied:
                self._require_unchanged(index)
                # numpy copies in this thread alone; torch would start threads, which would compete with training's
                live = piece.source.flat()[piece.begin : piece.end].numpy()
                np.copyto(self._staging[: len(live)], live)
                piece.is_copied = True
                return torch.from_numpy(self._staging[: len(live)])
        for transfer in block.copied:
            transfer.synchronize()
        with self._lock:
            if not self._is_complete and self._has_async_copies(piece.source) and piece.source.is_updated_by_optimizer:
                self._require_unchanged(index)  # no update has begun: any write may have met the copy under way
        assert block.memory is not None
        return piece.place(block.memory)

    def _release(self, piece: _Piece) -> None:
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
        """Give all memory back; nothing may be read any more, and ``before_update`` copies nothing more."""
        self._copies_launched.set()
        for transfer in self._started:
            transfer.synchronize()  # a copy under way still writes to the memory
        with self._lock:
            for block in self._blocks:
                self._give_back(block)
            self._is_complete = True
