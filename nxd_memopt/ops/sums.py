"""Sums over rows, such as the gradients of biases."""

from __future__ import annotations

from torch import Tensor

from nxd_memopt.ops.cuda import elementwise as cuda
from nxd_memopt.ops.cuda.support import can_use_triton


def column_sums(x: Tensor) -> Tensor:
    """Sum over all dimensions but the last; fp16 and bf16 are summed in fp32 and rounded once.

    Args:
        x: ``[..., N]``.

    Returns:
        ``[N]`` in x's dtype.
    """
    if can_use_triton(x):
        return cuda.column_sums(x)
    return x.reshape(-1, x.size(-1)).sum(0)
