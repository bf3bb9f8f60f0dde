"""One pass of the head and its loss over all chunks of tokens: losses, dX and dW.

A chunk is gathered from its sequence shards and multiplied with the vocabulary shard; its softmax becomes the logits'
gradient in place, and that is multiplied into dX, which is reduce-scattered, and into dW. ``ops.logits_storage`` says
where the logits are meanwhile.
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
    """What stays the same for every chunk.

    Args:
        group: over which the vocabulary, and under sequence parallelism the tokens, are sharded.
        sequence_parallel: the input's rows are this rank's.
        ignore_index: label of tokens that do not count.
        reduction: ``"mean"`` over the tokens that count, ``"sum"`` or ``"none"``.
        logits_bytes: memory for logits beside the gradients.
        accumulate_dtype: of dW while chunks are added to it; ``None``: the weight's.
        reduce_dtype: of dX's reduction; ``None``: its own.
        terms: of a token's loss.
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
    """The chunks of one pass: ``rows`` local tokens, ``vocab`` local rows of the weight.

    Args:
        input_grad: dX is wanted, and logits may be put into its memory.
        weight_grad: dW is wanted, and logits may be put into its memory.
    """
    return StoragePlan(
        rows=rows,
        gathered=gathered,
        exchanged=3 * hidden if group_size > 1 else 0,  # gathered input, partial gradient, and its sum
        vocab=vocab,
        hidden=hidden,
        spare=logits_bytes // element_bytes,
        input_grad=input_grad and group_size == 1,
        weight_grad=hidden * accumulate_bytes // element_bytes if weight_grad else 0,
    )


