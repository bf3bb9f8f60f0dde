"""Norms, activations and sums as Triton kernels; backward saves inputs only.

Each pass reads and writes its tensors once, where plain PyTorch's operators take fp32 copies through memory. Sums over
rows, a weight's or a bias's gradient, are of ranges of rows first, and then of those.
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
"""By Hugging Face's ``hidden_act``: what the kernels call it."""
_BLOCK = 1024
_NORM_PROGRAMS = 264  # two for each of an H200's processors
_STAGED_BYTES = 96 * 2**10  # of rows on their way to a program; no GPU since Ampere has less shared memory
_AFFINE_RANGES, _AFFINE_ROWS, _AFFINE_COLUMNS = 16, 8, 128  # 36 us for 2,048 x 6,144; with 64, 4, 512 50 (H200)
_SUM_PROGRAMS, _SUM_ROWS, _SUM_COLUMNS = 528, 8, 512  # four programs for each processor
_PART_ROWS, _PART_COLUMNS = 32, 32  # narrow: few rows are to keep all processors busy


def _kernels() -> Any:
    from nxd_memopt.ops.cuda import elementwise_kernels

    return elementwise_kernels


class _AddRMSNorm(torch.autograd.Function):
    """``x + added`` (x without ``added``) and its norm; the sum's gradient is added to the norm's in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows, hidden = x.numel() // x.size(-1), x.size(-1)
        flat, adds = x.contiguous(), added is not None
        other = flat if added is None else added.contiguous()
        total = torch.empty_like(flat) if adds else flat
        y, rstd = torch.empty_like(flat), torch.empty(rows, dtype=torch.float32, device=x.device)
        options = {"ADDS": adds, "BLOCK": power_of_2(hidden), "num_warps": 8}
        _kernels().rms_norm_forward[(rows,)](flat, other, weight, total, y, rstd, hidden, eps, **options)
        ctx.adds = adds
        ctx.save_for_backward(total if adds else x, weight, rstd)
        return y, total if adds else x

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor | None, total_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        if grad is None:
            return total_grad, total_grad if ctx.adds else None, None, None
        flat, grad = x.contiguous(), grad.contiguous()
        dtotal = grad if total_grad is None else total_grad.contiguous()
        rows, hidden = rstd.numel(), x.size(-1)
        programs, rows_each = _ranges(rows, 1, _NORM_PROGRAMS)
        dx, parts = torch.empty_like(flat), torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
        adds, block = total_grad is not None, power_of_2(hidden)
        staged_bytes = 2 * (3 if adds else 2) * block * flat.element_size()
        stages = 3 if staged_bytes <= _STAGED_BYTES else 1
        options = {"ADDS": adds, "BLOCK": block, "STAGES": stages, "num_warps": 8}
        _kernels().rms_norm_backward[(programs,)](
            flat, weight, rstd, grad, dtotal, dx, parts, rows, hidden, rows_each, **options
        )
        return dx, dx if ctx.adds else None, _sum_of_parts(parts, weight.dtype), None


class _AddResidual(torch.autograd.Function):
    """PyTorch adds the bias in one pass and the residual in another."""

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
        return grad, grad, column_sums(grad) if ctx.needs_input_grad[2] else None


class _Activation(torch.autograd.Function):
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
    """On ``[rows, F]``, whose rows may be parts of longer ones."""

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
        dgate, dup = Layout.of(gate, up).empty(gate)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        _on_rows(_kernels().gated_backward, ctx.kind, gate, up, grad, dgate, dup, grad, WITH_VALUE=False)
        return dgate, dup, None


def _on_rows(kernel: Any, kind: str, *tensors: Tensor, **options: Any) -> None:
    rows, width = tensors[0].shape
    grid, strides = (rows, -(-width // _BLOCK)), (t.stride(0) for t in tensors)
    kernel[grid](*tensors, *strides, width, KIND=kind, BLOCK=_BLOCK, num_warps=4, **options)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1)) if x.stride(-1) == 1 else x.contiguous().view(-1, x.size(-1))


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ``ops.norm.add_rms_norm``."""
    return cast("tuple[Tensor, Tensor]", _AddRMSNorm.apply(x, added, weight, eps))


