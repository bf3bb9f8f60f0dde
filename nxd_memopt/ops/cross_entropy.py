"""Cross entropy on local vocabulary-first logits ``[V, R]``: sums, loss, gradients, and the sum of dW.

Logits are vocabulary-first because any range of the vocabulary is then contiguous, and no range is
misaligned for the matmuls.
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
    """Terms of the loss of one token.

    The loss is ``lse - (1 - e) x_t - e / V sum(x) + z lse^2`` with ``x = c tanh(logit / c)``.

    Args:
        vocab_size: V over all ranks, without padding.
        label_smoothing: e (arXiv:1512.00567).
        z_loss_weight: z, weight of the squared log-sum-exp (arXiv:2204.02311, section 5).
        softcap: c (arXiv:2408.00118, section 2.2); ``None`` leaves the logits unchanged.
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0
    softcap: float | None = None


def local_sums(
    logits: Tensor,
    local_target: Tensor,
    terms: LossTerms,
    valid: int | Tensor | None = None,
) -> Tensor:
    """Return the sums over this rank's part of the vocabulary that the loss of each token needs.

    The sums are the log-sum-exp, the target's logit (0 if it is not in this part) and, with
    smoothing, the sum of the logits.

    Args:
        logits: ``[v, R]``, this rank's part of the vocabulary.
        local_target: ``[R]``, the target's row in ``logits``; outside ``[0, v)`` it is not in this
            part.
        terms: terms of the loss.
        valid: number of rows that are vocabulary; the rest is padding (below 1: all rows);
            ``None``: no padding.

    Returns:
        ``[2, R]`` or ``[3, R]``, fp32 (fp64 for fp64).
    """
    if can_use_triton(logits):
        return cuda.local_sums(logits, local_target, terms, valid)
    # an fp32 copy [v, R] of the logits, which the Triton kernels do without
    capped = _without_padding(_capped(logits, terms), valid, -torch.inf)
    sums = [capped.logsumexp(0), _target_logit(logits, local_target, terms)]
    if terms.label_smoothing:
        # padding is -inf here, which must not enter the sum
        sums.append(capped.masked_fill(capped == -torch.inf, 0.0).sum(0))
    return torch.stack(sums)


def combined_sums(parts: Tensor) -> Tensor:
    """Combine the sums of all parts of the vocabulary, ``[parts, n, R] -> [n, R]``."""
    # The log-sum-exp of the parts' log-sum-exps is the full one. The target's logit is non-zero in
    # at most one part, and sums of logits add up.
    return torch.cat([parts[:, :1].logsumexp(0), parts[:, 1:].sum(0)])


def token_scale(valid: Tensor, reduction: str, dtype: torch.dtype, num_items: Tensor | None = None) -> Tensor:
    """Return the factor of each token's loss: 0 if ignored, else 1 ("sum") or 1/count ("mean").

    With ``num_items``, of one element, the factor of "mean" is 1/num_items instead.
    """
    scale = valid.to(dtype)
    if reduction != "mean":
        return scale
    if num_items is not None:
        return scale / num_items
    # clamp: if all labels are ignored, factors and loss are 0 instead of NaN.
    return scale / scale.sum().clamp(min=1)


def token_losses(sums: Tensor, terms: LossTerms) -> Tensor:
    """Return the loss of each token from the combined sums, ``[n, R] -> [R]``."""
    log_sum_exp = sums[0]
    target_logit = sums[1]
    # Terms with weight 0 are left out, so that the usual loss costs one subtraction per token.
    loss = log_sum_exp - (1 - terms.label_smoothing) * target_logit
    if terms.label_smoothing:
        loss = loss - terms.label_smoothing / terms.vocab_size * sums[2]
    if terms.z_loss_weight:
        loss = loss + terms.z_loss_weight * log_sum_exp.square()
    return loss


