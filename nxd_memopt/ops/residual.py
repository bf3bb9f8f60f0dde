"""Adds a block's output to the residual stream, and multiplies parts of the stream by a model's constants."""

from __future__ import annotations

from torch import Tensor

from nxd_memopt.ops.cuda import elementwise as cuda
from nxd_memopt.ops.cuda.support import can_use_triton


def scaled(x: Tensor, factor: float | None) -> Tensor:
    """Return ``factor x``, or ``x`` itself if there is no factor. Saves nothing for backward."""
    if factor is None:
        return x
    return x * factor


def add_residual(residual: Tensor, output: Tensor, bias: Tensor) -> Tensor:
    """Return ``residual + (output + bias)``.

    Args:
        residual: ``[..., H]``.
        output: ``[..., H]``.
        bias: ``[H]``, of the block's last layer.

    Returns:
        ``[..., H]``.
    """
    # the kernel broadcasts only the bias
    fits = residual.shape == output.shape and bias.shape == output.shape[-1:]
    if fits and can_use_triton(residual, output, bias):
        return cuda.add_residual(residual, output, bias)
    return residual + (output + bias)
