"""One pass of the head and its loss over all chunks of tokens: losses, dX and dW.

For each chunk: the input is gathered from the sequence shards and multiplied with the vocabulary
shard; the softmax becomes the gradient of the logits in place; that gradient is multiplied into dX,
which is reduce-scattered, and into dW. ``chunk_plan`` decides where the logits are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import ChunkedAllGather, ChunkedReduction, backend
from nxd_memopt.ops.cross_entropy import LossTerms, combined_sums, local_sums, logits_gradient, token_losses
from nxd_memopt.parallel_layers.functional.activation_sharding import ActivationSharding
from nxd_memopt.parallel_layers.fused_loss.chunk_plan import Chunk, StoragePlan, matmul_into, overwriting_ranges


@dataclass(frozen=True)
class HeadOptions:
    """Options that are the same for every chunk.

    Args:
        group: process group that shards the vocabulary and, under sequence parallelism, the tokens.
        sequence_parallel: the rows of the input are this rank's sequence shard.
        ignore_index: label of tokens without loss.
        reduction: ``"mean"`` over the tokens with a loss, ``"sum"`` or ``"none"``.
        logits_bytes: memory for logits in addition to the gradients.
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


def plan_chunks(
    *,
    rows: int,
    hidden: int,
    vocab: int,
    group_size: int,
    gathered: int,
    logits_bytes: int,
    element_bytes: int,
    accumulate_bytes: int,
    input_grad: bool,
    weight_grad: bool,
) -> StoragePlan:
    """Plan the chunks of one pass.

    Args:
        rows: local tokens.
        hidden: H.
        vocab: local rows of the weight.
        group_size: T.
        gathered: number of ranks whose tokens are gathered into a chunk.
        logits_bytes: memory for logits in addition to the gradients.
        element_bytes: bytes of an element of the logits.
        accumulate_bytes: bytes of an element of dW while chunks are added.
        input_grad: dX is needed, and its buffer may store logits.
        weight_grad: dW is needed, and its buffer may store logits.
    """
    return StoragePlan(
        rows=rows,
        gathered=gathered,
        exchanged=3 * hidden if group_size > 1 else 0,  # gathered input, partial dX, reduced dX
        vocab=vocab,
        hidden=hidden,
        spare=logits_bytes // element_bytes,
        input_grad=input_grad and group_size == 1,
        weight_grad=hidden * accumulate_bytes // element_bytes if weight_grad else 0,
    )


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
        self.x, self.weight, self.scale, self.options = x, weight, scale, options
        self.first_row = backend.group_rank_in_graph(options.group) * weight.size(0)
        # Labels relative to this rank's shard; outside [0, V/T) another rank has the label.
        self.local_target = target - self.first_row
        # Padding rows at the end of the vocabulary are excluded from the softmax. ``valid_rows``
        # counts from this rank's first row: it may exceed the shard, or be negative.
        padded = weight.size(0) * backend.group_size(options.group) > options.terms.vocab_size
        self.valid_rows = options.terms.vocab_size - self.first_row if padded else None
        self.needs_input, self.needs_weight = needs
        # Without shared views (XLA) buffers cannot be reused: a functional path allocates instead.
        self.in_place = backend.views_share_memory
        sequence = 0 if options.sequence_parallel else None
        self.comm = ActivationSharding(options.group, sequence, options.reduce_dtype, hides_launch_latency=True)
        self.plan = self._plan()
        # The two buffers of the plan. Both are uninitialized: chunks write before they read.
        self.weight_grad = self._new_weight_grad() if self.needs_weight and self.in_place else None
        self.tail = x.new_empty(self.plan.tail if self.in_place else 0)
        self.input_grads: list[Tensor] = []
        self.reduction: ChunkedReduction | None = None  # of the last chunk's part of dX

    def _plan(self) -> StoragePlan:
        wide = self.options.accumulate_dtype or self.x.dtype
        return plan_chunks(
            rows=self.x.size(0),
            hidden=self.x.size(1),
            vocab=self.weight.size(0),
            group_size=backend.group_size(self.options.group),
            gathered=self.options.gathered,
            logits_bytes=self.options.logits_bytes,
            element_bytes=self.x.element_size(),
            accumulate_bytes=wide.itemsize,
            input_grad=self.needs_input and self.in_place,
            weight_grad=self.needs_weight and self.in_place,
        )

    def _new_weight_grad(self) -> Tensor:
        dtype = self.options.accumulate_dtype or self.weight.dtype
        # Without tokens no chunk writes dW, which is then zero.
        new = torch.empty_like if self.plan.chunks else torch.zeros_like
        return new(self.weight, dtype=dtype, memory_format=torch.contiguous_format)

    def run(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return per-token losses ``[gathered, rows]`` in fp32, dX and dW (None if not needed)."""
        # ``_chunk`` yields the chunk's losses, then runs its backward when it is resumed.
        losses = [loss for chunk, x in self._gathered() for loss in self._chunk(chunk, x)]
        loss = torch.cat(losses, dim=-1) if losses else self.scale
        return loss, self._whole_input_grad(), self._whole_weight_grad()

    def _gathered(self) -> Iterator[tuple[Chunk, Tensor]]:
        """Yield each chunk and its input ``[tokens, H]``, overlapped with the next gather."""
        upcoming: ChunkedAllGather | None = None
        chunks = self.plan.chunks
        for chunk, following in zip(chunks, (*chunks[1:], None), strict=False):
            # The next gather may reuse this gather's buffer, and starts before the chunk is used.
            x = (upcoming or self.comm.gather(self.x[chunk.start : chunk.stop])).wait(copy=True)
            upcoming = following and self.comm.gather(self.x[following.start : following.stop])
            yield chunk, F.pad(x, (0, 0, 0, chunk.tokens - x.size(0))) if chunk.tokens > x.size(0) else x

    def _chunk(self, chunk: Chunk, x: Tensor) -> Iterator[Tensor]:
        """Yield the chunk's losses ``[gathered, rows]``, then add its gradients to dX and dW."""
        # Logits of each part are [vocabulary range, tokens]; a first chunk has up to two parts, one
        # in the dW buffer and one in the tail. The pad label -1 is in no part.
        target = self._of_chunk(self.local_target, chunk, -1)
        parts = [(first, _matmul(self.weight[first:stop], x.t(), out)) for first, stop, out in self._places(chunk)]
        # Labels relative to each part.
        targets = [target - first if first else target for first, _ in parts]
        each = [
            local_sums(part, own, self._terms, self._valid(first))
            for (first, part), own in zip(parts, targets, strict=True)
        ]
        # Statistics [n, tokens] (log-sum-exp, target logit, ...) are combined over the parts, then
        # over the ranks: one all-gather of n * tokens values for each chunk.
        sums = combined_sums(torch.stack(each)) if len(parts) > 1 else each[0]
        group, size = self.options.group, backend.group_size(self.options.group)
        if size > 1:
            sums = combined_sums(backend.all_gather(sums.unsqueeze(0), group))
        losses = token_losses(sums, self._terms).narrow(0, 0, self.options.gathered * (chunk.stop - chunk.start))
        yield losses.view(self.options.gathered, -1)
        # Softmax minus one-hot, times the token's scale, in place: the logits are not needed again.
        if self.needs_input or self.needs_weight:
            scale = self._of_chunk(self.scale, chunk, 0.0)
            self._backward(
                chunk,
                x,
                [
                    (first, logits_gradient(part, sums[0], scale, own, self._terms, self._valid(first)))
                    for (first, part), own in zip(parts, targets, strict=True)
                ],
            )

    def _valid(self, first: int) -> int | Tensor | None:
        """Return how many rows from ``first`` on are vocabulary; None if no rank has padding."""
        return None if self.valid_rows is None else self.valid_rows - first

    @property
    def _terms(self) -> LossTerms:
        return self.options.terms

    def _of_chunk(self, values: Tensor, chunk: Chunk, fill: float) -> Tensor:
        """Return ``[tokens]`` from ``[gathered, rows]``, padded with ``fill``."""
        flat = values[:, chunk.start : chunk.stop].reshape(-1)
        padding = chunk.tokens - flat.size(0)
        return F.pad(flat, (0, padding), value=fill) if padding else flat

    def _places(self, chunk: Chunk) -> list[tuple[int, int, Tensor | None]]:
        """Return vocabulary ranges with the ``[range, tokens]`` buffers of their logits.

        A buffer of None means a new tensor.
        """
        vocab, kept = self.weight.size(0), self.plan.kept(chunk)
        if not self.in_place:
            return [(0, vocab, None)]
        places: list[tuple[int, int, Tensor | None]] = []
        if kept:
            assert self.weight_grad is not None
            # dW may have a wider dtype (accumulate_dtype); here it is a buffer of logits.
            room = self.weight_grad.view(-1).view(self.x.dtype)
            places.append((0, kept, room[: kept * chunk.tokens].view(kept, chunk.tokens)))
        if kept < vocab:
            rest = vocab - kept
            room = self.tail[self.plan.offset(chunk) :][: rest * chunk.tokens]
            places.append((kept, vocab, room.view(rest, chunk.tokens)))
        return places

    def _backward(self, chunk: Chunk, x: Tensor, grads: Sequence[tuple[int, Tensor]]) -> None:
        if self.needs_input:
            self._add_input_grad(chunk, grads)
        # dX comes first: overwriting dW destroys the gradient of the logits.
        if chunk.in_weight_grad:
            self._overwrite_logits(chunk, x, grads)
        elif self.needs_weight:
            ((_, grad),) = grads
            self._add_weight_grad(grad, x, accumulate=chunk.start > 0)

    def _add_weight_grad(self, grad: Tensor, x: Tensor, *, accumulate: bool) -> None:
        if self.in_place:
            assert self.weight_grad is not None
            matmul_into(self.weight_grad, grad, x, accumulate=accumulate)
            return
        # Functional path: dW is a new tensor for each chunk.
        wide = self.options.accumulate_dtype or grad.dtype
        product = grad.to(wide) @ x.to(wide)
        self.weight_grad = product if self.weight_grad is None else self.weight_grad + product

    def _add_input_grad(self, chunk: Chunk, grads: Sequence[tuple[int, Tensor]]) -> None:
        """Compute the chunk's dX and add it to the list, or start its reduction."""
        # Only one reduction of a group may be in progress. Waiting also frees its rows before the
        # next ones are allocated.
        self._end_reduction()
        rows, hidden = chunk.stop - chunk.start, self.x.size(1)
        # Write directly to the chunk's rows of dX, unless padding would spill into the next rows.
        in_tail = self.plan.input_grad and chunk.tokens == rows
        out = self.tail[: self.x.numel()].view(-1, hidden)[chunk.start : chunk.stop] if in_tail else None
        # dX = sum over parts of dlogits_part^t @ weight_part. The part in the tail comes first: the
        # partial sum that is rounded to the dtype of dX is usually smaller than the part in dW.
        total: Tensor | None = None
        for first, grad in reversed(grads):
            weight = self.weight[first : first + grad.size(0)]
            total = _matmul(grad.t(), weight, out) if total is None else total.addmm_(grad.t(), weight)
        assert total is not None
        total = total[: self.options.gathered * rows]  # without the alignment padding
        # The local dX is a partial sum over the vocabulary shards. The reduction overlaps with this
        # chunk's dW GEMM and with the next chunk.
        if backend.group_size(self.options.group) == 1:
            self.input_grads.append(total)
        else:
            made = total
            self.reduction = self.comm.reduce(lambda start, stop: made[start:stop], made.shape, made.dtype)

    def _end_reduction(self) -> None:
        if self.reduction is not None:
            self.input_grads.append(self.reduction.wait())
            self.reduction = None

    def _overwrite_logits(self, chunk: Chunk, x: Tensor, grads: Sequence[tuple[int, Tensor]]) -> None:
        """Write the first chunk's dW over the logits' gradient from which it is computed."""
        weight_grad = cast(Tensor, self.weight_grad)
        vocab, kept = self.weight.size(0), self.plan.kept(chunk)
        offset, window_rows = self.plan.window(chunk)
        # The window is [window_rows, H] in the dtype of dW, after the logits in the tail.
        window = self.tail[offset:][: window_rows * self.plan.weight_grad]
        window = window.view(weight_grad.dtype).view(window_rows, -1)
        parts = dict(grads)
        for start, stop, direct in overwriting_ranges(vocab, kept, chunk.tokens, self.plan.weight_grad, window_rows):
            # A range is in one part only: the operand is in dW (first 0) or in the tail.
            first = 0 if start < kept else kept
            out = weight_grad[start:stop] if direct else window[: stop - start]
            matmul_into(out, parts[first][start - first : stop - first], x)
            if not direct:
                weight_grad[start:stop].copy_(out)

    def _whole_input_grad(self) -> Tensor | None:
        """Return dX ``[rows, H]``, or None if it is not needed."""
        if not self.needs_input:
            return None
        self._end_reduction()
        parts = self.input_grads
        if not self.plan.input_grad:
            return torch.cat(parts).to(self.x.dtype) if parts else torch.zeros_like(self.x)
        # Chunks without padding are already in their rows of the tail.
        grad = self.tail[: self.x.numel()].view_as(self.x)
        for chunk, part in zip(self.plan.chunks, parts, strict=True):
            if chunk.tokens > chunk.stop - chunk.start:  # computed in its own buffer, with padding
                grad[chunk.start : chunk.stop] = part
        return grad

    def _whole_weight_grad(self) -> Tensor | None:
        """Return dW in the weight's dtype, or None if it is not needed."""
        if not self.needs_weight:
            return None
        grad = torch.zeros_like(self.weight) if self.weight_grad is None else self.weight_grad
        return grad.to(self.weight.dtype)


def _matmul(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
