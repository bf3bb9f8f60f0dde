"""The language-model head and its loss in one: cross entropy of ``X W^t`` without all logits in memory.

Vocabulary-parallel softmax: arXiv:1909.08053, section 3. Gradients are computed in forward, as in
Liger-Kernel.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.config import require_one_of
from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.ops.cross_entropy import LossTerms, labels_outside, wide_dtype
from nxd_memopt.ops.cuda import cross_entropy as cuda
from nxd_memopt.ops.cuda.support import can_use_triton
from nxd_memopt.parallel_layers.fused_loss.chunked_pass import (
    ChunkedLinearCrossEntropy,
    HeadOptions,
)
from nxd_memopt.parallel_layers.mappings import resolve_group
from nxd_memopt.parallel_layers.utils import (
    cast_if_autocast_enabled,
    check_sequence_dimension,
)
from nxd_memopt.planner.loss_chunks import DEFAULT_LOGITS_BYTES


class LinearCrossEntropy(torch.autograd.Function):
    """Loss of ``x [rows, H]``, ``weight [V/T, H]`` and ``target [gathered, rows]``.

    The output is 0-dim, or has the shape of ``target`` for ``reduction="none"``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, options: HeadOptions, with_grad: bool) -> Tensor:
        ctx.options = options
        ctx.grads = None
        valid = target != options.ignore_index
        # "none": the gradient of each token's loss is unknown before backward, which recomputes
        # the logits. Otherwise forward computes dX and dW, and backward multiplies them by a
        # scalar.
        in_backward = options.reduction == "none"
        if in_backward:
            ctx.save_for_backward(x, weight, target)
        scale = _token_scale(valid, options, wide_dtype(x.dtype))
        # Without gradients a chunk costs one GEMM (logits) instead of three (logits, dX, dW).
        needs = ctx.needs_input_grad[:2]
        if in_backward or not with_grad:
            needs = (False, False)
        losses, *grads = ChunkedLinearCrossEntropy(x, weight, target, scale, options, needs).run()
        if not in_backward:
            ctx.grads = grads
        losses = losses.masked_fill(~valid, 0.0)
        if in_backward:
            return losses
        return (losses * scale).sum()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        options: HeadOptions = ctx.options
        if options.reduction == "none":
            x, weight, target = ctx.saved_tensors
            # The barrier makes XLA recompute the logits instead of keeping forward's.
            x, grad_loss = backend.optimization_barrier([x, grad_loss])
            scale = grad_loss.masked_fill(target == options.ignore_index, 0.0)
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
        input_grad = _multiplied(input_grad, grad_loss)
        return input_grad, _multiplied(weight_grad, grad_loss), None, None, None


def _token_scale(valid: Tensor, options: HeadOptions, dtype: torch.dtype) -> Tensor:
    """Return the factor of each token's loss: 0 if ignored, else 1 ("sum") or 1/count ("mean")."""
    scale = valid.to(dtype)
    if options.reduction != "mean":
        return scale
    # clamp: if all labels are ignored, factors and loss are 0 instead of NaN.
    return scale / scale.sum().clamp(min=1)


def _multiplied(grad: Tensor | None, factor: Tensor) -> Tensor | None:
    """Return ``grad * factor`` for a 0-dim ``factor``, in place where possible."""
    if grad is None:
        return None
    if can_use_triton(grad):
        return cuda.multiply_(grad, factor)
    # On the CPU reading the factor is free, and it is 1 unless the loss is scaled. On other
    # devices ``.item()`` would wait for the device.
    if grad.device.type == "cpu":
        if factor.item() == 1.0:
            return grad
        return grad.mul_(factor)
    return (grad * factor).to(grad.dtype)


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
) -> Tensor:
    """Compute the cross entropy of ``hidden @ weight.t()`` without storing all logits.

    The result equals ``torch.nn.functional.cross_entropy`` of the full logits. Gradients are
    computed in forward (for ``reduction="none"`` in backward, from recomputed logits), so
    ``logits_bytes`` of logits are enough. The loss supports a single backward.
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

    Returns:
        A loss in fp32 (fp64 for fp64 inputs), 0-dim, or with the shape of ``target`` for
        ``"none"``; the same on every rank.

    Raises:
        ValueError: shapes do not match, options are outside their range, or (on the CPU) a label is
            outside the vocabulary. On other devices the loss of a label outside is NaN.
        RuntimeError: second backward of one loss.
    """
    group = resolve_group(process_group)
    columns = weight.size(0) * backend.group_size(group)
    terms = LossTerms(vocab_size or columns, label_smoothing, z_loss_weight, softcap)
    _check(hidden, weight, target, columns, reduction, terms, logits_bytes, accumulate_dtype)
    sharded = sequence_parallel_enabled and backend.group_size(group) > 1
    # Sequence first: target [S, B] then reshapes to [T, s * B], one row of labels for each rank.
    if sharded and check_sequence_dimension(sequence_dimension):
        hidden = hidden.movedim(1, 0)
        target = target.movedim(1, 0)
    options = HeadOptions(
        group,
        sharded,
        ignore_index,
        reduction,
        logits_bytes,
        accumulate_dtype,
        reduce_dtype,
        terms,
    )
    if hidden.numel() // hidden.size(-1) * options.gathered != target.numel():
        raise ValueError(
            f"hidden has shape {list(hidden.shape)} on each of {options.gathered} ranks, "
            f"target {list(target.shape)}: "
            "target must have a label for each token of the whole sequence"
        )
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


@torch.compiler.disable(reason="it overwrites logits by their gradient and compiles its kernels itself")
# A separate function, because torch.compile must not trace the in-place gradient.
def _apply(x: Tensor, weight: Tensor, labels: Tensor, options: HeadOptions, with_grad: bool) -> Tensor:
    return cast(Tensor, LinearCrossEntropy.apply(x, weight, labels, options, with_grad))


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    columns: int,
    reduction: str,
    terms: LossTerms,
    logits_bytes: int,
    accumulate_dtype: torch.dtype | None,
) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.size(-1) != weight.size(1):
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, weight {list(weight.shape)}: must be [..., H] and [V/T, H]"
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: convert one, or use torch.autocast")
    if target.is_floating_point():
        raise ValueError(f"target must hold integer labels, got {target.dtype}")
    require_one_of("reduction", reduction, ("mean", "sum", "none"))
    # A narrower sum would lose bits of every chunk.
    if accumulate_dtype is not None and accumulate_dtype.itemsize < weight.dtype.itemsize:
        raise ValueError(
            f"accumulate_dtype {accumulate_dtype} is narrower than the weight's {weight.dtype}: "
            "leave it out, or use torch.float32"
        )
    if not 0 <= terms.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be within [0, 1], got {terms.label_smoothing}")
    if terms.softcap is not None and terms.softcap <= 0:
        raise ValueError(f"softcap must be above 0, got {terms.softcap}: leave it out for none")
    if not 0 < terms.vocab_size <= columns:
        raise ValueError(f"vocab_size must be within (0, {columns}], the rows of all ranks, got {terms.vocab_size}")
    if logits_bytes < 0:
        raise ValueError(f"logits_bytes must be at least 0, got {logits_bytes}")
