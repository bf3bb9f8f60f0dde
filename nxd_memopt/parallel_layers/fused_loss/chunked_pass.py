"""One pass of the head and its loss over all chunks of tokens: losses, dX and dW.

For each chunk: the input is gathered from the sequence shards and multiplied with the vocabulary
shard; the softmax becomes the gradient of the logits in place; that gradient is multiplied into dX,
which is reduce-scattered, and into dW. Logits are vocabulary-first, ``[V/T, tokens]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import ChunkedAllGather, ChunkedReduction, backend
from nxd_memopt.ops.cross_entropy import (
    LossTerms,
    combined_sums,
    local_sums,
    logits_gradient,
    token_losses,
)
from nxd_memopt.parallel_layers.functional.activation_sharding import ActivationSharding
from nxd_memopt.planner.loss_chunks import chunk_ranges


@dataclass(frozen=True)
class HeadOptions:
    """Options that are the same for every chunk.

    Args:
        group: process group that shards the vocabulary and, under sequence parallelism, the tokens.
        sequence_parallel: the rows of the input are this rank's sequence shard.
        ignore_index: label of tokens without loss.
        reduction: ``"mean"`` over the tokens with a loss, ``"sum"`` or ``"none"``.
        logits_bytes: memory for the logits of a chunk.
        accumulate_dtype: dtype of dW while chunks are added, or None for the weight's dtype.
        reduce_dtype: dtype of the reduction of dX, or None for the dtype of dX.
        terms: terms of a token's loss.
    """

    group: ProcessGroup | None
    sequence_parallel: bool
    ignore_index: int
    reduction: str
    logits_bytes: int
    accumulate_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    terms: LossTerms

    @property
    def gathered(self) -> int:
        """Number of ranks whose rows are gathered into a chunk."""
        return backend.group_size(self.group) if self.sequence_parallel else 1


class ChunkedLinearCrossEntropy:
    """One pass over all chunks; use an instance once.

    Args:
        x: ``[rows, H]``.
        weight: ``[V/T, H]``.
        target: ``[gathered, rows]`` labels over the full vocabulary.
        scale: ``[gathered, rows]``, the factor of each token's loss in the gradients.
        options: options of the loss.
        needs: whether dX and dW are needed.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        scale: Tensor,
        options: HeadOptions,
        needs: Sequence[bool],
    ) -> None:
        self.x = x
        self.weight = weight
        self.scale = scale
        self.options = options
        self.needs_input, self.needs_weight = needs
        size = backend.group_size(options.group)
        first_row = backend.group_rank_in_graph(options.group) * weight.size(0)
        # Labels relative to this rank's shard; outside [0, V/T) another rank has the label.
        self.local_target = target - first_row
        # Padding rows at the end of the vocabulary are excluded from the softmax. ``valid_rows``
        # counts from this rank's first row: it may exceed the shard, or be negative.
        self.valid_rows: int | Tensor | None = None
        if weight.size(0) * size > options.terms.vocab_size:
            self.valid_rows = options.terms.vocab_size - first_row
        self.chunks = chunk_ranges(
            x.size(0),
            gathered=options.gathered,
            vocab=weight.size(0),
            exchanged=3 * x.size(1) if size > 1 else 0,  # gathered input, partial dX, reduced dX
            logits_bytes=options.logits_bytes,
            element_bytes=x.element_size(),
        )
        sequence = 0 if options.sequence_parallel else None
        self.comm = ActivationSharding(options.group, sequence, options.reduce_dtype, hides_launch_latency=True)
        self.input_grads: list[Tensor] = []
        self.reduction: ChunkedReduction | None = None  # of the last chunk's part of dX
        self.weight_grad: Tensor | None = None

    def run(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return per-token losses ``[gathered, rows]`` in fp32, dX and dW (None if not needed)."""
        losses = [self._chunk(start, stop, x) for start, stop, x in self._gathered()]
        self._end_reduction()
        # Without tokens there is no chunk: the empty scale has the shape and dtype of the losses.
        loss = self.scale
        if losses:
            loss = torch.cat(losses, dim=-1)
        return loss, self._full_input_grad(), self._full_weight_grad()

    def _gathered(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield each chunk's range and input ``[gathered * rows, H]``, overlapped with the next gather."""
        upcoming: ChunkedAllGather | None = None
        for i, (start, stop) in enumerate(self.chunks):
            # The next gather may reuse this gather's buffer, and starts before the chunk is used.
            x = (upcoming or self.comm.gather(self.x[start:stop])).wait(copy=True)
            if i + 1 < len(self.chunks):
                upcoming = self.comm.gather(self.x[slice(*self.chunks[i + 1])])
            yield start, stop, x

    def _chunk(self, start: int, stop: int, x: Tensor) -> Tensor:
        """Return the chunk's losses ``[gathered, rows]``, and add its gradients to dX and dW."""
        terms = self.options.terms
        group = self.options.group
        target = self.local_target[:, start:stop].reshape(-1)
        logits = self.weight @ x.t()
        # Statistics [n, tokens] (log-sum-exp, target logit, ...) of this rank's part of the
        # vocabulary are combined over the ranks: one all-gather of n * tokens values.
        sums = local_sums(logits, target, terms, self.valid_rows)
        if backend.group_size(group) > 1:
            sums = combined_sums(backend.all_gather(sums.unsqueeze(0), group))
        if self.needs_input or self.needs_weight:
            # Softmax minus one-hot, times the token's scale, in place: the logits are not needed
            # again.
            scale = self.scale[:, start:stop].reshape(-1)
            grad = logits_gradient(logits, sums[0], scale, target, terms, self.valid_rows)
            self._add_input_grad(grad, x)
            self._add_weight_grad(grad, x)
        return token_losses(sums, terms).view(self.options.gathered, -1)

    def _add_input_grad(self, grad: Tensor, x: Tensor) -> None:
        """Compute the chunk's ``dX = grad^t W`` and start its reduction over the vocabulary shards."""
        if not self.needs_input:
            return
        # Only one reduction of a group may be in progress.
        self._end_reduction()
        partial = grad.t() @ self.weight
        # The reduction overlaps with this chunk's dW GEMM and with the next chunk.
        self.reduction = self.comm.reduce(lambda start, stop: partial[start:stop], x.shape, x.dtype)

    def _end_reduction(self) -> None:
        if self.reduction is not None:
            self.input_grads.append(self.reduction.wait())
            self.reduction = None

    def _add_weight_grad(self, grad: Tensor, x: Tensor) -> None:
        """Add the chunk's ``dW = grad x``, in ``accumulate_dtype``."""
        if not self.needs_weight:
            return
        wide = self.options.accumulate_dtype or grad.dtype
        if self.weight_grad is None:
            self.weight_grad = _wide_matmul(grad, x, wide)
        elif wide == grad.dtype:
            self.weight_grad.addmm_(grad, x)
        elif grad.is_cuda:
            torch.addmm(self.weight_grad, grad, x, out_dtype=wide, out=self.weight_grad)
        else:
            self.weight_grad += _wide_matmul(grad, x, wide)

    def _full_input_grad(self) -> Tensor | None:
        """Return dX ``[rows, H]``, or None if it is not needed."""
        if not self.needs_input:
            return None
        if not self.input_grads:
            return torch.zeros_like(self.x)
        return torch.cat(self.input_grads).to(self.x.dtype)

    def _full_weight_grad(self) -> Tensor | None:
        """Return dW in the weight's dtype, or None if it is not needed."""
        if not self.needs_weight:
            return None
        # Without tokens no chunk computes dW, which is then zero.
        grad = torch.zeros_like(self.weight) if self.weight_grad is None else self.weight_grad
        return grad.to(self.weight.dtype)


def _wide_matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``a b`` in ``dtype``, which may be wider than the dtype of the factors."""
    if a.dtype == dtype:
        return a @ b
    # cuBLAS can store its fp32 accumulator. On other devices both factors are converted first.
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)
