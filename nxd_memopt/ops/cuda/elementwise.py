"""Norms, activations and sums as Triton kernels; backward saves inputs only.

Each pass reads and writes its tensors once, while plain PyTorch's operators move fp32 copies
through memory. Sums over rows, such as the gradient of a weight or a bias, are computed in two
steps: sums of ranges of rows in fp32, then the sum of these partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.ops.cuda.support import power_of_2
from nxd_memopt.ops.packed_view import Layout

KINDS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_fast": "tanh",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
"""Names of the activations in the kernels, by Hugging Face's ``hidden_act``."""
_BLOCK = 1024
_NORM_PROGRAMS = 264  # two per multiprocessor of an H200
# Shared memory for rows that a program prefetches; no GPU since Ampere has less.
_STAGED_BYTES = 96 * 2**10
# 36 us for 2,048 x 6,144; with 64, 4, 512 50 us (H200)
_AFFINE_RANGES, _AFFINE_ROWS, _AFFINE_COLUMNS = 16, 8, 128
_SUM_PROGRAMS, _SUM_ROWS, _SUM_COLUMNS = 528, 8, 512  # four programs per multiprocessor
_PART_ROWS, _PART_COLUMNS = 32, 32  # narrow blocks: few rows must occupy all multiprocessors


def _kernels() -> Any:
    from nxd_memopt.ops.cuda import elementwise_kernels

    return elementwise_kernels


