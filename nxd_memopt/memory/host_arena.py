"""Host memory of any size from the blocks of a ``HostPool``, returned when the copies that use it are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nxd_memopt.backends import Transfer
from nxd_memopt.memory.host_pool import HostPool

_ALIGNMENT = 512  # bytes; keeps the start of every span on a boundary that DMA engines prefer


class _Block:
    """A block of the pool, filled from its start. It returns to the pool when no span uses it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.filled_bytes = 0
        self.num_spans = 0

    def has_space(self) -> bool:
        return self.filled_bytes < self.memory.numel()

    def take(self, size_bytes: int) -> Tensor:
        """Return the next ``size_bytes``, or as many as are left."""
        start = self.filled_bytes
        stop = min(start + size_bytes, self.memory.numel())
        self.filled_bytes = min(-(-stop // _ALIGNMENT) * _ALIGNMENT, self.memory.numel())
        self.num_spans += 1
        return self.memory[start:stop]


@dataclass(frozen=True)
class HostSpan:
    """Host memory of one storage.

    Attributes:
        pieces: 1-D uint8 views of the blocks, in order.
        blocks: the block of each piece.
    """

    pieces: tuple[Tensor, ...]
    blocks: tuple[_Block, ...]


@dataclass(frozen=True)
class _Retired:
    """A span that is not needed any more, and the copies that may still read or write it."""

    span: HostSpan
    transfers: tuple[Transfer, ...]
    kept_alive: Any


class HostArena:
    """Allocates spans in the blocks of a pool; several spans share a block.

    A span of 40 MiB uses a full block of 32 MiB and 8 MiB of the next one, whose remaining 24 MiB
    belong to the next span. Spans are short-lived and freed together, in backward, so the holes
    that earlier spans leave in a block are not reused before the block is empty.

    ``retire`` may be called from any thread, also by the garbage collector; ``take`` and
    ``reserve`` by one thread at a time.

    Args:
        pool: source of the blocks.
        owner: name in the pool's ledger.
    """

    def __init__(self, pool: HostPool, owner: str) -> None:
        self.pool = pool
        self._owner = owner
        self._open: _Block | None = None
        self._retired: deque[_Retired] = deque()

    def reserve(self, size_bytes: int) -> None:
        """Allocate host memory for spans of ``size_bytes`` in total.

        Raises:
            ValueError: the pool's limit or the host's memory is exhausted; the message has the
                required and the available bytes.
        """
        self.pool.reserve(size_bytes, self._owner)

    def take(self, size_bytes: int) -> HostSpan:
        """Return a span of ``size_bytes``.

        Raises:
            ValueError: see ``reserve``.
        """
        pieces: list[Tensor] = []
        blocks: list[_Block] = []
        missing = size_bytes
        # Before the open block gets another span: without spans it starts at its beginning.
        self._collect()
        try:
            while missing:
                block = self._block_with_space()
                pieces.append(block.take(missing))
                blocks.append(block)
                missing -= pieces[-1].numel()
        except BaseException:
            self._free(_Retired(HostSpan(tuple(pieces), tuple(blocks)), (), None))
            raise
        return HostSpan(tuple(pieces), tuple(blocks))

    def retire(self, span: HostSpan, transfers: Iterable[Transfer], kept_alive: Any = None) -> None:
        """Give ``span`` back once ``transfers`` are done.

        Args:
            span: a span of this arena.
            transfers: copies that read or write the span.
            kept_alive: object that must exist until then, such as the target of a copy.
        """
        # Only an append, which is atomic: the garbage collector may call in the middle of ``take``.
        self._retired.append(_Retired(span, tuple(transfers), kept_alive))

    def _block_with_space(self) -> _Block:
        if self._open is not None and self._open.has_space():
            return self._open
        # Waiting for a copy that reads a retired span is cheaper than pinning more memory.
        while not self.pool.free_bytes(self._owner) and self._retired:
            self._free(self._retired.popleft())
        # The spans that filled the open block may have been the ones that were freed.
        if self._open is None or not self._open.has_space():
            self._open = _Block(self.pool.take(self._owner))
        return self._open

    def _collect(self) -> None:
        """Give back the retired spans whose copies are done, in the order of their retirement."""
        while self._retired:
            if not all(transfer.is_done() for transfer in self._retired[0].transfers):
                return
            self._free(self._retired.popleft())

    def _free(self, retired: _Retired) -> None:
        for transfer in retired.transfers:
            transfer.synchronize()
        for block in retired.span.blocks:
            block.num_spans -= 1
            if block.num_spans:
                continue
            # An empty block that is still being filled starts again at its beginning.
            if block is self._open:
                block.filled_bytes = 0
            else:
                self.pool.give_back(block.memory, self._owner)
