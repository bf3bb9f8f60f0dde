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
    """Process group and dimension over which a layer's activations are sharded.

    Args:
        group: process group.
        sequence_dimension: dimension of a shard that is the sequence, or None for replicated
            activations.
        reduce_dtype: dtype of reductions, or None for the dtype of the tensors.
        hides_launch_latency: see ``Backend.start_all_gather``.
    """

    group: ProcessGroup | None
    sequence_dimension: int | None
    reduce_dtype: torch.dtype | None
    hides_launch_latency: bool = field(default=False, kw_only=True)

    def sequence_first(self, x: Tensor) -> Tensor:
        """Return a view of ``x`` with the sequence as dimension 0."""
        # None (replicated) and 0 need no view. A view of 1 makes chunks of rows strided, which
        # costs a copy where a GEMM or a collective needs them contiguous.
        if not self.sequence_dimension:
            return x
        return x.movedim(self.sequence_dimension, 0)

    def original_layout(self, x: Tensor) -> Tensor:
        """Return ``x`` with the sequence moved back; the inverse of ``sequence_first``."""
        if not self.sequence_dimension:
            return x
        return x.movedim(0, self.sequence_dimension)

    def gather(self, shard: Tensor, *, materialize: bool = True) -> ChunkedAllGather:
        """Start the all-gather ``[s, ...] -> [S, ...]``; a no-op without sequence parallelism.

        Args:
            shard: ``[s, ...]``, this rank's rows.
            materialize: also make one tensor of all rows available with ``wait()``, not just the
                chunks.
        """
        # A group of None has one rank: the "gathered" tensor is the input itself, without a copy.
        group = None if self.sequence_dimension is None else self.group
        return backend.start_all_gather(
            shard, group, materialize=materialize, hides_launch_latency=self.hides_launch_latency
        )

    def reduce(self, rows: Callable[[int, int], Tensor], shape: Sequence[int], dtype: torch.dtype) -> ChunkedReduction:
        """Start the sum of ``[S, ...]`` over the ranks, computing the rows chunk by chunk.

        Each chunk is sent while the next one is computed. GEMMs launched after this call overlap
        with the last chunk. The result is this rank's sequence shard, or the full sum for
        replicated activations.

        Args:
            rows: ``rows(start, stop)`` returns this rank's partial sum of a range of rows.
            shape: shape of the full partial sum, ``[S, ...]``.
            dtype: dtype of the tensors that ``rows`` returns.
        """
        # Under sequence parallelism a reduce-scatter. Replicated activations need an all-reduce,
        # which moves twice the bytes: a reduce-scatter followed by an all-gather.
        wide = self.reduce_dtype or dtype
        reduction = backend.start_reduction(
            shape,
            wide,
            self.group,
            scattered=self.sequence_dimension is not None,
            hides_launch_latency=self.hides_launch_latency,
        )
        try:
            for start, stop in reduction.chunks:
                reduction.put(start, as_dtype(rows(start, stop), wide))
        except BaseException:  # e.g. out of memory, after which a script may try the next batch
            reduction.abandon()
            raise
        return reduction
