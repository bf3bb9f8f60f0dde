"""All-gathers and reductions through memory that the GPUs of one host map (NVLink or PCIe).

Copy engines push the rows of each rank into the memory of the other ranks, followed by a 4-byte
signal. Matmuls keep all multiprocessors; NCCL's kernels would take some of them. A matmul starts
on the rank's own rows at once and waits only for the rows that it needs. NVLink multicast is not
used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_SLOTS = 2  # see PeerMemory.next_slot
_MAX_VIEWS = 256  # cached views of one slot; shapes that vary with every batch would add up
_SUM_BLOCK = 4096  # elements per Triton program
# FLOP of a bf16 matmul per byte that arrives: H200, 650 TFLOP/s next to copies of 375 GB/s
_OPERATIONS_PER_BYTE = 1750
_GRANULARITY_BYTES = 2**21  # granularity of CUDA's memory mappings
_TIMEOUT_MS = 600_000  # NCCL's default: a failed rank must not block the others for ever


class _Slot:
    """Equal buffers on all ranks, mapped by all ranks, with a signal word per pair of ranks."""

    def __init__(self, size_bytes: int, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.size_bytes = size_bytes
        self._rank = group.rank()
        torch.cuda.empty_cache()  # the mapping cannot use blocks that the allocator caches
        # The rendezvous is a collective: all ranks allocate the same sizes in the same order.
        try:
            self._memory = symmetric.empty(size_bytes, dtype=torch.uint8, device=device)
            self._handle: Any = symmetric.rendezvous(self._memory, group)
        except RuntimeError as error:
            raise RuntimeError(
                f"the {group.size()} ranks of a group cannot map {size_bytes} bytes of each "
                "other's GPU memory: set NXD_MEMOPT_PEER_MEMORY=0 on all of them"
            ) from error
        self._write = torch.ops.symm_mem.stream_write_value32_.default
        # Views are cached, because a new view costs the host microseconds per operation.
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype, int], Tensor] = {}
        # Word r of a rank's signal pad announces the rows of rank r: the pads of other ranks are
        # written, the own pad is waited for.
        pad_shape = (group.size(),)
        self._pads = [self._handle.get_signal_pad(rank, pad_shape, torch.uint32) for rank in range(group.size())]
        self._own_pad = self._handle.get_signal_pad(self._rank, pad_shape, torch.int32)

    def of(
        self,
        rank: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        offset: int = 0,
    ) -> Tensor:
        """Return the memory of ``rank`` as a tensor that begins at element ``offset``."""
        key = (rank, shape, dtype, offset)
        if key not in self._views:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # training writes to this memory too
                self._views[key] = self._handle.get_buffer(*key)
        return self._views[key]

    def signal(self, rank: int) -> None:
        """Tell ``rank``, when the current stream gets here, that this rank's rows have arrived.

        ``cuStreamWriteValue32`` is ordered after the preceding copies on its stream. A CUDA graph
        would run signals of another stream only after the last of several consecutive copies.
        """
        self._write(self._pads[rank], self._rank, 1)

    def barrier(self) -> None:
        """Make the current stream wait until the streams of all ranks reach this call."""
        self._handle.barrier(1, _TIMEOUT_MS)  # channel 0 carries the signals of rows

    def wait_for(self, ranks: Sequence[int]) -> None:
        """Make the current stream wait for the signals of ``ranks``."""
        # one kernel launch for all words; without Triton one launch of torch's kernel per rank
        if len(ranks) > 1 and _has_triton():
            wait_for_signals(self._own_pad, ranks)
            return
        for rank in ranks:
            self._handle.wait_signal(rank, 0, _TIMEOUT_MS)


class PeerMemory:
    """Slots and copy streams of one group; used through ``PeerAllGather`` and ``PeerReduction``.

    A slot is a buffer of equal size on every rank that all ranks map. Each kind of operation uses
    two slots in turn. All ranks start the same operations, with the same sizes, in one order."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self.device = device
        self.rank = group.rank()
        self.size = group.size()
        # High-priority streams: one for copies to other ranks, one for local copies of own rows.
        # Sends must not queue up after a local copy, which only ``wait()`` needs.
        self.send_stream = torch.cuda.Stream(device, priority=-1)
        self.local_copy_stream = torch.cuda.Stream(device, priority=-1)
        self._main_reached = torch.cuda.Event()
        # the last stream that used slots
        self._used_on = torch.cuda.current_stream(device)
        self._slots: dict[tuple[type, int], _Slot] = {}
        self._replaced_slots: list[_Slot] = []  # captured graphs may still use these slots
        # becomes True with the first capture and stays so, since graphs may replay at any time
        self._is_captured = False
        # index of the slot that each kind of operation used last
        self._started: dict[type, int] = {PeerAllGather: 0, PeerReduction: 0}
        self._unfinished: dict[type, _Operation] = {}

    def next_slot(self, operation: _Operation, size_bytes: int) -> _Slot:
        """Return the slot of this kind of operation that every rank has finished with.

        Double buffering: the slot's last use is two operations ago. As
        ``collectives.ChunkedAllGather`` requires of its callers, every rank
        enqueued its last read of the slot before it started the operation in between. That
        operation's signals come after these reads, and this rank's stream has waited for the
        signals, at the latest in this call.
        """
        kind = type(operation)
        stream = operation.stream
        if kind in self._unfinished:
            self._finish(self._unfinished[kind], stream)
        self._use_on(stream)
        index = (self._started[kind] + 1) % _SLOTS
        slot = self._slots.get((kind, index))
        if slot is None or slot.size_bytes < size_bytes:
            slot = self._replace_slot(kind, index, size_bytes)
        # Only after the allocation, which may fail: a failure leaves the order of slots unchanged.
        self._started[kind] = index
        self._unfinished[kind] = operation
        return slot

    def _replace_slot(self, kind: type[_Operation], index: int, size_bytes: int) -> _Slot:
        """Allocate a slot of at least ``size_bytes`` in place of a missing or smaller one."""
        # The device finishes with the old slot here, and the rendezvous waits for all ranks: no
        # rank uses the old slot afterwards.
        torch.cuda.synchronize(self.device)
        old = self._slots.get((kind, index))
        rounded = -(-size_bytes // _GRANULARITY_BYTES) * _GRANULARITY_BYTES
        with torch.inference_mode(False):
            slot = _Slot(rounded, self._group, self.device)
        self._slots[kind, index] = slot
        # Captured graphs replay on the addresses of the old slot: it must stay allocated.
        if old is not None and self._is_captured:
            self._replaced_slots.append(old)
        return slot

    def _finish(self, operation: _Operation, stream: torch.cuda.Stream) -> None:
        """Finish ``operation`` on its own stream, and make ``stream`` wait for that stream."""
        try:
            with torch.cuda.stream(operation.stream):
                operation.finish()
        finally:
            self.release(operation)
        if operation.stream != stream:
            _wait_unless_capturing(stream, operation.stream)

    def _use_on(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait for the stream that used slots last.

        That stream has all readers of the slots: each earlier change of streams waited in the same
        way.
        """
        if stream != self._used_on:
            _wait_unless_capturing(stream, self._used_on)
            self._used_on = stream

    def drain(self) -> None:
        """Finish all pending operations; the current stream then waits for all uses of slots."""
        stream = torch.cuda.current_stream(self.device)
        for operation in list(self._unfinished.values()):
            self._finish(operation, stream)
        self._use_on(stream)

    def barrier(self) -> None:
        """Make the current stream wait for the streams of all ranks; every slot is then free."""
        self.drain()
        # Any slot has the words for a barrier. Without a slot nothing was ever sent.
        if self._slots:
            next(iter(self._slots.values())).barrier()
        self._started = dict.fromkeys(self._started, 0)  # each run starts with the same slots

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Put barriers at both ends of a capture, as part of the graph.

        Each barrier resets the order of slots, so a replay uses the same slots wherever it runs.
        Enter it inside ``restored_on_failure``, which handles a failure.
        """
        self._is_captured = True
        self.barrier()
        yield
        self.barrier()

    @contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        """Undo the operations of a capture that fails; none of them ran on the device."""
        started_before = dict(self._started)
        stream_before = self._used_on
        try:
            yield
        except BaseException:
            # Captured copies and signals never ran: undoing the host's bookkeeping is enough.
            for operation in self._unfinished.values():
                operation.drop()
            self._unfinished.clear()
            self._started = started_before
            self._used_on = stream_before
            raise

    @contextmanager
    def copying(
        self,
        stream: torch.cuda.Stream,
        main: torch.cuda.Stream,
        done: torch.cuda.Event,
    ) -> Iterator[None]:
        """Run copies on ``stream`` after the work queued on ``main``; then record ``done``."""
        # The event may be recorded again by the next operation: a wait that is already enqueued
        # refers to the record before it.
        self._main_reached.record(main)
        stream.wait_event(self._main_reached)
        torch.cuda.set_stream(stream)
        try:
            yield
            done.record(stream)
        finally:
            torch.cuda.set_stream(main)

    def release(self, operation: _Operation) -> None:
        """Drop the reference to a finished operation, which frees its tensors."""
        if self._unfinished.get(type(operation)) is operation:
            del self._unfinished[type(operation)]

    def allocated_bytes(self) -> int:
        """Return this rank's bytes in slots, which the caching allocator does not count."""
        slots = (*self._slots.values(), *self._replaced_slots)
        return sum(slot.size_bytes for slot in slots)

    def peers(self, step: int) -> Iterator[int]:
        """Yield the other ranks in the order of sends to them (1) or arrivals from them (-1)."""
        for distance in range(1, self.size):
            yield (self.rank + step * distance) % self.size


class _Operation:
    """Common part of gathers and reductions: rows in flight, and the waits of the main stream."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        # looked up once: a look-up costs the host as much as a launch
        self.stream = torch.cuda.current_stream(memory.device)
        # Rows in flight stay alive until the main stream has waited for the copies: the allocator
        # does not know of reads on other streams, and would reuse the memory.
        self._in_flight: list[Tensor] = []
        self._sent = torch.cuda.Event()  # one event per operation: do not wait for later sends
        self._is_finished = False

    def _send(self, rows: Tensor, ranks: Iterable[int], slot: _Slot) -> None:
        """Push ``rows`` into this rank's block in the memory of each of ``ranks``, and signal."""
        memory = self._memory
        shape = tuple(rows.shape)
        self._in_flight.append(rows)
        with memory.copying(memory.send_stream, self.stream, self._sent):
            for rank in ranks:
                # Rank r's rows begin at element r * n of every slot. The signal follows on the same
                # stream, so that it cannot arrive before the rows.
                slot.of(rank, shape, rows.dtype, memory.rank * rows.numel()).copy_(rows)
                slot.signal(rank)

    def _receive(self) -> None:
        """Make the current stream wait for the rows that have not arrived."""
        raise NotImplementedError

    def drop(self) -> None:
        """Mark the operation as finished; it never ran."""
        self._is_finished = True
        self._in_flight.clear()

    def finish(self) -> None:
        """Make the operation's stream, the current one, wait for incoming and outgoing rows."""
        if not self._is_finished:
            self._receive()
            self._sent.wait(self.stream)
            self._is_finished = True
            self._in_flight.clear()
            self._memory.release(self)


def _wait_unless_capturing(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    # A wait for a stream outside the capture would invalidate the capture, and is not needed:
    # ``CudaBackend.capture`` drains peer memory first, and replays drain it again.
    if not torch.cuda.is_current_stream_capturing():
        stream.wait_stream(other)


class PeerAllGather(_Operation):
    """``collectives.ChunkedAllGather`` into this rank's slot.

    Args:
        memory: of the group.
        shard: rows of this rank, ``[n, ...]``.
        materialize: see ``Collectives.start_all_gather``; copy this rank's own rows into the slot
            too.
    """

    def __init__(self, memory: PeerMemory, shard: Tensor, *, materialize: bool = True) -> None:
        super().__init__(memory)
        self._is_materialized = materialize
        self._own_rows_copied = torch.cuda.Event()
        self._shard = shard.contiguous()
        self.length = shard.size(0) * memory.size
        self._slot = memory.next_slot(self, self._shard.nbytes * memory.size)
        full_shape = (self.length, *shard.shape[1:])
        self._full = self._slot.of(memory.rank, full_shape, shard.dtype)
        # Rank r sends to r + 1 first, so that no two ranks start with the same destination. Rows
        # of r - 1 therefore arrive first.
        self._missing = list(memory.peers(-1))
        self._send(self._shard, memory.peers(1), self._slot)
        # Own rows are copied on another stream, and for wait() only: chunks() yields the shard
        # itself.
        if materialize:
            with memory.copying(memory.local_copy_stream, self.stream, self._own_rows_copied):
                self._full[memory.rank * shard.size(0) :][: shard.size(0)].copy_(self._shard)

    def _receive(self, count: int | None = None) -> None:
        # self._missing is in order of arrival: wait for the first ``count`` ranks, or for all
        self._slot.wait_for(self._missing[:count])
        del self._missing[:count]
        if self._is_materialized and not self._missing:
            self._own_rows_copied.wait(self.stream)

    def chunks(self, operations_per_element: float = 0) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's own rows, then blocks of the rows that should have arrived."""
        own = self._shard.size(0)
        yield self._memory.rank * own, self._shard
        # Chunks that arrive while the caller works on one chunk: the time of the operations on an
        # element, divided by the time in which the element's bytes arrive.
        operations_per_arrival = self._shard.element_size() * _OPERATIONS_PER_BYTE
        blocks = arrivals(self._missing, operations_per_element / operations_per_arrival)
        for i, block in enumerate(blocks):
            if i + 1 < len(blocks):
                self._receive(len(block))
            else:
                # the last rows: also wait for this rank's sends, whose rows are then released
                self.finish()
            # ranks of a block descend: the rows of block[-1] come first in memory
            start = block[-1] * own
            stop = (block[0] + 1) * own
            yield start, self._full[start:stop]

    def wait(self, *, copy: bool = False) -> Tensor:
        assert self._is_materialized, "own rows were left out of what was gathered"
        self.finish()
        if copy:
            return self._full.clone()
        return self._full


def arrivals(sources: Sequence[int], pace: float) -> list[list[int]]:
    """Cut ``sources`` into blocks, at the points where the user should wait for more rows.

    Args:
        sources: ranks in order of arrival; consecutive and descending, except for one
            wrap-around.
        pace: number of chunks that arrive while the user works on one.
    """
    blocks: list[list[int]] = []
    # Time in units of one chunk's arrival; at ``pace`` the user has finished its own chunk. Each
    # block is what has arrived by then, at least one chunk, cut where the row order wraps around.
    now = pace
    taken = 0
    while taken < len(sources):
        arrived = min(len(sources), max(taken + 1, int(now)))
        # the user starts when the block has arrived, and spends ``pace`` on each of its chunks
        now = max(now, arrived) + pace * (arrived - taken)
        block = list(sources[taken:arrived])
        blocks += _cut_at_wrap_around(block)
        taken = arrived
    return blocks


def _cut_at_wrap_around(ranks: list[int]) -> list[list[int]]:
    """Cut ``ranks`` where they ascend, from rank 0 to the last rank.

    Rows of descending ranks are one contiguous region of the slot; the rows of rank 0 and of the
    last rank are its two ends.
    """
    for i in range(1, len(ranks)):
        if ranks[i] > ranks[i - 1]:
            return [ranks[:i], ranks[i:]]
    return [ranks]


class PeerReduction(_Operation):
    """``collectives.ChunkedReduction`` that sums the rows of all ranks in fp32, in rank order."""

    def __init__(self, memory: PeerMemory, length: int) -> None:
        super().__init__(memory)
        self._own_length = length // memory.size
        # Other ranks' rows first: their copies overlap with the matmuls of the next chunks.
        order = (*memory.peers(1), memory.rank)
        self.chunks = [(rank * self._own_length, (rank + 1) * self._own_length) for rank in order]
        self._slot: _Slot | None = None
        self._own: Tensor | None = None
        self._missing = list(order)

    def put(self, start: int, rows: Tensor) -> None:
        rows = rows.contiguous()
        if self._slot is None:
            self._slot = self._memory.next_slot(self, rows.nbytes * self._memory.size)
        rank = start // self._own_length
        self._missing.remove(rank)
        # own rows stay where they are until the sum reads them
        if rank == self._memory.rank:
            self._own = rows
        else:
            self._send(rows, (rank,), self._slot)

    def abandon(self) -> None:
        """Send the missing signals: without them other ranks would wait, now or later."""
        if self._slot is None:
            self.drop()
        else:
            with self._memory.copying(self._memory.send_stream, self.stream, self._sent):
                # A signal without rows: ranks that wait for it sum stale rows, which the contract
                # of abandon() permits.
                for rank in self._missing:
                    if rank != self._memory.rank:
                        self._slot.signal(rank)
            self._missing.clear()
            self.finish()

    def _receive(self) -> None:
        assert self._slot is not None
        assert not self._missing, f"another reduction began before rows for the ranks {self._missing} were handed over"
        self._slot.wait_for(list(self._memory.peers(-1)))

    def wait(self) -> Tensor:
        self.finish()
        memory = self._memory
        own = self._own
        assert self._slot is not None
        assert own is not None
        parts = self._slot.of(memory.rank, (memory.size, *own.shape), own.dtype)
        return sum_over_ranks(own, parts, memory.rank)


def sum_over_ranks(own: Tensor, parts: Tensor, rank: int) -> Tensor:
    """Sum ``parts``, ``[size, ...]``, in rank order, in fp32 or wider.

    Args:
        own: the part of ``rank``, which is not in ``parts``.
        parts: received rows of all ranks; element ``rank`` may be overwritten.
        rank: this rank in the group.
    """
    if len(parts) == 2:
        # one addition rounds once, as a sum in fp32 does
        return own + parts[1 - rank]
    if own.dtype == torch.float64 or not _has_triton():
        # own rows complete the slot: [size, ...] is summed by one torch kernel
        parts[rank].copy_(own)
        return parts.sum(0)
    # One pass over memory: reads each part once, accumulates in fp32 registers, rounds once.
    result = torch.empty_like(own)
    count = own.numel()
    grid = (-(-count // _SUM_BLOCK),)
    _kernels().sum_over_ranks[grid](
        own,
        parts,
        result,
        count,
        len(parts),
        rank,
        _SUM_BLOCK,
        num_warps=8,
    )
    return result


def wait_for_signals(pad: Tensor, ranks: Sequence[int], timeout_ms: int = _TIMEOUT_MS) -> None:
    """Make the current stream wait for words ``ranks`` of ``pad`` to be 1; reset them to 0."""
    bits = sum(1 << rank for rank in ranks)
    _kernels().wait_for_signals[(1,)](pad, bits, timeout_ms, len(pad), num_warps=1)


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _kernels() -> Any:
    from nxd_memopt.backends.cuda import peer_memory_kernels

    return peer_memory_kernels
