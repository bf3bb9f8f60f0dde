"""RMSNorm and the parts of LayerNorm on local tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nxd_memopt.ops.cuda import elementwise as cuda
from nxd_memopt.ops.cuda.head_norm import head_norm as cuda_head_norm
from nxd_memopt.ops.cuda.support import can_use_triton

_NATIVE_LAYER_NORM = ("cpu", "cuda")  # devices with PyTorch's own kernels, backward too


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
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # [..., H] * [..., 1]
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    # rounded before the weight, as in LLaMA
    return weight * normalised.to(x.dtype)


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
    operands = [x, weight]
    if added is not None:
        operands.append(added)
    # the kernel does not broadcast ``added``
    is_one_shape = added is None or added.shape == x.shape
    if is_one_shape and can_use_triton(*operands):
        return cuda.add_rms_norm(x, added, weight, eps)
    total = x
    if added is not None:
        total = x + added
    return rms_norm(total, weight, eps), total


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
