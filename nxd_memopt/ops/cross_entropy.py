"""Cross entropy on local vocabulary-first logits ``[V, R]``: partial sums, loss, gradient.

Vocabulary-first, since then any range of vocabulary is contiguous, and no width of it is misaligned for the matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.cuda import cross_entropy as cuda
from nxd_memopt.ops.cuda.support import can_use_triton


@dataclass(frozen=True)
class LossTerms:
    """What a token's loss is made of: ``lse - (1 - e) x_t - e / V sum(x) + z lse^2`` with ``x = c tanh(logit / c)``.

    Args:
        vocab_size: V over all ranks, without padding.
        label_smoothing: e (arXiv:1512.00567).
        z_loss_weight: z, of the squared log-sum-exp (arXiv:2204.02311, section 5).
        softcap: c (arXiv:2408.00118, section 2.2); ``None`` leaves the logits as they are.
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0
    softcap: float | None = None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are held in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def local_sums(logits: Tensor, local_target: Tensor, terms: LossTerms, valid: int | Tensor | None = None) -> Tensor:
    """Per token: log-sum-exp, the target's logit (0 if not held) and, under smoothing, the sum of logits.

    Args:
        logits: ``[v, R]``, a part of the vocabulary.
        local_target: ``[R]``, row of ``logits``; outside ``[0, v)`` it is held elsewhere.
        terms: of the loss.
        valid: how many rows are vocabulary, the others are padding (below 1: none is); ``None``: all.

    Returns:
        ``[2, R]`` or ``[3, R]``, fp32 (fp64 for fp64).
    """
    if can_use_triton(logits):
        return cuda.local_sums(logits, local_target, terms, valid)
    capped = _without_padding(_capped(logits, terms), valid, -torch.inf)
    sums = [capped.logsumexp(0), _target_logit(logits, local_target, terms)]
    if terms.label_smoothing:
        sums.append(capped.masked_fill(capped == -torch.inf, 0.0).sum(0))
    return torch.stack(sums)


def combined_sums(parts: Tensor) -> Tensor:
    """``[parts, n, R] -> [n, R]``: the sums over the whole vocabulary."""
    return torch.cat([parts[:, :1].logsumexp(0), parts[:, 1:].sum(0)])


def token_losses(sums: Tensor, terms: LossTerms) -> Tensor:
    """``[n, R] -> [R]``."""
    log_sum_exp, target_logit = sums[0], sums[1]
    loss = log_sum_exp - (1 - terms.label_smoothing) * target_logit
    if terms.label_smoothing:
        loss = loss - terms.label_smoothing / terms.vocab_size * sums[2]
    return loss + terms.z_loss_weight * log_sum_exp.square() if terms.z_loss_weight else loss


def logits_gradient(
    logits: Tensor,
    log_sum_exp: Tensor,
    scale: Tensor,
    local_target: Tensor,
    terms: LossTerms,
    valid: int | Tensor | None = None,
) -> Tensor:
    """Gradient of ``sum(scale * loss)`` by the logits, in their dtype; takes their storage where it can.

    Args:
        logits: ``[v, R]``; overwritten where the device's views share memory.
        log_sum_exp: ``[R]`` over the whole vocabulary.
        scale: ``[R]``, 0 for tokens that do not count.
        local_target: as for ``local_sums``.
        terms: of the loss.
        valid: as for ``local_sums``; the gradient of padding is 0.
    """
    softmax_scale = scale * (1 + 2 * terms.z_loss_weight * log_sum_exp) if terms.z_loss_weight else scale
    if can_use_triton(logits):
        return cuda.logits_gradient(logits, log_sum_exp, softmax_scale, scale, local_target, terms, valid)
    capped = _capped(logits, terms)
    grad = (capped - log_sum_exp).exp() * softmax_scale
    rows = torch.arange(logits.size(0), device=logits.device).unsqueeze(-1)
    grad = grad - torch.where(rows == local_target, (1 - terms.label_smoothing) * scale, 0.0)
    grad = grad - terms.label_smoothing / terms.vocab_size * scale if terms.label_smoothing else grad
    grad = grad * (1 - (capped / terms.softcap).square()) if terms.softcap else grad
    grad = _without_padding(grad, valid, 0.0)
    return logits.copy_(grad) if backend.views_share_memory else grad.to(logits.dtype)


def labels_outside(target: Tensor, vocab_size: int, ignore_index: int) -> Tensor | None:
    """Labels that are no vocabulary: an error on the CPU; elsewhere a mask, for asking would stall the device."""
    outside = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if target.device.type != "cpu":
        return outside
    if bool(outside.any()):
        label = int(target[outside][0])
        raise ValueError(
            f"label {label} is outside the vocabulary [0, {vocab_size}) and is not ignore_index {ignore_index}: "
            "check that the tokenizer belongs to the model"
        )
    return None


def _capped(logits: Tensor, terms: LossTerms) -> Tensor:
    wide = logits.to(wide_dtype(logits.dtype))
    return wide if terms.softcap is None else terms.softcap * torch.tanh(wide / terms.softcap)


def _without_padding(values: Tensor, valid: int | Tensor | None, fill: float) -> Tensor:
    if valid is None:
        return values
    rows = torch.arange(values.size(0), device=values.device).unsqueeze(-1)
    return values.masked_fill(rows >= valid, fill)


def _target_logit(logits: Tensor, local_target: Tensor, terms: LossTerms) -> Tensor:
    held = (local_target >= 0) & (local_target < logits.size(0))
    picked = logits.gather(0, torch.where(held, local_target, 0).unsqueeze(0)).squeeze(0)
    return _capped(picked, terms).masked_fill(~held, 0.0)