class ChunkedLinearCrossEntropy:
    """One pass over all chunks."""

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
        self.local_target = target - self.first_row
        padded = weight.size(0) * backend.group_size(options.group) > options.terms.vocab_size
        self.valid_rows = options.terms.vocab_size - self.first_row if padded else None
        self.needs_input, self.needs_weight = needs
        self.in_place = backend.views_share_memory
        sequence = 0 if options.sequence_parallel else None
        self.comm = ActivationSharding(options.group, sequence, options.reduce_dtype, hides_launch_latency=True)
        self.plan = self._plan()
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
        new = torch.empty_like if self.plan.chunks else torch.zeros_like
        return new(self.weight, dtype=dtype, memory_format=torch.contiguous_format)

    def run(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Per-token losses ``[gathered, rows]`` in fp32, dX, dW."""
        losses = [loss for chunk, x in self._gathered() for loss in self._chunk(chunk, x)]
        loss = torch.cat(losses, dim=-1) if losses else self.scale
        return loss, self._whole_input_grad(), self._whole_weight_grad()

    def _gathered(self) -> Iterator[tuple[Chunk, Tensor]]:
        """Each chunk with its input ``[tokens, H]``; the next one's gather is under way meanwhile."""
        upcoming: ChunkedAllGather | None = None
        chunks = self.plan.chunks
        for chunk, following in zip(chunks, (*chunks[1:], None), strict=False):
            x = (upcoming or self.comm.gather(self.x[chunk.start : chunk.stop])).wait(copy=True)
            upcoming = following and self.comm.gather(self.x[following.start : following.stop])
            yield chunk, F.pad(x, (0, 0, 0, chunk.tokens - x.size(0))) if chunk.tokens > x.size(0) else x

    def _chunk(self, chunk: Chunk, x: Tensor) -> Iterator[Tensor]:
        target = self._of_chunk(self.local_target, chunk, -1)  # -1 is in no part
        parts = [(first, _matmul(self.weight[first:stop], x.t(), out)) for first, stop, out in self._places(chunk)]
        targets = [target - first if first else target for first, _ in parts]
        each = [
            local_sums(part, own, self._terms, self._valid(first))
            for (first, part), own in zip(parts, targets, strict=True)
        ]
        sums = combined_sums(torch.stack(each)) if len(parts) > 1 else each[0]
        group, size = self.options.group, backend.group_size(self.options.group)
        if size > 1:
            sums = combined_sums(backend.all_gather(sums.unsqueeze(0), group))
        losses = token_losses(sums, self._terms).narrow(0, 0, self.options.gathered * (chunk.stop - chunk.start))
        yield losses.view(self.options.gathered, -1)
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
        """How many rows from ``first`` on are vocabulary, on a rank that may hold padding."""
        return None if self.valid_rows is None else self.valid_rows - first

    @property
    def _terms(self) -> LossTerms:
        return self.options.terms

    def _of_chunk(self, values: Tensor, chunk: Chunk, fill: float) -> Tensor:
        """``[tokens]`` of ``[gathered, rows]``, filled up."""
        flat = values[:, chunk.start : chunk.stop].reshape(-1)
        padding = chunk.tokens - flat.size(0)
        return F.pad(flat, (0, padding), value=fill) if padding else flat

    def _places(self, chunk: Chunk) -> list[tuple[int, int, Tensor | None]]:
        """Ranges of the vocabulary and the ``[range, tokens]`` where their logits go; ``None``: anywhere."""
        vocab, kept = self.weight.size(0), self.plan.kept(chunk)
        if not self.in_place:
            return [(0, vocab, None)]
        places: list[tuple[int, int, Tensor | None]] = []
        if kept:
            assert self.weight_grad is not None
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
        wide = self.options.accumulate_dtype or grad.dtype
        product = grad.to(wide) @ x.to(wide)
        self.weight_grad = product if self.weight_grad is None else self.weight_grad + product

    def _add_input_grad(self, chunk: Chunk, grads: Sequence[tuple[int, Tensor]]) -> None:
        """The parts' products, smaller parts first: what is rounded between two of them is the smaller."""
        self._end_reduction()  # its rows are free before the next are made
        rows, hidden = chunk.stop - chunk.start, self.x.size(1)
        in_tail = self.plan.input_grad and chunk.tokens == rows
        out = self.tail[: self.x.numel()].view(-1, hidden)[chunk.start : chunk.stop] if in_tail else None
        total: Tensor | None = None
        for first, grad in reversed(grads):
            weight = self.weight[first : first + grad.size(0)]
            total = _matmul(grad.t(), weight, out) if total is None else total.addmm_(grad.t(), weight)
        assert total is not None
        total = total[: self.options.gathered * rows]
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
        weight_grad = cast(Tensor, self.weight_grad)
        vocab, kept = self.weight.size(0), self.plan.kept(chunk)
        offset, window_rows = self.plan.window(chunk)
        window = self.tail[offset:][: window_rows * self.plan.weight_grad]
        window = window.view(weight_grad.dtype).view(window_rows, -1)
        parts = dict(grads)
        for start, stop, direct in overwriting_ranges(vocab, kept, chunk.tokens, self.plan.weight_grad, window_rows):
            first = 0 if start < kept else kept
            out = weight_grad[start:stop] if direct else window[: stop - start]
            matmul_into(out, parts[first][start - first : stop - first], x)
            if not direct:
                weight_grad[start:stop].copy_(out)

    def _whole_input_grad(self) -> Tensor | None:
        if not self.needs_input:
            return None
        self._end_reduction()
        parts = self.input_grads
        if not self.plan.input_grad:
            return torch.cat(parts).to(self.x.dtype) if parts else torch.zeros_like(self.x)
        grad = self.tail[: self.x.numel()].view_as(self.x)
        for chunk, part in zip(self.plan.chunks, parts, strict=True):
            if chunk.tokens > chunk.stop - chunk.start:  # made apart, with its padding
                grad[chunk.start : chunk.stop] = part
        return grad

    def _whole_weight_grad(self) -> Tensor | None:
        if not self.needs_weight:
            return None
        grad = torch.zeros_like(self.weight) if self.weight_grad is None else self.weight_grad
        return grad.to(self.weight.dtype)


def _matmul(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