class _AddRMSNorm(torch.autograd.Function):
    """``x + added`` (or x without ``added``) and its RMSNorm.

    Backward adds the gradient of the sum to the gradient of the norm in one pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # One program per row. Each of x, added, total and y passes through memory once.
        rows, hidden = x.numel() // x.size(-1), x.size(-1)
        flat, adds = x.contiguous(), added is not None
        other = flat if added is None else added.contiguous()
        total = torch.empty_like(flat) if adds else flat
        y, rstd = torch.empty_like(flat), torch.empty(rows, dtype=torch.float32, device=x.device)
        options = {"ADDS": adds, "BLOCK": power_of_2(hidden), "num_warps": 8}
        _kernels().rms_norm_forward[(rows,)](flat, other, weight, total, y, rstd, hidden, eps, **options)
        ctx.adds = adds
        # Saves the norm's input and 4 bytes per row; the normalised values are recomputed in
        # backward.
        ctx.save_for_backward(total if adds else x, weight, rstd)
        return y, total if adds else x

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor | None, total_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        if grad is None:
            # only the sum was used
            return total_grad, total_grad if ctx.adds else None, None, None
        flat, grad = x.contiguous(), grad.contiguous()
        # The sum x + added has two uses, the norm and the residual stream: its gradient is the
        # norm's plus total_grad. Both x and added get this gradient. Without total_grad the kernel
        # does not read dtotal.
        dtotal = grad if total_grad is None else total_grad.contiguous()
        rows, hidden = rstd.numel(), x.size(-1)
        # Few programs with many rows each: the weight's gradient has one partial sum per program.
        programs, rows_each = _ranges(rows, 1, _NORM_PROGRAMS)
        # The weight's gradient: [programs, H] partial sums in fp32, summed by a second launch.
        dx, parts = torch.empty_like(flat), torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
        adds, block = total_grad is not None, power_of_2(hidden)
        # Rows of x, dy (and dtotal) are prefetched, unless two stages of them exceed the shared
        # memory.
        staged_bytes = 2 * (3 if adds else 2) * block * flat.element_size()
        stages = 3 if staged_bytes <= _STAGED_BYTES else 1
        options = {"ADDS": adds, "BLOCK": block, "STAGES": stages, "num_warps": 8}
        _kernels().rms_norm_backward[(programs,)](
            flat, weight, rstd, grad, dtotal, dx, parts, rows, hidden, rows_each, **options
        )
        return dx, dx if ctx.adds else None, _sum_of_parts(parts, weight.dtype), None


class _AddResidual(torch.autograd.Function):
    """``residual + output + bias`` in one pass; PyTorch takes two passes."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, output: Tensor, bias: Tensor) -> Tensor:
        flat, added = residual.contiguous(), output.contiguous()
        y, hidden = torch.empty_like(flat), bias.numel()
        grid = (y.numel() // hidden, -(-hidden // _BLOCK))
        _kernels().add_residual[grid](flat, added, bias.contiguous(), y, hidden, BLOCK=_BLOCK, num_warps=4)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # the sum passes its gradient on unchanged: no copy
        return grad, grad, column_sums(grad) if ctx.needs_input_grad[2] else None


class _Activation(torch.autograd.Function):
    """Activation in one pass forward and one pass backward; saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x)
        flat = x.contiguous()
        y = torch.empty_like(flat)
        _kernels().activation_forward[_blocks(y)](flat, y, y.numel(), KIND=kind, BLOCK=_BLOCK, num_warps=4)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        flat, grad = x.contiguous(), grad.contiguous()
        dx = torch.empty_like(flat)
        options = {"KIND": ctx.kind, "BLOCK": _BLOCK, "num_warps": 4}
        _kernels().activation_backward[_blocks(dx)](flat, grad, dx, dx.numel(), **options)
        return dx, None


def _blocks(x: Tensor) -> tuple[int]:
    return (-(-x.numel() // _BLOCK),)


class _Gated(torch.autograd.Function):
    """``act(gate) * up`` on ``[rows, F]``; the rows may be slices of longer rows."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        _on_rows(_kernels().gated_forward, kind, gate, up, y)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        # If gate and up are chunks of one projection's output, so are their gradients: the
        # projection's backward needs no copy.
        dgate, dup = Layout.of(gate, up).empty(gate)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        # without WITH_VALUE the kernel does not write its last tensor: pass any tensor
        _on_rows(_kernels().gated_backward, ctx.kind, gate, up, grad, dgate, dup, grad, WITH_VALUE=False)
        return dgate, dup, None


def _on_rows(kernel: Any, kind: str, *tensors: Tensor, **options: Any) -> None:
    """Launch ``kernel`` with a program per row and block of columns; pass each row stride."""
    rows, width = tensors[0].shape
    grid, strides = (rows, -(-width // _BLOCK)), (t.stride(0) for t in tensors)
    kernel[grid](*tensors, *strides, width, KIND=kind, BLOCK=_BLOCK, num_warps=4, **options)


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` as ``[rows, F]`` with contiguous rows, without a copy where possible."""
    return x.reshape(-1, x.size(-1)) if x.stride(-1) == 1 else x.contiguous().view(-1, x.size(-1))


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Implement ``ops.norm.add_rms_norm``."""
    return cast("tuple[Tensor, Tensor]", _AddRMSNorm.apply(x, added, weight, eps))


def add_residual(residual: Tensor, output: Tensor, bias: Tensor) -> Tensor:
    """Implement ``ops.residual.add_residual``; the result is rounded once."""
    return cast(Tensor, _AddResidual.apply(residual, output, bias))


def activation(x: Tensor, kind: str) -> Tensor:
    """Return ``act(x)``, with one pass forward and one backward; only x is saved.

    Args:
        x: of any shape.
        kind: a value of ``KINDS``.
    """
    return cast(Tensor, _Activation.apply(x, kind))


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Implement ``ops.activation.gated_activation``; ``kind`` is a value of ``KINDS``."""
    return cast(Tensor, _Gated.apply(_rows(gate), _rows(up), kind)).view(gate.shape)


def gated_activation_gradient(gate: Tensor, up: Tensor, grad: Tensor, kind: str) -> Tensor:
    """Implement ``ops.activation.gated_activation_gradient``.

    The result overwrites ``grad``, or a contiguous copy of it.
    """
    assert gate.stride(-1) == up.stride(-1) == 1
    grad = grad.contiguous()
    # gradients overwrite gate and up, the value overwrites grad
    _on_rows(_kernels().gated_backward, kind, gate, up, grad, gate, up, grad, WITH_VALUE=True)
    return grad


def _ranges(rows: int, step: int, most: int) -> tuple[int, int]:
    """Return the number of ranges and the rows per range, for at most ``most`` ranges of rows.

    The rows per range are a multiple of ``step``. ``most = 0`` counts as 1.
    """
    rows_each = -(-rows // (max(most, 1) * step)) * step
    return -(-rows // rows_each), rows_each


def column_sums(x: Tensor) -> Tensor:
    """Implement ``ops.sums.column_sums``."""
    flat = _rows(x)
    rows, columns = flat.shape
    # ranges x blocks programs, at most _SUM_PROGRAMS
    blocks = -(-columns // _SUM_COLUMNS)
    ranges, rows_each = _ranges(rows, _SUM_ROWS, _SUM_PROGRAMS // blocks)
    parts = torch.empty(ranges, columns, dtype=torch.float32, device=x.device)
    options = {"ROWS": _SUM_ROWS, "COLUMNS": _SUM_COLUMNS, "num_warps": 2}
    _kernels().column_sums[(ranges, blocks)](flat, parts, rows, columns, flat.stride(0), rows_each, **options)
    return _sum_of_parts(parts, x.dtype)


def _sum_of_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum ``[ranges, columns]`` over the ranges, rounded once.

    Takes 2.7 us for 264 x 4,096 (H200); PyTorch takes 6.9 us.
    """
    ranges, columns = parts.shape
    _, rows_each = _ranges(ranges, _PART_ROWS, 1)
    total = torch.empty(columns, dtype=dtype, device=parts.device)
    options = {"ROWS": _PART_ROWS, "COLUMNS": _PART_COLUMNS, "num_warps": 4}
    grid = (1, -(-columns // _PART_COLUMNS))
    _kernels().column_sums[grid](parts, total, ranges, columns, columns, rows_each, **options)
    return total


def affine_branches(normalised: Tensor, gains: Sequence[Tensor], shifts: Sequence[Tensor]) -> list[Tensor]:
    """Implement ``ops.norm.affine_branches`` for two branches."""
    flat = normalised.contiguous().view(-1, normalised.size(-1))
    results = [torch.empty_like(flat) for _ in gains]
    grid = (flat.size(0), -(-flat.size(1) // _BLOCK))
    _kernels().affine_forward[grid](flat, *gains, *shifts, *results, flat.size(1), BLOCK=_BLOCK, num_warps=4)
    return [result.view(normalised.shape) for result in results]


def affine_branches_gradient(
    normalised: Tensor, grads: Sequence[Tensor], gains: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Implement ``ops.norm.affine_branches_gradient`` for two branches."""
    flat, *flat_grads = (x.contiguous().view(-1, x.size(-1)) for x in (normalised, *grads))
    rows, hidden = flat.shape
    # parts: [ranges, 4 * H] in fp32, in the order gain 1, shift 1, gain 2, shift 2
    ranges, rows_each = _ranges(rows, _AFFINE_ROWS, _AFFINE_RANGES)
    result, parts = torch.empty_like(flat), torch.empty(ranges, 4 * hidden, dtype=torch.float32, device=flat.device)
    _kernels().affine_backward[(ranges, -(-hidden // _AFFINE_COLUMNS))](
        flat,
        *flat_grads,
        *gains,
        result,
        parts,
        rows,
        hidden,
        rows_each,
        ROWS=_AFFINE_ROWS,
        COLUMNS=_AFFINE_COLUMNS,
        num_warps=1,
    )
    return result.view(normalised.shape), _sum_of_parts(parts, parts.dtype).view(2, 2, hidden)
