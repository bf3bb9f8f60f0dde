"""Definition of the fused loss in plain PyTorch: all logits at once, on one process, gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_linear_cross_entropy(
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
    num_items_in_batch: Tensor | None = None,
) -> Tensor:
    """Compute what ``fused_linear_cross_entropy`` computes; the tests compare both.

    Args:
        hidden: ``[..., H]``, the full sequence.
        weight: ``[rows, H]``, the full vocabulary, possibly with padding rows at the end.
        target: labels with the shape of ``hidden`` without H.
        label_smoothing: weight of the uniform distribution over the vocabulary.
        ignore_index: label with zero loss and gradient.
        reduction: ``"mean"`` over the labels that are not ignored, ``"sum"`` or ``"none"``.
        z_loss_weight: factor of the squared log-sum-exp.
        softcap: c in ``c tanh(logits / c)``; None for no softcap.
        vocab_size: V without padding; default all rows.
        num_items_in_batch: divisor of ``"mean"``; default the number of labels that are not ignored.

    Returns:
        0-dim, or with the shape of ``target`` for ``"none"``; at least fp32.
    """
    logits = (hidden @ weight[:vocab_size].t()).to(torch.promote_types(hidden.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    is_counted = target != ignore_index
    log_sum_exp = logits.logsumexp(-1)
    # An ignored label may be outside the vocabulary: gather any logit and mask the loss.
    label_logit = logits.gather(-1, target.where(is_counted, 0).unsqueeze(-1)).squeeze(-1)

    # Cross entropy with the smoothed label distribution (1 - e) onehot + e / V, plus the z-loss.
    losses = log_sum_exp - (1 - label_smoothing) * label_logit - label_smoothing * logits.mean(-1)
    losses = losses + z_loss_weight * log_sum_exp.square()
    losses = losses.where(is_counted, 0.0)
    if reduction == "none":
        return losses
    if reduction == "mean" and num_items_in_batch is not None:
        return (losses / num_items_in_batch).sum()
    if reduction == "mean":
        return losses.sum() / is_counted.sum().clamp(min=1)
    return losses.sum()
