"""Splits a tensor into consecutive parts of given sizes, correctly on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.ops.packed_view import packed_view


def split_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Return consecutive views of ``x`` along ``dim``, part i with ``sizes[i]`` elements.

    Replaces ``x.split(sizes, dim)``. With functionalization disabled
    (``XLA_DISABLE_FUNCTIONALIZATION=1``, the default of AWS's torch-neuronx), torch_xla 2.9 returns
    wrong data for a split with a list of sizes along any dimension but the first
    (pytorch/xla#8640). ``narrow`` is correct in both modes, and creates the same views on other
    devices.

    Args:
        x: tensor to split.
        sizes: lengths of the parts along ``dim``.
        dim: dimension to split.

    Raises:
        ValueError: the sizes do not add up to the length of ``dim``.
        RuntimeError: in backward, if second derivatives are requested.
    """
    if sum(sizes) != x.size(dim):
        raise ValueError(f"sizes {list(sizes)} add up to {sum(sizes)}, but dimension {dim} has {x.size(dim)} elements")
    if torch.is_grad_enabled() and x.requires_grad:
        return cast("tuple[Tensor, ...]", _SplitSizes.apply(x, tuple(sizes), dim))
    return _narrowed(x, sizes, dim)


def _narrowed(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    parts = []
    start = 0
    for size in sizes:
        parts.append(x.narrow(dim, start, size))
        start += size
    return tuple(parts)


class _SplitSizes(torch.autograd.Function):
    """Forward: views. Backward: concatenation of the gradients.

    Autograd's own backward of ``narrow`` pads each gradient with zeros to the size of ``x``, and
    adds the padded tensors. Gradients that are already adjacent in one buffer are not copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return _narrowed(x, sizes, dim)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # gradients that a kernel wrote next to each other need no copy
        grad_x = packed_view(grads, ctx.dim)
        if grad_x is None:
            grad_x = torch.cat(grads, dim=ctx.dim)
        return grad_x, None, None
