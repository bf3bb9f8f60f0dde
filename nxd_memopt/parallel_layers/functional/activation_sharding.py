"""How a layer's activations are gathered and reduced over ranks, whichever dimension is the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import ChunkedAllGather, ChunkedReduction, backend
from nxd_memopt.ops.autograd import as_dtype


@dataclass(frozen=True)
class ActivationSharding:
    """The group over which a layer's activations are sharded, and along which dimension.

    Args:
        group: of the ranks.
        sequence_dimension: which dimension of a shard is the sequence; ``None``: activations are replicated.
        reduce_dtype: of reductions; ``None``: the tensors' own.
        hides_launch_latency: as for ``Backend.start_all_gather``.
    """

    group: ProcessGroup | None
    sequence_dimension: int | None
    reduce_dtype: torch.dtype | None
    hides_launch_latency: bool = field(default=False, kw_only=True)

    def sequence_first(self, x: Tensor) -> Tensor:
        return x.movedim(self.sequence_dimension, 0) if self.sequence_dimension else x

    def as_given(self, x: Tensor) -> Tensor:
        """The inverse of ``sequence_first``."""
        return x.movedim(0, self.sequence_dimension) if self.sequence_dimension else x

    def gather(self, shard: Tensor, *, materialize: bool = True) -> ChunkedAllGather:
        """Start the all-gather ``[s, ...] -> [S, ...]``; a no-op without sequence parallelism.

        Args:
            materialize: all rows are needed in one tensor too, by ``wait()``, not only as chunks.
        """
        group = None if self.sequence_dimension is None else self.group
        return backend.start_all_gather(
            shard, group, materialize=materialize, hides_launch_latency=self.hides_launch_latency
        )

    def reduce(self, rows: Callable[[int, int], Tensor], shape: Sequence[int], dtype: torch.dtype) -> ChunkedReduction:
        """Sum ``rows(start, stop)``, this rank's part of ``[S, ...]``, over the ranks; a shard of it, or all.

        Matmuls behind it run while the last rows are under way.

        Args:
            rows: computes a range of them.
            shape: of all of them.
            dtype: of what ``rows`` returns.
        """
        wide = self.reduce_dtype or dtype
        scattered = self.sequence_dimension is not None
        reduction = backend.start_reduction(
            shape, wide, self.group, scattered=scattered, hides_launch_latency=self.hides_launch_latency
        )
        try:
            for start, stop in reduction.pieces:
                reduction.put(start, as_dtype(rows(start, stop), wide))
        except BaseException:  # out of memory, say, after which a script may go on with the next batch
            reduction.abandon()
            raise
        return reduction
