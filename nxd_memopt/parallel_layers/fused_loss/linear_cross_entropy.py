"""The language-model head and its loss in one: cross entropy of ``X W^t`` without all logits in memory.

Vocabulary-parallel softmax: arXiv:1909.08053, section 3. Gradients are computed in forward, as in
Liger-Kernel.

For each chunk of tokens: the input is gathered from the sequence shards and multiplied with the
vocabulary shard; the softmax becomes the gradient of the logits in place; that gradient is
multiplied into dX, which is reduce-scattered, and into dW. Logits are vocabulary-first,
``[V/T, tokens]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import ChunkedAllGather, backend
from nxd_memopt.ops.autograd import cast_if_autocast_enabled, first_derivative_only
from nxd_memopt.ops.cross_entropy import (
    LossTerms,
    add_matmul,
    combined_sums,
    labels_outside,
    local_sums,
    logits_gradient,
    scale_gradient,
    token_losses,
    token_scale,
)
from nxd_memopt.parallel_layers.functional.linear import ActivationSharding
from nxd_memopt.parallel_layers.fused_loss.input_gradient import InputGradient
from nxd_memopt.parallel_layers.fused_loss.options import LossOptions, check_arguments
from nxd_memopt.parallel_layers.mappings import resolve_group
from nxd_memopt.parallel_layers.utils import check_sequence_dimension
from nxd_memopt.planner.techniques.loss_chunks import DEFAULT_LOGITS_BYTES, chunk_ranges


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
        self, x: Tensor, weight: Tensor, target: Tensor, scale: Tensor, options: LossOptions, needs: Sequence[bool]
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
        self.input_grad: InputGradient | None = None
        if self.needs_input:
            self.input_grad = InputGradient(x, weight, self.comm)
        self.weight_grad: Tensor | None = None

    def run(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return per-token losses ``[gathered, rows]`` in fp32, dX and dW (None if not needed)."""
        losses = [self._chunk(start, stop, x) for start, stop, x in self._gathered()]
        input_grad = None
        if self.input_grad is not None:
            input_grad = self.input_grad.result()
        # Without tokens there is no chunk: the empty scale has the shape and dtype of the losses.
        loss = self.scale
        if losses:
            loss = torch.cat(losses, dim=-1)
        return loss, input_grad, self._full_weight_grad()

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
            if self.input_grad is not None:
                self.input_grad.add(grad, x, start, stop)
            if self.needs_weight:
                wide = self.options.accumulate_dtype or grad.dtype
                self.weight_grad = add_matmul(self.weight_grad, grad, x, wide)
        return token_losses(sums, terms).view(self.options.gathered, -1)

    def _full_weight_grad(self) -> Tensor | None:
        """Return dW in the weight's dtype, or None if it is not needed."""
        if not self.needs_weight:
            return None
        # Without tokens no chunk computes dW, which is then zero.
        if self.weight_grad is None:
            return torch.zeros_like(self.weight)
        return self.weight_grad.to(self.weight.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """Loss of ``x [rows, H]``, ``weight [V/T, H]`` and ``target [gathered, rows]``.

    The output is 0-dim, or has the shape of ``target`` for ``reduction="none"``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, options: LossOptions, with_grad: bool) -> Tensor:
        ctx.options = options
        ctx.grads = None
        valid = target != options.ignore_index
        # "none": the gradient of each token's loss is unknown before backward, which recomputes
        # the logits. So it is for fp16, where a loss scale has to enter before the gradients are
        # rounded: without it, those of a mean over thousands of tokens are below the smallest fp16
        # number. Otherwise forward computes dX and dW, and backward multiplies them by a scalar.
        in_backward = options.reduction == "none" or x.dtype == torch.float16
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = token_scale(valid, options.reduction, wide, options.num_items)
        if in_backward:
            ctx.save_for_backward(x, weight, target, scale)
        # Without gradients a chunk costs one GEMM (logits) instead of three (logits, dX, dW).
        needs = ctx.needs_input_grad[:2]
        if in_backward or not with_grad:
            needs = (False, False)
        losses, *grads = ChunkedLinearCrossEntropy(x, weight, target, scale, options, needs).run()
        if not in_backward:
            ctx.grads = grads
        losses = losses.masked_fill(~valid, 0.0)
        if options.reduction == "none":
            return losses
        return (losses * scale).sum()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        options: LossOptions = ctx.options
        if ctx.saved_tensors:
            x, weight, target, scale = ctx.saved_tensors
            # The barrier makes XLA recompute the logits instead of keeping forward's.
            x, grad_loss = backend.optimization_barrier([x, grad_loss])
            scale = (grad_loss * scale).masked_fill(target == options.ignore_index, 0.0)
            _, *grads = ChunkedLinearCrossEntropy(x, weight, target, scale, options, ctx.needs_input_grad[:2]).run()
            return *grads, None, None, None
        if ctx.grads is None:
            raise RuntimeError(
                "the fused loss keeps its gradients for one backward: compute the loss again, or use "
                "parallel_cross_entropy for a graph that is kept"
            )
        # Drop the references: autograd can then move the gradients into .grad without a copy.
        input_grad, weight_grad = ctx.grads
        ctx.grads = None
        input_grad = scale_gradient(input_grad, grad_loss)
        return input_grad, scale_gradient(weight_grad, grad_loss), None, None, None


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    sequence_parallel_enabled: bool = False,
    sequence_dimension: int | None = None,
    process_group: ProcessGroup | None = None,
    logits_bytes: int = DEFAULT_LOGITS_BYTES,
    accumulate_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    num_items_in_batch: Tensor | None = None,
) -> Tensor:
    """Compute the cross entropy of ``hidden @ weight.t()`` without storing all logits.

    The result equals ``torch.nn.functional.cross_entropy`` of the full logits. Gradients are
    computed in forward (for ``reduction="none"`` and for fp16 in backward, from recomputed logits,
    one more GEMM), so ``logits_bytes`` of logits are enough. The loss supports a single backward.
    ``fused_loss.reference`` defines the same loss in plain PyTorch.

    Args:
        hidden: ``[..., H]``; under sequence parallelism this rank's shard, ``[s, B, H]``.
        weight: ``[V/T, H]``, this rank's rows of the head's weight, padded equally on all ranks.
        target: integer labels with the shape of ``hidden`` without H and with the full sequence;
            the same on every rank.
        label_smoothing: weight of the uniform distribution over the vocabulary, in [0, 1].
        ignore_index: label with zero loss and gradient.
        reduction: ``"mean"`` over the labels that are not ignored (0 if there is none), ``"sum"``,
            or ``"none"``.
        z_loss_weight: factor of the squared log-sum-exp in a token's loss (arXiv:2204.02311).
        softcap: c in ``c tanh(logits / c)`` (arXiv:2408.00118); default no softcap.
        vocab_size: V without padding; default all rows of all ranks.
        sequence_parallel_enabled: ``hidden`` is a shard along the sequence.
        sequence_dimension: dimension of ``hidden`` that is the sequence, 0 (default) or 1.
        process_group: process group; default the tensor-parallel group.
        logits_bytes: bytes for a chunk's logits. A larger value gives fewer chunks; each chunk
            costs one addition to dW, rounded to the dtype of dW.
        accumulate_dtype: dtype of dW while chunks are added; default the weight's dtype. fp32 needs
            4 more bytes for each weight.
        reduce_dtype: dtype of the reduction of dX over ranks; default the dtype of dX.
        num_items_in_batch: divisor of ``"mean"`` instead of the number of labels that are not
            ignored, on the device, 0-dim or ``[1]``: the tokens of several batches, for example.

    Returns:
        A loss in fp32 (fp64 for fp64 inputs), 0-dim, or with the shape of ``target`` for
        ``"none"``; the same on every rank.

    Raises:
        ValueError: shapes do not match, options are outside their range, or (on the CPU) a label is
            outside the vocabulary. On other devices the loss of a label outside is NaN.
        RuntimeError: second backward of one loss.
    """
    group = resolve_group(process_group)
    size = backend.group_size(group)
    if vocab_size is None:
        vocab_size = weight.size(0) * size
    terms = LossTerms(vocab_size, label_smoothing, z_loss_weight, softcap)
    sharded = sequence_parallel_enabled and size > 1
    options = LossOptions(
        group=group,
        sequence_parallel=sharded,
        ignore_index=ignore_index,
        reduction=reduction,
        logits_bytes=logits_bytes,
        accumulate_dtype=accumulate_dtype,
        reduce_dtype=reduce_dtype,
        terms=terms,
        num_items=num_items_in_batch,
    )
    check_arguments(hidden, weight, target, options)
    # Narrower integers overflow where a rank's first row is subtracted, and in offsets of the kernels.
    target = target.long()
    # Sequence first: target [S, B] then reshapes to [T, s * B], one row of labels for each rank.
    if sharded and sequence_dimension is not None and check_sequence_dimension(sequence_dimension):
        hidden = hidden.movedim(1, 0)
        target = target.movedim(1, 0)
    hidden, weight = cast("list[Tensor]", cast_if_autocast_enabled(hidden, weight))
    x = hidden.reshape(-1, hidden.size(-1))
    labels = target.reshape(options.gathered, -1)
    # On devices other than the CPU a mask instead of an error: a check would wait for the device.
    outside = labels_outside(target, terms.vocab_size, ignore_index)
    with torch.autocast(hidden.device.type, enabled=False):
        loss = cast(Tensor, _apply(x, weight, labels, options, torch.is_grad_enabled()))
    # One label outside makes a reduced loss NaN; with "none" only the losses of such labels.
    if reduction != "none":
        return loss if outside is None else loss.masked_fill(outside.any(), torch.nan)
    loss = loss.view(target.shape)
    if outside is not None:
        loss = loss.masked_fill(outside, torch.nan)
    # Back to the layout of the caller's target.
    if sharded and sequence_dimension:
        loss = loss.movedim(0, 1)
    return loss


def _apply(x: Tensor, weight: Tensor, labels: Tensor, options: LossOptions, with_grad: bool) -> Tensor:
    args = (x, weight, labels, options, with_grad)
    # torch.compile must not trace the in-place gradient. Imported while it traces: torch._dynamo takes
    # seconds, and every start would pay for it.
    if torch.compiler.is_compiling():
        from nxd_memopt.parallel_layers.fused_loss.untraced import call_untraced

        return cast(Tensor, call_untraced(LinearCrossEntropy.apply, *args))
    return cast(Tensor, LinearCrossEntropy.apply(*args))
