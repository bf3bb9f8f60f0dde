"""Gradients of a linear layer that contains the affine part of a norm, with one read of each matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_memopt.ops.cuda.elementwise import ranges_of_rows, sum_of_parts
from nxd_memopt.ops.cuda.support import lazy_kernels

_kernels = lazy_kernels("folded_norm_kernels")

_PROGRAMS = 528  # four per multiprocessor of an H200
_TILE = {"ROWS": 8, "COLUMNS": 512, "num_warps": 4}


def folded_gradients(
    grad: Tensor, bias_grad: Tensor, weight: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Implement ``ops.folded_norm.folded_gradients``; the gradient of the weight overwrites ``grad``."""
    rows, columns = grad.shape
    blocks = -(-columns // _TILE["COLUMNS"])
    ranges, rows_each = ranges_of_rows(rows, _TILE["ROWS"], _PROGRAMS // blocks)
    parts = torch.empty(ranges, 2 * columns, dtype=torch.float32, device=grad.device)
    tensors = (grad, bias_grad, weight, gain, shift, parts)
    _kernels().gradients[(ranges, blocks)](*tensors, rows, columns, rows_each, **_TILE)
    return grad, sum_of_parts(parts, parts.dtype).view(2, columns)
