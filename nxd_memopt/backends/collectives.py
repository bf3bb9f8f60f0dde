"""Contracts of collectives in progress, complete or in chunks that overlap with computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """Collective in progress."""

    def wait(self) -> Tensor:
        """Return the result; call at most once."""
        ...


class Completed:
    """``Pending`` with a complete result, for devices without asynchronous collectives."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result


class ChunkedAllGather(Protocol):
    """All-gather along dim 0 whose rows can be used as they arrive.

    The rows may be in a buffer that the group's next gather overwrites. Enqueue all work that reads
    the rows before that gather starts, on the stream on which this gather started.
    """

    @property
    def length(self) -> int:
        """Return the number of rows of all ranks, ``n * size``."""
        ...

    def chunks(self, operations_per_element: float = 0) -> Iterable[tuple[int, Tensor]]:
        """Yield ``(first row, rows)`` in order of arrival, covering all rows; iterate once.

        Args:
            operations_per_element: floating-point operations that the caller spends on each
                element. With more operations, more rows arrive during the caller's work, and more
                rows are yielded as one chunk.
        """
        ...

    def wait(self, *, copy: bool = False) -> Tensor:
        """Return all rows, ``[n * size, ...]``, in rank order.

        The result is read-only: in a group of one rank it is the shard itself.

        Args:
            copy: return a copy that the group's next gather does not overwrite. Call before that
                gather starts.
        """
        ...


class ChunkedReduction(Protocol):
    """Sum over ranks of ``[n, ...]`` tensors that each rank hands over in chunks.

    No other reduction of the group may start between the first chunk and ``wait()``.
    """

    @property
    def chunks(self) -> Sequence[tuple[int, int]]:
        """Return the row ranges ``(start, stop)`` to hand over, in the best order."""
        ...

    def put(self, start: int, rows: Tensor) -> None:
        """Hand over the chunk that begins at row ``start``."""
        ...

    def abandon(self) -> None:
        """Give up the remaining chunks. The sums of the other ranks are then invalid."""
        ...

    def wait(self) -> Tensor:
        """Return this rank's chunk of the sum, ``[n / size, ...]``.

        Without ``scattered`` (see ``Backend.start_reduction``) return the full sum, ``[n, ...]``.
        """
        ...


class UnchunkedAllGather:
    """``ChunkedAllGather`` whose rows arrive all at once."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._result: Tensor | None = None

    @property
    def length(self) -> int:
        return self.wait().size(0)

    def chunks(self, operations_per_element: float = 0) -> Iterable[tuple[int, Tensor]]:
        del operations_per_element
        return ((0, self.wait()),)

    def wait(self, *, copy: bool = False) -> Tensor:
        del copy  # the result has its own memory; no later gather overwrites it
        # Pending.wait() may be called once, but chunks() and length need the result too
        if self._result is None:
            self._result = self._pending.wait()
        return self._result


class UnchunkedReduction:
    """``ChunkedReduction`` that hands all rows at once to the collective ``start``."""

    def __init__(self, rows: int, start: Callable[[Tensor], Pending]) -> None:
        self.chunks = ((0, rows),)
        self._start = start

    def put(self, start: int, rows: Tensor) -> None:
        del start
        self._pending = self._start(rows)

    def abandon(self) -> None:
        return

    def wait(self) -> Tensor:
        return self._pending.wait()
