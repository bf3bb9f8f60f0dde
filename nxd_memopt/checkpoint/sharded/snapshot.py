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
from nxd_memopt.checkpoint.stream import CHUNK_BYTES, Entry, bytes_of
from nxd_memopt.memory.host_pool import HostPool

OWNER = "checkpoint snapshot"
# Copies are launched in windows of 32 chunks (up to 1 GiB); about two windows are queued at a
# time.
_CHUNKS_PER_WINDOW = 32
_QUEUED_WINDOWS = 2


@dataclass(frozen=True)
class SnapshotSource:
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
        if stored is None:
            stored = self.stored
        # ``part`` describes ranges of the flat row-major tensor, so the tensor must be contiguous
        # before the box is cut out of it. Both calls are free for the usual contiguous tensors;
        # only a box that is narrowed along an inner dimension is copied.
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

    def flat(self, source: SnapshotSource) -> Tensor:
        """Return the current bytes of ``source``, 1-D uint8, on the host or on a GPU."""
        if source.stored.device.type in ("cpu", "cuda"):
            return source.flat()
        if self._last is None or self._last[0] is not source.stored:
            self._last = None  # free the previous copy before the next one is made
            self._last = (source.stored, source.stored.cpu())
        return source.flat(self._last[1])

    def chunks(self, source: SnapshotSource) -> Iterator[Tensor]:
        """Yield the current bytes of ``source`` on the host, in chunks of bounded size."""
        flat = self.flat(source)
        for begin in range(0, flat.numel(), CHUNK_BYTES):
            yield flat[begin : begin + CHUNK_BYTES].cpu()


