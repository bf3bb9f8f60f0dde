"""RMSNorm and the parts of LayerNorm on local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nxd_memopt.ops.cuda import elementwise as cuda
from nxd_memopt.ops.cuda.head_norm import head_norm as cuda_head_norm
from nxd_memopt.ops.cuda.support import can_use_triton

_NATIVE_LAYER_NORM = ("cpu", "cuda")  # devices with PyTorch's own kernels, backward too


class NormInput(NamedTuple):
    """What an RMSNorm with a frozen weight keeps for backward, from which its result is known.

    Where a layer needs the result for nothing but ``grad^t rms_norm(x)``, such as the gradient of an adapter's
    factor, it keeps these instead, which the norm keeps already.

    Args:
        x: ``[..., H]``, input of the norm.
        rstd: ``[..., 1]``, fp32 (fp64 for fp64).
        weight: ``[H]``.
    """

    x: Tensor
    rstd: Tensor
    weight: Tensor

    @classmethod
    def of(cls, result: Tensor) -> NormInput | None:
        """Return the input of the norm that returned ``result``; None for another tensor, or where X is kept.

        It is None if ``result``, X or the weight was written to, or if a saved-tensor hook, such as a checkpoint's,
        began or ended in between: the hook decides what is kept, and may see ``result`` as an input.
        """
        if not hasattr(result, _NOTE):
            return None
        source, *moment = getattr(result, _NOTE)
        return source if moment == source._moment(result) else None

    def _moment(self, result: Tensor) -> list[Any]:
        """Return versions of the tensors and the saved-tensor hooks, which must stay equal."""
        # The norm's own backward would reject other values, but need not run: adapters alone may be asked for.
        return [result._version, self.x._version, self.weight._version, _saved_tensor_hooks()]

    def transposed_product(self, grad: Tensor) -> Tensor:
        """Return ``grad^t rms_norm(x)``, ``[r, H]``, with ``grad`` ``[rows, r]``.

        The factors of rows and columns multiply the thin matrices: x is read once, and nothing of its size written.
        """
        # rounded once, and by the kernel that multiplies
        scaled = torch.mul(grad, self.rstd, out=torch.empty_like(grad))
        return ((scaled.t() @ self.x) * self.weight).to(grad.dtype)


_NOTE = "_nxd_memopt_norm_input"
"""Attribute of the result of a norm: its ``NormInput``, and the ``_moment`` of the norm."""


def _saved_tensor_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore


def _noted(result: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """Return ``result`` with a note of its ``NormInput``, if the norm keeps that for backward."""
    if torch.is_grad_enabled() and x.requires_grad and not weight.requires_grad and not torch.compiler.is_compiling():
        source = NormInput(x.detach(), rstd.detach().view(*x.shape[:-1], 1), weight)
        setattr(result, _NOTE, (source, *source._moment(result)))
    return result


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv:1910.07467).

    As in LLaMA, the normalised values are rounded to x's dtype before the weight is applied.

    Args:
        x: ``[..., H]``; normalised in fp32 (fp64 for fp64).
        weight: ``[H]``.
        eps: added to the mean square.

    Returns:
        ``[..., H]``.
    """
    if can_use_triton(x, weight):
        return cuda.add_rms_norm(x, None, weight, eps)[0]
    return _plain_rms_norm(x, weight, eps)[0]


def _plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm`` and ``1 / sqrt(mean(x^2) + eps)``, ``[..., 1]``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    # [..., H] * [..., 1]
    normalised = wide * rstd
    # rounded before the weight, as in LLaMA
    return weight * normalised.to(x.dtype), rstd


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``rms_norm`` over each head of queries or keys.

    Args:
        x: ``[B, h, S, d]``, in any order of memory.
        weight: ``[d]``.
        eps: added to the mean square.

    Returns:
        ``[B, h, S, d]``; from the kernel the heads of a token are adjacent in memory, as attention
        kernels read them.
    """
    if x.stride(-1) == 1 and can_use_triton(x, weight):
        return cuda_head_norm(x, weight, eps)
    return rms_norm(x, weight, eps)


def add_rms_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(x + added)`` and the sum ``x + added``, which is the next residual stream.

    Args:
        x: ``[..., H]``.
        added: ``[..., H]``, or ``None`` to add nothing.
        weight: ``[H]``.
        eps: added to the mean square.

    Returns:
        ``[..., H]`` and ``[..., H]``.
    """
    # the kernel does not broadcast ``added``
    if added is not None and added.shape != x.shape:
        x, added = x + added, None
    if can_use_triton(x, weight) and (added is None or can_use_triton(added)):
        result, total, rstd = cuda.add_rms_norm(x, added, weight, eps)
        return _noted(result, total, rstd, weight), total
    total = x if added is None else x + added
    result, rstd = _plain_rms_norm(total, weight, eps)
    if total.dtype == rstd.dtype:  # otherwise the norm keeps a copy of the sum in fp32
        _noted(result, total, rstd, weight)
    return result, total


def normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(x - mean) * rstd``, mean and rstd: LayerNorm without its affine part.

    See arXiv:1607.06450.

    Args:
        x: ``[..., H]``; statistics in fp32 (fp64 for fp64).
        eps: added to the variance.

    Returns:
        ``[..., H]`` in x's dtype, and twice ``[..., 1]``.
    """
    if x.device.type in _NATIVE_LAYER_NORM:
        return torch.native_layer_norm(x, [x.size(-1)], None, None, eps)
    # Two passes, the variance from the differences to the mean: E[x^2] - E[x]^2 cancels in fp32.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    return ((wide - mean) * rstd).to(x.dtype), mean, rstd


def normalise_gradient(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return the gradient of ``normalise``'s first result with respect to ``x``.

    Args:
        grad: ``[..., H]``, gradient of the first result.
        x: ``[..., H]``, input of ``normalise``.
        mean: ``[..., 1]``, from ``normalise``.
        rstd: ``[..., 1]``, from ``normalise``.
    """
    if x.device.type in _NATIVE_LAYER_NORM:
        # of x, but not of weight and bias, which normalise() does not have
        output_mask = [True, False, False]
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(grad, x, [x.size(-1)], mean, rstd, None, None, output_mask)
        return dx
    # With y = (x - mean) * rstd: dx = rstd * (dy - mean(dy) - y * mean(dy * y)), means over H.
    # y is recomputed from x, so that forward saves nothing in fp32 but two numbers per row.
    wide = grad.to(rstd.dtype)
    normalised = (x - mean) * rstd
    projection = (wide * normalised).mean(-1, keepdim=True)
    return (rstd * (wide - wide.mean(-1, keepdim=True) - normalised * projection)).to(x.dtype)


def affine_branches(
    normalised: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
) -> list[Tensor]:
    """Return ``normalised * weight + bias`` for each pair of weight and bias.

    Args:
        normalised: ``[..., H]``.
        weights: ``[H]`` each.
        biases: ``[H]`` each.

    Returns:
        ``[..., H]`` each.
    """
    # the kernels are for GPT-NeoX's two branches
    if len(weights) == 2 and can_use_triton(normalised, *weights, *biases):
        return cuda.affine_branches(normalised, weights, biases)
    branches = zip(weights, biases, strict=True)
    return [torch.addcmul(bias, normalised, weight) for weight, bias in branches]


def affine_branches_gradient(
    normalised: Tensor,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``affine_branches``.

    Args:
        normalised: ``[..., H]``.
        grads: ``[..., H]`` each, gradients of the results.
        weights: ``[H]`` each.

    Returns:
        The gradient with respect to ``normalised``, in its dtype, and the gradients with respect to
        each weight and bias, ``[branches, 2, H]`` in fp32 (fp64 for fp64).
    """
    if len(weights) == 2 and can_use_triton(normalised, *grads, *weights):
        return cuda.affine_branches_gradient(normalised, grads, weights)
    wide = torch.promote_types(normalised.dtype, torch.float32)
    flat = normalised.reshape(-1, normalised.size(-1)).to(wide)
    # Per branch: dx += dy * weight, dweight = sum over rows of dy * x, dbias = sum over rows of dy.
    # dx of all branches is summed in fp32 and rounded once.
    grad_normalised = torch.zeros_like(flat)
    grad_affine = []
    for grad, weight in zip(grads, weights, strict=True):
        wide_grad = grad.reshape(flat.shape).to(wide)
        grad_normalised = torch.addcmul(grad_normalised, wide_grad, weight.to(wide))
        grad_affine.append(torch.stack([(wide_grad * flat).sum(0), wide_grad.sum(0)]))
    grad_normalised = grad_normalised.view(normalised.shape).to(normalised.dtype)
    return grad_normalised, torch.stack(grad_affine)
