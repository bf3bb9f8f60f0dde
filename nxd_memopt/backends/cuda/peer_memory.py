"""All-gathers and reductions through memory that the GPUs of one host map into each other (NVLink or PCIe).

Each rank pushes its rows into the others' memory by the copy engines, and a 4-byte signal behind them, so that matmuls
keep all multiprocessors; NCCL's kernels would take some from the matmul beside them. A matmul waits for the rows it
needs only, and starts on this rank's own at once. NVLink multicast is not used.
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
_MOST_VIEWS = 256
_SUM_BLOCK = 4096
_OPERATIONS_PER_BYTE = 1750  # of a bf16 matmul while a byte arrives: H200, 650 TFLOP/s beside copies of 375 GB/s
_GRANULARITY_BYTES = 2**21  # what CUDA maps at once
_TIMEOUT_MS = 600_000  # NCCL's default: a rank that died must not leave the others waiting for ever


class _Slot:
    """Memory of one size on every rank, each mapped into all, with a word for each pair of ranks."""

    def __init__(self, size_bytes: int, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.size_bytes = size_bytes
        self._rank = group.rank()
        torch.cuda.empty_cache()  # what the allocator keeps free is out of the mapping's reach
        try:
            self._memory = symmetric.empty(size_bytes, dtype=torch.uint8, device=device)
            self._handle: Any = symmetric.rendezvous(self._memory, group)
        except RuntimeError as error:
            raise RuntimeError(
                f"the {group.size()} ranks of a group cannot map {size_bytes} bytes of each other's GPU memory: set "
                "NXD_MEMOPT_PEER_MEMORY=0 on all of them"
            ) from error
        self._write = torch.ops.symm_mem.stream_write_value32_.default
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype, int], Tensor] = {}  # a new one takes microseconds
        self._pads = [self._handle.get_signal_pad(rank, (group.size(),), torch.uint32) for rank in range(group.size())]
        self._own_pad = self._handle.get_signal_pad(self._rank, (group.size(),), torch.int32)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """The memory of ``rank`` as a tensor, from its ``offset``-th element on."""
        key = (rank, shape, dtype, offset)
        if key not in self._views:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # training writes to it too
                self._views[key] = self._handle.get_buffer(*key)
        return self._views[key]

    def signal(self, rank: int) -> None:
        """When the current stream comes here, tell ``rank`` that this rank's rows are there.

        ``cuStreamWriteValue32`` is ordered behind the rows of its stream. A graph runs signals of another stream only
        behind the last of the copies that follow each other.
        """
        self._write(self._pads[rank], self._rank, 1)

    def meet(self) -> None:
        """Let the current stream wait until those of all ranks come here."""
        self._handle.barrier(1, _TIMEOUT_MS)  # the signals of rows are those of channel 0

    def wait_for(self, ranks: Sequence[int]) -> None:
        """Let the current stream wait for the signals of ``ranks``."""
        if len(ranks) > 1 and _has_triton():
            wait_for_signals(self._own_pad, ranks)
            return
        for rank in ranks:
            self._handle.wait_signal(rank, 0, _TIMEOUT_MS)


class PeerMemory:
    """Some ranks' slots, and streams of their copies. All ranks start the same operations in one order."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self.device = group, device
        self.rank, self.size = group.rank(), group.size()
        self.sending, self.keeping = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._made = torch.cuda.Event()
        self._used_on = torch.cuda.current_stream(device)
        self._slots: dict[tuple[type, int], _Slot] = {}
        self._outgrown: list[_Slot] = []  # captured graphs may use them still
        self._is_captured = False
        self._started: dict[type, int] = {PeerAllGather: 0, PeerReduction: 0}
        self._unfinished: dict[type, _Operation] = {}

    def next_slot(self, operation: _Operation, size_bytes: int) -> _Slot:
        """The other slot of this kind of operation, that every rank has done with.

        Its last use is two operations ago, and each rank had given its stream all that reads it before it began the one
        in between, as the contract asks. That one's signals follow on those streams, and this rank's stream waited for
        them: at the latest here.
        """
        kind, stream = type(operation), operation.stream
        if kind in self._unfinished:
            self._finish(self._unfinished[kind], stream)
        self._use_on(stream)
        index = (self._started[kind] + 1) % _SLOTS
        slot = self._slots.get((kind, index))
        if slot is None or slot.size_bytes < size_bytes:
            torch.cuda.synchronize(self.device)  # the rendezvous waits for all ranks: nobody uses the old one
            outgrown = [] if slot is None or not self._is_captured else [slot]
            rounded = -(-size_bytes // _GRANULARITY_BYTES) * _GRANULARITY_BYTES
            with torch.inference_mode(False):
                slot = self._slots[kind, index] = _Slot(rounded, self._group, self.device)
            self._outgrown += outgrown
        self._started[kind], self._unfinished[kind] = index, operation
        return slot

    def _finish(self, operation: _Operation, stream: torch.cuda.Stream) -> None:
        try:
            with torch.cuda.stream(operation.stream):
                operation.finish()
        finally:
            self.forget(operation)
        if operation.stream != stream:
            _let_wait(stream, operation.stream)

    def _use_on(self, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` wait for the one that used slots last, to which all that reads them was given."""
        if stream != self._used_on:
            _let_wait(stream, self._used_on)
            self._used_on = stream

    def settle(self) -> None:
        """Let the current stream wait for all that uses slots; operations that nobody has asked for end."""
        stream = torch.cuda.current_stream(self.device)
        for operation in list(self._unfinished.values()):
            self._finish(operation, stream)
        self._use_on(stream)

    def meet(self) -> None:
        """Let the current stream wait until those of all ranks come here: every slot is free then.

        The operations behind it have the same slots each time.
        """
        self.settle()
        if self._slots:
            next(iter(self._slots.values())).meet()
        self._started = dict.fromkeys(self._started, 0)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around what a graph records: its slots do not take turns with those of what runs before and behind it."""
        self._is_captured = True
        self.meet()
        yield
        self.meet()

    @contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        """Around a capture: where it fails, up to its end, nothing that it began was given to the device."""
        before = dict(self._started), self._used_on
        try:
            yield
        except BaseException:
            for operation in self._unfinished.values():
                operation.drop()
            self._unfinished.clear()
            self._started, self._used_on = before
            raise

    @contextmanager
    def copying(self, stream: torch.cuda.Stream, main: torch.cuda.Stream, done: torch.cuda.Event) -> Iterator[None]:
        """Inside, on ``stream``, behind all that ``main`` has been given; ``done`` is its end."""
        self._made.record(main)
        stream.wait_event(self._made)
        torch.cuda.set_stream(stream)
        try:
            yield
            done.record(stream)
        finally:
            torch.cuda.set_stream(main)

    def forget(self, operation: _Operation) -> None:
        """It is finished, and its tensors are not kept alive."""
        if self._unfinished.get(type(operation)) is operation:
            del self._unfinished[type(operation)]

    def allocated_bytes(self) -> int:
        """This rank's share; the caching allocator does not count it."""
        return sum(slot.size_bytes for slot in (*self._slots.values(), *self._outgrown))

    def others(self, step: int) -> Iterator[int]:
        """The other ranks in the order in which rows are sent to them (1), or arrive from them (-1)."""
        for distance in range(1, self.size):
            yield (self.rank + step * distance) % self.size


class _Operation:
    """What gathers and reductions share: rows on their way, and the main stream's part in it."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self.stream = torch.cuda.current_stream(memory.device)  # takes as long as a launch: looked up once
        self._sending: list[Tensor] = []  # alive until the main stream has waited for their copies
        self._sent = torch.cuda.Event()  # its own: what later operations send need not be waited for
        self._is_finished = False

    def _send(self, rows: Tensor, ranks: Iterable[int], slot: _Slot) -> None:
        """Push ``rows`` to its place in the memory of each of ``ranks``: that of this rank's number."""
        memory, shape = self._memory, tuple(rows.shape)
        self._sending.append(rows)
        with memory.copying(memory.sending, self.stream, self._sent):
            for rank in ranks:
                slot.of(rank, shape, rows.dtype, memory.rank * rows.numel()).copy_(rows)
                slot.signal(rank)

    def _receive(self) -> None:
        """Let the current stream wait for what has not arrived."""
        raise NotImplementedError

    def drop(self) -> None:
        """It never ran."""
        self._is_finished = True
        self._sending.clear()

    def finish(self) -> None:
        """Let the operation's stream, which is the current one, wait for all that arrives and all that leaves."""
        if not self._is_finished:
            self._receive()
            self._sent.wait(self.stream)
            self._is_finished = True
            self._sending.clear()
            self._memory.forget(self)


def _let_wait(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    if not torch.cuda.is_current_stream_capturing():  # before a capture the device was idle
        stream.wait_stream(other)


class PeerAllGather(_Operation):
    """See ``pieces.ChunkedAllGather``. The others' rows come into this rank's slot.

    Args:
        materialize: as for ``Backend.start_all_gather``; this rank's own rows are copied there only then.
    """

    def __init__(self, memory: PeerMemory, shard: Tensor, *, materialize: bool = True) -> None:
        super().__init__(memory)
        self._is_materialized = materialize
        self._kept = torch.cuda.Event()
        self._shard = shard.contiguous()
        self.length = shard.size(0) * memory.size
        slot = memory.next_slot(self, self._shard.nbytes * memory.size)
        self._slot = slot
        self._whole = slot.of(memory.rank, (self.length, *shard.shape[1:]), shard.dtype)
        self._missing = list(memory.others(-1))
        self._send(self._shard, memory.others(1), slot)
        if materialize:
            with memory.copying(memory.keeping, self.stream, self._kept):
                self._whole[memory.rank * shard.size(0) :][: shard.size(0)].copy_(self._shard)

    def _receive(self, count: int | None = None) -> None:
        self._slot.wait_for(self._missing[:count])
        del self._missing[:count]
        if self._is_materialized and not self._missing:
            self._kept.wait(self.stream)

    def pieces(self, operations_per_element: float = 0) -> Iterator[tuple[int, Tensor]]:
        """Own rows, then those that should have arrived."""
        own = self._shard.size(0)
        yield self._memory.rank * own, self._shard
        blocks = arrivals(self._missing, operations_per_element / (self._shard.element_size() * _OPERATIONS_PER_BYTE))
        for i, block in enumerate(blocks):
            if i + 1 < len(blocks):
                self._receive(len(block))
            else:
                self.finish()
            yield block[-1] * own, self._whole[block[-1] * own : (block[0] + 1) * own]

    def wait(self, *, copy: bool = False) -> Tensor:
        assert self._is_materialized, "own rows were left out of what was gathered"
        self.finish()
        return self._whole.clone() if copy else self._whole


def arrivals(sources: Sequence[int], pace: float) -> list[list[int]]:
    """``sources``, ranks in the order in which their rows arrive, cut where their user should wait for more.

    Args:
        sources: consecutive and descending, but for one wrap.
        pace: how many chunks arrive while the user works on one.
    """
    blocks: list[list[int]] = []
    now, taken = pace, 0  # in arrivals of a chunk; the user's own chunk is done
    while taken < len(sources):
        arrived = min(len(sources), max(taken + 1, int(now)))
        now = max(now, arrived) + pace * (arrived - taken)
        block = list(sources[taken:arrived])
        wrap = next((i for i in range(1, len(block)) if block[i] > block[i - 1]), len(block))
        blocks += [part for part in (block[:wrap], block[wrap:]) if part]
        taken = arrived
    return blocks


class PeerReduction(_Operation):
    """See ``pieces.ChunkedReduction``. Each rank sums what all have sent it, in fp32 and in the order of ranks."""

    def __init__(self, memory: PeerMemory, length: int) -> None:
        super().__init__(memory)
        self._own_length = length // memory.size
        order = (*memory.others(1), memory.rank)
        self.pieces = [(rank * self._own_length, (rank + 1) * self._own_length) for rank in order]
        self._slot: _Slot | None = None
        self._own: Tensor | None = None
        self._missing = list(order)

    def put(self, start: int, rows: Tensor) -> None:
        rows = rows.contiguous()
        if self._slot is None:
            self._slot = self._memory.next_slot(self, rows.nbytes * self._memory.size)
        rank = start // self._own_length
        self._missing.remove(rank)
        if rank == self._memory.rank:
            self._own = rows
        else:
            self._send(rows, (rank,), self._slot)

    def abandon(self) -> None:
        """The others still get their signals, without which they would wait, now or in a later operation."""
        if self._slot is None:
            self.drop()
        else:
            with self._memory.copying(self._memory.sending, self.stream, self._sent):
                for rank in self._missing:
                    if rank != self._memory.rank:
                        self._slot.signal(rank)
            self._missing.clear()
            self.finish()

    def _receive(self) -> None:
        assert self._slot is not None
        assert not self._missing, f"another reduction began before rows for the ranks {self._missing} were handed over"
        self._slot.wait_for(list(self._memory.others(-1)))

    def wait(self) -> Tensor:
        self.finish()
        memory, slot, own = self._memory, self._slot, self._own
        assert slot is not None
        assert own is not None
        return sum_over_ranks(own, slot.of(memory.rank, (memory.size, *own.shape), own.dtype), memory.rank)


def sum_over_ranks(own: Tensor, parts: Tensor, rank: int) -> Tensor:
    """Sum of ``parts``, ``[size, ...]``, of which ``rank``'s is ``own``; in the order of ranks, in fp32 at least."""
    if len(parts) == 2:
        return own + parts[1 - rank]
    if own.dtype == torch.float64 or not _has_triton():
        parts[rank].copy_(own)
        return parts.sum(0)
    result, count = torch.empty_like(own), own.numel()
    grid = (-(-count // _SUM_BLOCK),)
    _kernels().sum_over_ranks[grid](own, parts, result, count, len(parts), rank, _SUM_BLOCK, num_warps=8)
    return result


def wait_for_signals(pad: Tensor, ranks: Sequence[int], timeout_ms: int = _TIMEOUT_MS) -> None:
    """Let the current stream wait, in one kernel, until the words of ``ranks`` in ``pad`` are 1, and make them 0."""
    bits = sum(1 << rank for rank in ranks)
    _kernels().wait_for_signals[(1,)](pad, bits, timeout_ms, len(pad), num_warps=1)


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _kernels() -> Any:
    from nxd_memopt.backends.cuda import peer_memory_kernels

    return peer_memory_kernels