@dataclass
class _Chunk:
    """A chunk of consecutive bytes of a source, inside one block.

    Attributes:
        source: the source.
        begin: first byte in the source.
        end: one after the last byte in the source.
        block: index of the block.
        block_offset: first byte in the block.
        is_copied: whether the block contains the bytes, or a copy was launched.
    """

    source: SnapshotSource
    begin: int
    end: int
    block: int
    block_offset: int
    is_copied: bool = False

    def view_in(self, block: Tensor) -> Tensor:
        """Return the chunk's bytes in ``block``."""
        return block[self.block_offset : self.block_offset + self.end - self.begin]


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

    sources: Sequence[SnapshotSource]
    pool: HostPool
    transfers: HostTransfers | None
    _blocks: list[_Block] = field(default_factory=list)
    _chunks: list[list[_Chunk]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Protects blocks, chunks and ``_is_complete``, which the training thread
        # (``before_update``) and the writer's thread (``chunks_of``) both change.
        self._lock = threading.Lock()
        # Version counters at the start of the save; any later difference is a write.
        self._versions = [source.stored._version for source in self.sources]
        # Receives one chunk at a time that the writer reads directly from a host tensor.
        self._staging = np.empty(self.pool.block_bytes, dtype=np.uint8)
        self._async_sources: list[int] = []  # sources that are copied asynchronously by the device
        self._start_mark: Transfer | None = None
        self._window_transfers: list[Transfer] = []
        self._copies_launched = threading.Event()
        self._failure: Exception | None = None
        self._is_complete = False
        self._assign_blocks()
        try:
            self._copy_unstable_sources()
        except BaseException:
            self.close()
            raise

    def _assign_blocks(self) -> None:
        """Assign the bytes of the sources to blocks, one after the other."""
        block_bytes = self.pool.block_bytes
        position = 0  # in the concatenation of all sources
        for source in self.sources:
            chunks = []
            begin = 0  # in the source
            size_bytes = source.entry.size_bytes
            while begin < size_bytes:
                # A source may span several blocks, and a block may contain several small sources.
                # A chunk ends where its source or its block ends.
                block, block_offset = divmod(position, block_bytes)
                count = min(size_bytes - begin, block_bytes - block_offset)
                chunks.append(_Chunk(source, begin, begin + count, block, block_offset))
                if block == len(self._blocks):
                    self._blocks.append(_Block())
                self._blocks[block].waiting += 1
                begin += count
                position += count
            self._chunks.append(chunks)

    def _copy_unstable_sources(self) -> None:
        """Copy the sources that may change before ``before_update``, or that cannot be copied
        asynchronously.
        """
        # GPU tensors that forward changes are copied now; GPU tensors that only the optimizer
        # changes are copied later by the writer's thread; the host tensors of the optimizer wait
        # for the update. All other tensors (host buffers, XLA) are copied synchronously.
        async_now: list[int] = []
        waits_for_update = False
        reader = HostReader()
        for i, source in enumerate(self.sources):
            if self._has_async_copies(source):
                if source.is_updated_by_optimizer:
                    self._async_sources.append(i)
                else:
                    async_now.append(i)
            elif source.stored.device.type == "cpu" and source.is_updated_by_optimizer:
                waits_for_update = True
            else:
                flat = reader.flat(source)
                for chunk in self._chunks[i]:
                    self._copy(chunk, flat)
        # All copies, also those that the writer's thread launches later, start after the work
        # that is queued on the device now, and not after the next forward and backward.
        if self.transfers is not None:
            self._start_mark = self.transfers.mark()
        for transfer in self._copy_on_device(async_now):
            # Forward changes these tensors: make the device's next work wait for the copies.
            transfer.wait()
        self._is_complete = not (waits_for_update or self._async_sources)

    def start_copies(self) -> None:
        """Launch the asynchronous device copies. The thread that reads the snapshot calls it.

        Launching a thousand copies takes a tenth of a second, and a thread that fills the
        device's queue blocks. Neither should happen in the training thread. At most two windows
        of copies are queued at a time.
        """
        try:
            for _ in self._copy_on_device(self._async_sources):
                if len(self._window_transfers) > _QUEUED_WINDOWS:
                    self._window_transfers[-_QUEUED_WINDOWS - 1].synchronize()
        finally:
            # Also after an error: ``before_update`` waits for this event in the training thread.
            self._copies_launched.set()

    def _has_async_copies(self, source: SnapshotSource) -> bool:
        """Return whether the tensor of ``source`` is on the device of ``transfers``."""
        if self.transfers is None:
            return False
        return source.stored.device.type == self.transfers.device.type

    def _copy_on_device(self, indices: Sequence[int]) -> Iterator[Transfer]:
        """Launch the copies of the sources ``indices`` window by window, and yield each window's
        transfer.

        Versions are compared later, when an update begins or the copy is done: a write may
        overlap with a running copy.
        """
        chunks = [chunk for i in indices for chunk in self._chunks[i]]
        for first in range(0, len(chunks), _CHUNKS_PER_WINDOW):
            # One transfer (one event) per window instead of one per chunk.
            window = chunks[first : first + _CHUNKS_PER_WINDOW]
            assert self.transfers is not None and self._start_mark is not None
            transfer = self.transfers.copy_out(self._pairs(window), self._start_mark)
            self._window_transfers.append(transfer)
            for chunk in window:
                self._blocks[chunk.block].copied.append(transfer)
            yield transfer

    def _pairs(self, window: Iterable[_Chunk]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (host chunk, device chunk) for each chunk of ``window``."""
        for chunk in window:
            # Marked when the copy is launched, not when it is done: readers wait for the block's
            # transfers before they use its memory.
            with self._lock:
                target = chunk.view_in(self._memory_of(chunk))
                chunk.is_copied = True
            yield target, chunk.source.flat()[chunk.begin : chunk.end]

    def _memory_of(self, chunk: _Chunk) -> Tensor:
        """Return the memory of the chunk's block, taking it from the pool if needed."""
        block = self._blocks[chunk.block]
        # Blocks whose chunks are all read in place never take memory.
        if block.memory is None:
            block.memory = self.pool.take(OWNER)
        return block.memory

    def _copy(self, chunk: _Chunk, flat: Tensor) -> None:
        """Copy one chunk synchronously."""
        chunk.view_in(self._memory_of(chunk)).copy_(flat[chunk.begin : chunk.end])
        chunk.is_copied = True

    def before_update(self) -> None:
        """Complete the snapshot. Call it before any write to the tensors; later calls do nothing.

        Errors are raised in the writer's thread, so that ``step()`` never fails on one rank only.
        """
        if self._is_complete:
            return
        # Wait until all copies are launched, then make the device's next work wait for the
        # copies. The host does not wait for the copies themselves.
        if self._async_sources:
            self._copies_launched.wait()
        for transfer in self._window_transfers:
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
        # A device copy that ran during a write may contain old and new bytes. Only writes after
        # ``before_update`` are ordered after the copies, so any earlier write is an error.
        for i in self._async_sources:
            self._require_unchanged(i)
        for i, chunks in enumerate(self._chunks):
            remaining = [chunk for chunk in chunks if not chunk.is_copied]
            if remaining:
                self._require_unchanged(i)
                flat = self.sources[i].flat()
                for chunk in remaining:
                    self._copy(chunk, flat)

    def _require_unchanged(self, index: int) -> None:
        """Raise ``ValueError`` if the tensor was written to after the save began."""
        source = self.sources[index]
        version = source.stored._version
        if version != self._versions[index]:
            raise ValueError(
                f"{source.entry.key} was written to (version {version}, {self._versions[index]} "
                "when the save began) before it was copied: update parameters through the "
                "optimizer that is saved, or call before_update() first"
            )

    def chunks_of(self, index: int) -> Iterator[Tensor]:
        """Yield the bytes of source ``index``.

        One other thread may call it, in the order of the sources.

        Raises:
            ValueError: a tensor was written to before it was copied, or the pool has no block
                left.
            RuntimeError: host memory could not be allocated or pinned.
        """
        for chunk in self._chunks[index]:
            yield self._read(chunk, index)
            self._count_written(chunk)

    def _read(self, chunk: _Chunk, index: int) -> Tensor:
        """Return the bytes of one chunk, from its block or directly from the tensor on the host."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            block = self._blocks[chunk.block]
            if not chunk.is_copied:
                # Read in place, from host memory: copied to the staging buffer under the lock, so
                # that ``before_update`` waits until the bytes are safe. The file would otherwise
                # get bytes of the next step if the update runs during the write to the disk.
                self._require_unchanged(index)
                # numpy copies in this thread only; torch would use threads that compete with
                # training.
                live = chunk.source.flat()[chunk.begin : chunk.end].numpy()
                np.copyto(self._staging[: len(live)], live)
                chunk.is_copied = True
                return torch.from_numpy(self._staging[: len(live)])
        # A block may contain chunks of several windows: wait for all of the block's copies.
        for transfer in block.copied:
            transfer.synchronize()
        # No update has begun, so ``_copy_remaining`` has not compared the versions: a write since
        # the save began may have overlapped with the device's copy. After an update the versions
        # differ anyway and have been compared.
        is_async = self._has_async_copies(chunk.source) and chunk.source.is_updated_by_optimizer
        with self._lock:
            if is_async and not self._is_complete:
                self._require_unchanged(index)
        assert block.memory is not None
        return chunk.view_in(block.memory)

    def _count_written(self, chunk: _Chunk) -> None:
        """Count a chunk as written, and return its block to the pool after the last chunk."""
        with self._lock:
            block = self._blocks[chunk.block]
            block.waiting -= 1
            if not block.waiting:
                self._release_memory(block)

    def _release_memory(self, block: _Block) -> None:
        memory = block.memory
        if memory is not None:
            # Reset first: ``close`` runs after all chunks are written too, and must not return
            # the same block twice.
            block.memory = None
            self.pool.give_back(memory, OWNER)

    def close(self) -> None:
        """Return all memory to the pool.

        Nothing may be read afterwards, and ``before_update`` copies nothing.
        """
        self._copies_launched.set()
        for transfer in self._window_transfers:
            transfer.synchronize()  # a running copy still writes to the memory
        with self._lock:
            for block in self._blocks:
                self._release_memory(block)
            self._is_complete = True