def logits_gradient(
    logits: Tensor,
    log_sum_exp: Tensor,
    scale: Tensor,
    local_target: Tensor,
    terms: LossTerms,
    valid: int | Tensor | None = None,
) -> Tensor:
    """Return the gradient of ``sum(scale * loss)`` with respect to the logits, in their dtype.

    The gradient overwrites the logits where the device's views share memory.

    Args:
        logits: ``[v, R]``.
        log_sum_exp: ``[R]``, over the full vocabulary.
        scale: ``[R]``, 0 for tokens that do not count.
        local_target: see ``local_sums``.
        terms: terms of the loss.
        valid: see ``local_sums``; the gradient of padding is 0.

    Returns:
        ``[v, R]``.
    """
    # d(lse)/dx = softmax p, so d(z lse^2)/dx = 2 z lse p: z-loss only scales the softmax term
    softmax_scale = scale
    if terms.z_loss_weight:
        softmax_scale = scale * (1 + 2 * terms.z_loss_weight * log_sum_exp)
    if can_use_triton(logits):
        return cuda.logits_gradient(logits, log_sum_exp, softmax_scale, scale, local_target, terms, valid)
    # d loss / dx = p (1 + 2 z lse) - (1 - e) onehot(target) - e / V, with p = exp(x - lse) for the
    # soft-capped logit x = c tanh(logit / c)
    capped = _capped(logits, terms)
    grad = (capped - log_sum_exp).exp() * softmax_scale
    rows = torch.arange(logits.size(0), device=logits.device).unsqueeze(-1)
    grad = grad - torch.where(rows == local_target, (1 - terms.label_smoothing) * scale, 0.0)
    if terms.label_smoothing:
        grad = grad - terms.label_smoothing / terms.vocab_size * scale
    if terms.softcap:
        # dx/dlogit = 1 - tanh(logit / c)^2 = 1 - (x / c)^2
        grad = grad * (1 - (capped / terms.softcap).square())
    # padding has p = exp(logit - lse) above 0, but no part in the loss
    grad = _without_padding(grad, valid, 0.0)
    if backend.views_share_memory:
        return logits.copy_(grad)
    return grad.to(logits.dtype)


def add_matmul(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``total + a b`` in ``dtype``, which may be wider than the dtype of the factors.

    Args:
        total: sum so far in ``dtype``, overwritten by the result; None for zero.
        a: ``[m, k]``.
        b: ``[k, n]``, in the dtype of ``a``.
        dtype: dtype of the sum.
    """
    # cuBLAS can store its fp32 accumulator. On other devices both factors are converted first.
    if a.dtype != dtype and a.is_cuda:
        if total is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    a = a.to(dtype)
    b = b.to(dtype)
    return a @ b if total is None else total.addmm_(a, b)


def scale_gradient(grad: Tensor | None, factor: Tensor) -> Tensor | None:
    """Return ``grad * factor`` for a 0-dim ``factor``, in place where possible; None for None."""
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


def labels_outside(target: Tensor, vocab_size: int, ignore_index: int) -> Tensor | None:
    """Return a mask of the labels outside the vocabulary, or None on the CPU, where they raise.

    Only the CPU can check the labels without stalling the device.

    Raises:
        ValueError: on the CPU, for a label that is neither in the vocabulary nor ``ignore_index``.
    """
    outside = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if target.device.type != "cpu":
        return outside
    if bool(outside.any()):
        label = int(target[outside][0])
        raise ValueError(
            f"label {label} is outside the vocabulary [0, {vocab_size}) "
            f"and is not ignore_index {ignore_index}: "
            "check that the tokenizer belongs to the model"
        )
    return None


def _capped(logits: Tensor, terms: LossTerms) -> Tensor:
    """Return ``c tanh(logit / c)`` in fp32 (fp64 for fp64), or the logits without soft-capping."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if terms.softcap is None:
        return wide
    return terms.softcap * torch.tanh(wide / terms.softcap)


def _without_padding(values: Tensor, valid: int | Tensor | None, fill: float) -> Tensor:
    if valid is None:
        return values
    rows = torch.arange(values.size(0), device=values.device).unsqueeze(-1)
    return values.masked_fill(rows >= valid, fill)


def _target_logit(logits: Tensor, local_target: Tensor, terms: LossTerms) -> Tensor:
    is_local = (local_target >= 0) & (local_target < logits.size(0))
    # gather needs valid indices: take row 0 for targets of other ranks, and mask the result to 0
    row = torch.where(is_local, local_target, 0)
    target_logit = logits.gather(0, row.unsqueeze(0)).squeeze(0)
    return _capped(target_logit, terms).masked_fill(~is_local, 0.0)
