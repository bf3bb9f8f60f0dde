"""RMSNorm over each head of queries or keys as Triton kernels, which read any order of heads and tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.ops.cuda.elementwise import ranges_of_rows, sum_of_parts
from nxd_memopt.ops.cuda.support import lazy_kernels, power_of_2

_kernels = lazy_kernels("head_norm_kernels")

_ELEMENTS = 4096  # of a program's rows at a time
_BACKWARD_PROGRAMS = 1056  # eight per multiprocessor of an H200


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, tokens and heads of ``[B, S, h, d]``."""
    batch, token, head, _ = x.stride()
    return batch, token, head


class _HeadNorm(torch.autograd.Function):
    """RMSNorm of ``[B, S, h, d]``; saves the input as it is in memory, and 4 bytes per head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        _, tokens, heads, width = x.shape
        count = x.numel() // width
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty(count, dtype=torch.float32, device=x.device)
        block = power_of_2(width)
        rows = max(_ELEMENTS // block, 1)
        _kernels().head_norm_forward[(-(-count // rows),)](
            x, weight, y, rstd, count, width, heads, tokens, *_strides(x), eps, ROWS=rows, BLOCK=block, num_warps=4
        )
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        _, tokens, heads, width = x.shape
        count = rstd.numel()
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        block = power_of_2(width)
        rows = max(_ELEMENTS // block, 1)
        programs, rows_each = ranges_of_rows(count, rows, _BACKWARD_PROGRAMS)
        needs_weight = ctx.needs_input_grad[1]
        parts = rstd  # without TRAINS the kernel does not write them: pass any tensor
        if needs_weight:
            parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        tensors = (x, weight, rstd, grad, dx, parts)
        strides = (*_strides(x), *_strides(grad))
        _kernels().head_norm_backward[(programs,)](
            *tensors,
            *(count, width, heads, tokens),
            *strides,
            rows_each,
            ROWS=rows,
            BLOCK=block,
            TRAINS=needs_weight,
            num_warps=4,
        )
        return dx, sum_of_parts(parts, weight.dtype) if needs_weight else None, None


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement ``ops.norm.head_norm``; the heads of a token are adjacent in the result."""
    # [B, h, S, d] -> [B, S, h, d] and back: views
    return cast(Tensor, _HeadNorm.apply(x.transpose(1, 2), weight, eps)).transpose(1, 2)
