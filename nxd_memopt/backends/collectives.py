"""Defines the contract of a backend's collectives: complete, in progress, or in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


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

        Without ``scattered`` (see ``Collectives.start_reduction``) return the full sum, ``[n, ...]``.
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


class Collectives(ABC):
    """The part of the backend contract that communicates.

    Collectives operate along dim 0, return new tensors and never write to their input. With a group
    of ``None`` or of size 1 a collective returns its input. Reductions run in the input's dtype.
    """

    @abstractmethod
    def group_size(self, group: ProcessGroup | None) -> int:
        """Return the number of ranks in ``group``; 1 for ``None``."""
        ...

    @abstractmethod
    def group_rank(self, group: ProcessGroup | None) -> int:
        """Return this rank in ``group`` as an int, for descriptions and files.

        Forward and backward passes use ``group_rank_in_graph``.
        """

    def group_rank_in_graph(self, group: ProcessGroup | None) -> int | Tensor:
        """Return this rank in ``group`` for use in forward and backward passes.

        The rank is a 0-dim device tensor where all ranks must trace one graph, and an int
        otherwise.
        """
        return self.group_rank(group)

    @abstractmethod
    def shard(self, tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
        """Return this rank's chunk of ``tensor`` along ``dim``; the chunk may be a view.

        The size of ``group`` must divide ``dim``.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, group: ProcessGroup | None, op: str = "sum") -> Tensor:
        """Reduce with ``op``, which is ``"sum"``, ``"max"`` or ``"min"``."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        """Concatenate the shards of all ranks in rank order, ``[n, ...] -> [n * size, ...]``."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        """Return this rank's chunk of the sum over ranks, ``[n, ...] -> [n / size, ...]``."""

    @abstractmethod
    def all_to_all(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        """Send chunk ``i`` of dim 0 to rank ``i`` and receive in rank order; same shape."""

    def all_reduce_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        """Start ``all_reduce`` (sum). By default the result is complete on return."""
        return Completed(self.all_reduce(tensor, group))

    def all_gather_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        """Start ``all_gather``. By default the result is complete on return."""
        return Completed(self.all_gather(tensor, group))

    def reduce_scatter_async(self, tensor: Tensor, group: ProcessGroup | None) -> Pending:
        """Start ``reduce_scatter``. By default the result is complete on return."""
        return Completed(self.reduce_scatter(tensor, group))

    def start_all_gather(
        self,
        tensor: Tensor,
        group: ProcessGroup | None,
        *,
        materialize: bool = True,
        hides_launch_latency: bool = False,
    ) -> ChunkedAllGather:
        """Start an all-gather along dim 0 whose rows may arrive in chunks.

        Args:
            tensor: shard of this rank, ``[n, ...]``.
            group: process group of the all-gather.
            materialize: gather all rows into one tensor, for ``wait()``. Without it ``wait()`` must
                not be called.
            hides_launch_latency: the device has enough queued work to hide the host's time to
                launch the chunks.
        """
        del materialize, hides_launch_latency
        return UnchunkedAllGather(self.all_gather_async(tensor, group))

    def start_reduction(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        group: ProcessGroup | None,
        *,
        scattered: bool,
        hides_launch_latency: bool = False,
    ) -> ChunkedReduction:
        """Start a sum over ranks of a tensor that is handed over in chunks.

        Args:
            shape: of the full tensor, ``[n, ...]``.
            dtype: of the chunks.
            group: process group of the reduction.
            scattered: reduce-scatter, so that each rank gets only its own chunk; otherwise
                all-reduce.
            hides_launch_latency: see ``start_all_gather``.
        """
        del dtype, hides_launch_latency
        # The rows are one chunk here: the collective starts when they are handed over.
        start = self.reduce_scatter_async if scattered else self.all_reduce_async
        return UnchunkedReduction(shape[0], lambda tensor: start(tensor, group))
