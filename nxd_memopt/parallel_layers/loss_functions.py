"""Losses over vocabulary-sharded logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.ops.cross_entropy import labels_outside
from nxd_memopt.parallel_layers.fused_loss.linear_cross_entropy import fused_linear_cross_entropy
from nxd_memopt.parallel_layers.mappings import resolve_group

__all__ = ["from_parallel_logits_to_logprobs", "fused_linear_cross_entropy", "parallel_cross_entropy"]


# The factor with which fp16 gradients are saved. They are at most 1 (2 with label smoothing), and
# fp16 ends at 65504; without it, probabilities below 6e-8 would be 0. A power of 2 rounds nothing.
_FP16_FACTOR = 2.0**14


@dataclass(frozen=True)
class _CrossEntropy:
    """Options that are the same for every token."""

    group: ProcessGroup | None
    vocab_size: int
    label_smoothing: float
    ignore_index: int


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Per-token loss with two collectives: a max, then one sum of ``[3, tokens]`` values.

    The gradient is computed in forward in fp32 and saved in the dtype of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: _CrossEntropy) -> Tensor:
        first_column = backend.group_rank_in_graph(options.group) * logits.size(-1)
        shifted = _subtract_max(logits, first_column, options)
        # A label of another rank's shard contributes 0 to the sum of target logits.
        local_target = target - first_column
        is_local = (local_target >= 0) & (local_target < logits.size(-1))
        local_target = torch.where(is_local, local_target, 0).unsqueeze(-1)
        target_logit = shifted.gather(-1, local_target).squeeze(-1).masked_fill(~is_local, 0.0)
        # Only label smoothing needs the sum of all logits. Padding columns are -inf, and the
        # smoothed distribution does not cover them: they count as 0.
        logit_sum = torch.zeros_like(target_logit)
        if options.label_smoothing:
            logit_sum = shifted.masked_fill(shifted == -torch.inf, 0.0).sum(-1)
        # shifted is not used below: exp_ reuses its memory, [..., V/T] in fp32.
        probabilities = shifted.exp_()
        sums = torch.stack([target_logit, logit_sum, probabilities.sum(-1)])
        target_logit, logit_sum, exp_sum = backend.all_reduce(sums, options.group).unbind()
        smoothing = options.label_smoothing
        valid = target != options.ignore_index
        # loss = log(sum exp(x)) - (1 - e) x_target - e / V sum(x), with x = logits - max.
        loss = exp_sum.log() - (1 - smoothing) * target_logit - smoothing / options.vocab_size * logit_sum
        # None on the CPU, where a label outside raises. Elsewhere an error would need a host
        # read.
        outside = labels_outside(target, options.vocab_size, options.ignore_index)
        loss = loss.masked_fill(~valid, 0.0)
        if outside is not None:
            loss = loss.masked_fill(outside, torch.nan)
        if ctx.needs_input_grad[0]:
            probabilities.div_(exp_sum.unsqueeze(-1))
            grad = _finish_gradient(probabilities, local_target, is_local, options, first_column)
            grad.masked_fill_(~valid.unsqueeze(-1), 0.0)
            if logits.dtype == torch.float16:
                grad.mul_(_FP16_FACTOR)
            ctx.save_for_backward(grad.to(logits.dtype))
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        if grad.dtype == torch.float16:
            grad_loss = grad_loss / _FP16_FACTOR
        # torch.mul with out=: one rounding to the dtype of the logits, without an fp32 copy.
        scaled = torch.mul(grad, grad_loss.unsqueeze(-1), out=torch.empty_like(grad))
        return scaled, None, None


def _subtract_max(logits: Tensor, first_column: int | Tensor, options: _CrossEntropy) -> Tensor:
    """Return new fp32 (fp64) logits minus the maximum over the vocabulary; -inf in padding."""
    # The copy is the only [..., V/T] tensor in fp32: the caller turns it into the softmax and
    # then into the gradient in place. The caller's logits are not modified.
    wide = torch.promote_types(logits.dtype, torch.float32)
    shifted = logits.to(wide, copy=True)
    padding = _padding_columns(shifted, first_column, options)
    if padding is not None:
        shifted.masked_fill_(padding, -torch.inf)
    # The maximum over all ranks: with each rank's own, the exponentials could not be added.
    maximum = backend.all_reduce(shifted.amax(-1), options.group, op="max")
    return shifted.sub_(maximum.unsqueeze(-1))


def _padding_columns(logits: Tensor, first_column: int | Tensor, options: _CrossEntropy) -> Tensor | None:
    """Return a ``[V/T]`` mask of columns beyond the vocabulary, or None if no rank has any."""
    width = logits.size(-1)
    if width * backend.group_size(options.group) == options.vocab_size:
        return None
    return torch.arange(width, device=logits.device) + first_column >= options.vocab_size


def _finish_gradient(
    probabilities: Tensor, local_target: Tensor, is_local: Tensor, options: _CrossEntropy, first_column: int | Tensor
) -> Tensor:
    """Compute ``p - (1 - e) onehot - e / V`` in place; ``e`` is the label smoothing."""
    smoothing = options.label_smoothing
    ones = is_local.unsqueeze(-1).to(probabilities.dtype)
    # scatter_add_ of 0 where another rank has the label.
    probabilities.scatter_add_(-1, local_target, (smoothing - 1) * ones)
    if smoothing:
        probabilities.sub_(smoothing / options.vocab_size)
        # e / V was subtracted from padding columns too, which have no probability and no
        # gradient.
        padding = _padding_columns(probabilities, first_column, options)
        if padding is not None:
            probabilities.masked_fill_(padding, 0.0)
    return probabilities


def parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Compute the per-token cross entropy of vocabulary-sharded logits.

    Equals ``torch.nn.functional.cross_entropy`` without reduction. Vocabulary-parallel as in
    arXiv:1909.08053, section 3; label smoothing as in arXiv:1512.00567.

    Args:
        vocab_parallel_logits: ``[..., V/T]``, any floating dtype; not modified.
        target: ``[...]`` integer labels over the full vocabulary, the same on every rank.
        label_smoothing: weight of the uniform distribution over the vocabulary, in [0, 1].
        ignore_index: label with zero loss and gradient.
        vocab_size: V without padding; columns from V on are ignored. Default: all columns.
        process_group: process group; default the tensor-parallel group.

    Returns:
        Losses ``[...]`` in fp32 (fp64 for fp64 logits), not reduced; the same on every rank.

    Raises:
        ValueError: shapes do not match, the smoothing is outside [0, 1], or (on the CPU) a label is
            outside the vocabulary. On other devices the loss of a label outside is NaN.
    """
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ValueError(
            f"target has shape {list(target.shape)}, the logits {list(vocab_parallel_logits.shape)}: "
            "target must be the logits' shape without the last dimension"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be within [0, 1], got {label_smoothing}")
    group = resolve_group(process_group)
    columns = vocab_parallel_logits.size(-1) * backend.group_size(group)
    if vocab_size is not None and not 0 < vocab_size <= columns:
        raise ValueError(f"vocab_size must be within (0, {columns}], the columns of all ranks, got {vocab_size}")
    options = _CrossEntropy(group, vocab_size or columns, label_smoothing, ignore_index)
    return cast(Tensor, _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, options))


def from_parallel_logits_to_logprobs(vocab_parallel_logits: Tensor, target: Tensor, inference: bool = True) -> Tensor:
    """Compute the log-probability of each next token from vocabulary-sharded logits.

    Preference optimization (DPO and similar losses) sums these values.

    Args:
        vocab_parallel_logits: ``[B, S, V/T]``; position i predicts token i + 1.
        target: ``[B, S]`` token ids, not shifted.
        inference: True disables gradients.

    Returns:
        ``[B, S - 1]`` in fp32 (fp64 for fp64 logits), the same on every rank.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference):
        # The last position predicts the first token after the roll; its value is dropped.
        next_token = target.roll(-1, dims=-1)
        return -parallel_cross_entropy(vocab_parallel_logits, next_token)[:, :-1].contiguous()