def add_residual(residual: Tensor, output: Tensor, bias: Tensor) -> Tensor:
    """As ``ops.residual.add_residual``, rounded once."""
    return cast(Tensor, _AddResidual.apply(residual, output, bias))


def activation(x: Tensor, kind: str) -> Tensor:
    """``act(x)`` in one pass each way; keeps x alone. ``kind`` is a value of ``KINDS``."""
    return cast(Tensor, _Activation.apply(x, kind))


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """As ``ops.activation.gated_activation``; ``kind`` is a value of ``KINDS``."""
    return cast(Tensor, _Gated.apply(_rows(gate), _rows(up), kind)).view(gate.shape)


def gated_activation_gradient(gate: Tensor, up: Tensor, grad: Tensor, kind: str) -> Tensor:
    """As ``ops.activation.gated_activation_gradient``; the value takes the place of ``grad``."""
    assert gate.stride(-1) == up.stride(-1) == 1
    grad = grad.contiguous()
    _on_rows(_kernels().gated_backward, kind, gate, up, grad, gate, up, grad, WITH_VALUE=True)
    return grad


def _ranges(rows: int, step: int, most: int) -> tuple[int, int]:
    """At most ``most`` ranges (one, where that is 0) of so many rows, a multiple of ``step``."""
    rows_each = -(-rows // (max(most, 1) * step)) * step
    return -(-rows // rows_each), rows_each


def column_sums(x: Tensor) -> Tensor:
    """As ``ops.sums.column_sums``."""
    flat = _rows(x)
    rows, columns = flat.shape
    blocks = -(-columns // _SUM_COLUMNS)
    ranges, rows_each = _ranges(rows, _SUM_ROWS, _SUM_PROGRAMS // blocks)
    parts = torch.empty(ranges, columns, dtype=torch.float32, device=x.device)
    options = {"ROWS": _SUM_ROWS, "COLUMNS": _SUM_COLUMNS, "num_warps": 2}
    _kernels().column_sums[(ranges, blocks)](flat, parts, rows, columns, flat.stride(0), rows_each, **options)
    return _sum_of_parts(parts, x.dtype)


def _sum_of_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Of ``[ranges, columns]`` over the ranges, rounded once: 2.7 us for 264 x 4,096 (H200), PyTorch takes 6.9."""
    ranges, columns = parts.shape
    _, rows_each = _ranges(ranges, _PART_ROWS, 1)
    total = torch.empty(columns, dtype=dtype, device=parts.device)
    options = {"ROWS": _PART_ROWS, "COLUMNS": _PART_COLUMNS, "num_warps": 4}
    grid = (1, -(-columns // _PART_COLUMNS))
    _kernels().column_sums[grid](parts, total, ranges, columns, columns, rows_each, **options)
    return total


def affine_branches(normalised: Tensor, gains: Sequence[Tensor], shifts: Sequence[Tensor]) -> list[Tensor]:
    """As ``ops.norm.affine_branches``, for two."""
    flat = normalised.contiguous().view(-1, normalised.size(-1))
    results = [torch.empty_like(flat) for _ in gains]
    grid = (flat.size(0), -(-flat.size(1) // _BLOCK))
    _kernels().affine_forward[grid](flat, *gains, *shifts, *results, flat.size(1), BLOCK=_BLOCK, num_warps=4)
    return [result.view(normalised.shape) for result in results]


def affine_branches_gradient(
    normalised: Tensor, grads: Sequence[Tensor], gains: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """As ``ops.norm.affine_branches_gradient``, for two."""
    flat, *flat_grads = (x.contiguous().view(-1, x.size(-1)) for x in (normalised, *grads))
    rows, hidden = flat.shape
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
