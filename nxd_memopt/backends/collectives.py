"""Contracts of collectives in progress, complete or in chunks that overlap with computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """A collective under way. ``wait()`` returns its result and may be called once."""

    def wait(self) -> Tensor: ...


class Completed:
    """A ``Pending`` that has its result already: what a device without asynchronous collectives returns."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result


class ChunkedAllGather(Protocol):
    """An all-gather along dim 0 whose rows can be used as they arrive.

    Whoever uses rows gives that work to the device before the group's next gather starts, on the stream of this one:
    the rows may lie in memory that is used again.
    """

    @property
    def length(self) -> int:
        """``n * size``, of all rows."""
        ...

    def pieces(self, operations_per_element: float = 0) -> Iterable[tuple[int, Tensor]]:
        """Where rows begin, and the rows, in the order of their arrival, together all of them; to be iterated once.

        Args:
            operations_per_element: floating-point operations that the user does with each element. The more, the longer
                it takes, and the more rows arrive meanwhile and come as one piece.
        """
        ...

    def wait(self, *, copy: bool = False) -> Tensor:
        """Return ``[n * size, ...]``, in rank order; read-only: in a group of one rank it is the shard itself.

        Args:
            copy: the result must stay valid after the group's next gather, which otherwise may overwrite it. Call
                before that gather starts.
        """
        ...


class ChunkedReduction(Protocol):
    """A sum over ranks to which each hands its ``[n, ...]`` piece by piece.

    Between the first piece and ``wait()`` no other reduction of the group starts.
    """

    @property
    def pieces(self) -> Sequence[tuple[int, int]]:
        """The ranges of rows to hand over, in the best order."""
        ...

    def put(self, start: int, rows: Tensor) -> None:
        """Hand over the piece that begins at ``start``."""
        ...

    def abandon(self) -> None:
        """The pieces that are left will not come; the other ranks' sums are then of no use."""
        ...

    def wait(self) -> Tensor:
        """``[n / size, ...]``, this rank's chunk of the sum (or all of it: see ``start_reduction``)."""
        ...


class UnchunkedAllGather:
    """All rows arrive together."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._result: Tensor | None = None

    @property
    def length(self) -> int:
        return self.wait().size(0)

    def pieces(self, operations_per_element: float = 0) -> Iterable[tuple[int, Tensor]]:
        del operations_per_element
        return ((0, self.wait()),)

    def wait(self, *, copy: bool = False) -> Tensor:
        del copy  # the result has memory of its own
        if self._result is None:
            self._result = self._pending.wait()
        return self._result


class UnchunkedReduction:
    """All rows are handed over together to the collective ``start``."""

    def __init__(self, rows: int, start: Callable[[Tensor], Pending]) -> None:
        self.pieces = ((0, rows),)
        self._start = start

    def put(self, start: int, rows: Tensor) -> None:
        del start
        self._pending = self._start(rows)

    def abandon(self) -> None:
        return

    def wait(self) -> Tensor:
        return self._pending.wait()
