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
from nxd_memopt.ops.cuda.support import lazy_kernels, power_of_2
from nxd_memopt.ops.parts import Layout

_kernels = lazy_kernels("elementwise_kernels")

KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_fast": "tanh",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
"""Names of the activations in the kernels, by Hugging Face's ``hidden_act``."""
_BLOCK = 1024
_NORM_PROGRAMS = 264  # two per multiprocessor of an H200
# Shared memory for rows that a program prefetches; no GPU since Ampere has less.
_STAGED_BYTES = 96 * 2**10
# Ranges of rows, and rows and columns per block: 36 us for 2,048 x 6,144; with 64, 4 and 512 it
# takes 50 us (H200).
_AFFINE_RANGES = 16
_AFFINE_ROWS = 8
_AFFINE_COLUMNS = 128
_SUM_PROGRAMS = 528  # four per multiprocessor
_SUM_ROWS = 8
_SUM_COLUMNS = 512
# narrow blocks for the sum of partial sums: few rows must occupy all multiprocessors
_PART_ROWS = 32
_PART_COLUMNS = 32


class _AddRMSNorm(torch.autograd.Function):
    """``x + added`` (or x without ``added``) and its RMSNorm.

    Backward adds the gradient of the sum to the gradient of the norm in one pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # One program per row. Each of x, added, total and y passes through memory once.
        hidden = x.size(-1)
        rows = x.numel() // hidden
        flat = x.contiguous()
        adds = added is not None
        # without ADDS the kernel uses neither added nor total: pass any tensor for them
        flat_added = flat
        flat_total = flat
        total = x
        if added is not None:
            flat_added = added.contiguous()
            flat_total = torch.empty_like(flat)
            total = flat_total
        y = torch.empty_like(flat)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        options = {"ADDS": adds, "BLOCK": power_of_2(hidden), "num_warps": 8}
        _kernels().rms_norm_forward[(rows,)](flat, flat_added, weight, flat_total, y, rstd, hidden, eps, **options)
        ctx.adds = adds
        # Saves the norm's input and 4 bytes per row; the normalised values are recomputed in
        # backward.
        ctx.save_for_backward(total, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        return y, total, rstd

    @staticmethod
    @first_derivative_only
    def backward(
        ctx: Any,
        grad: Tensor | None,
        total_grad: Tensor | None,
        rstd_grad: None = None,
    ) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        if grad is None:
            # only the sum was used: it passes its gradient on unchanged
            dx, dweight = total_grad, None
        else:
            needs_weight = ctx.needs_input_grad[2]
            dx, dweight = _rms_norm_backward(x, weight, rstd, grad, total_grad, needs_weight=needs_weight)
        # x and added have the same gradient, that of their sum
        dadded = None
        if ctx.adds:
            dadded = dx
        return dx, dadded, dweight, None


def _rms_norm_backward(
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    grad: Tensor,
    total_grad: Tensor | None,
    *,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the norm's input and weight, with two kernel launches; one for a frozen weight.

    The input has two uses, the norm and the residual stream: its gradient is the norm's plus
    ``total_grad``.

    Args:
        x: ``[..., H]``, input of the norm.
        weight: ``[H]``.
        rstd: fp32, one number per row, from forward.
        grad: ``[..., H]``, gradient of the norm's result.
        total_grad: ``[..., H]``, gradient of the residual stream; ``None``: it has no other use.
        needs_weight: whether the weight has a gradient.
    """
    rows = rstd.numel()
    hidden = x.size(-1)
    flat = x.contiguous()
    grad = grad.contiguous()
    # without ADDS the kernel does not read dtotal: pass any tensor
    adds = total_grad is not None
    dtotal = grad
    if total_grad is not None:
        dtotal = total_grad.contiguous()
    # The weight's gradient: [programs, H] partial sums in fp32, summed by a second launch. Few
    # programs with many rows each keep these partial sums small compared with x.
    programs, rows_each = ranges_of_rows(rows, 1, _NORM_PROGRAMS)
    dx = torch.empty_like(flat)
    parts = rstd  # without TRAINS the kernel does not write them: pass any tensor
    if needs_weight:
        parts = torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
    # Rows of x, dy (and dtotal) are prefetched, unless two stages of them exceed the shared
    # memory.
    block = power_of_2(hidden)
    staged_bytes = 2 * (2 + adds) * block * flat.element_size()
    stages = 3 if staged_bytes <= _STAGED_BYTES else 1
    options = {"ADDS": adds, "BLOCK": block, "STAGES": stages, "TRAINS": needs_weight, "num_warps": 8}
    _kernels().rms_norm_backward[(programs,)](
        flat, weight, rstd, grad, dtotal, dx, parts, rows, hidden, rows_each, **options
    )
    return dx, sum_of_parts(parts, weight.dtype) if needs_weight else None


class _AddResidual(torch.autograd.Function):
    """``residual + output + bias`` in one pass; PyTorch takes two passes."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, output: Tensor, bias: Tensor) -> Tensor:
        flat = residual.contiguous()
        flat_output = output.contiguous()
        y = torch.empty_like(flat)
        hidden = bias.numel()
        grid = (y.numel() // hidden, -(-hidden // _BLOCK))
        options = {"BLOCK": _BLOCK, "num_warps": 4}
        _kernels().add_residual[grid](flat, flat_output, bias.contiguous(), y, hidden, **options)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # the sum passes its gradient on unchanged: no copy
        dbias = None
        if ctx.needs_input_grad[2]:
            dbias = column_sums(grad)
        return grad, grad, dbias


class _Activation(torch.autograd.Function):
    """Activation in one pass forward and one pass backward; saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x)
        flat = x.contiguous()
        y = torch.empty_like(flat)
        options = {"KIND": kind, "BLOCK": _BLOCK, "num_warps": 4}
        _kernels().activation_forward[_blocks(y)](flat, y, y.numel(), **options)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        flat = x.contiguous()
        grad = grad.contiguous()
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
        # the kernel takes row strides, but needs adjacent elements in a row
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        # without WITH_VALUE the kernel does not write its last tensor: pass any tensor
        tensors = (gate, up, grad, dgate, dup, grad)
        _on_rows(_kernels().gated_backward, ctx.kind, *tensors, WITH_VALUE=False)
        return dgate, dup, None


def _on_rows(kernel: Any, kind: str, *tensors: Tensor, **options: Any) -> None:
    """Launch ``kernel`` with a program per row and block of columns; pass each row stride."""
    rows, width = tensors[0].shape
    grid = (rows, -(-width // _BLOCK))
    # each has its own row stride: gate and up may be halves of one tensor, the result is not
    strides = [tensor.stride(0) for tensor in tensors]
    kernel[grid](*tensors, *strides, width, KIND=kind, BLOCK=_BLOCK, num_warps=4, **options)


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` as ``[rows, F]`` with contiguous rows, without a copy where possible."""
    if x.stride(-1) == 1:
        return x.reshape(-1, x.size(-1))
    return x.contiguous().view(-1, x.size(-1))


def add_rms_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement ``ops.norm.add_rms_norm``; return rstd too, ``[rows]`` in fp32."""
    return cast("tuple[Tensor, Tensor, Tensor]", _AddRMSNorm.apply(x, added, weight, eps))


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
    # Gradients overwrite gate and up, and the value overwrites grad: no memory but the inputs. Each
    # thread reads its elements of all three before it writes them.
    _on_rows(_kernels().gated_backward, kind, gate, up, grad, gate, up, grad, WITH_VALUE=True)
    return grad


def ranges_of_rows(rows: int, step: int, most: int) -> tuple[int, int]:
    """Return the number of ranges and the rows per range, for at most ``most`` ranges of rows.

    The rows per range are a multiple of ``step``. ``most = 0`` counts as 1.
    """
    # Round the rows per range up, for at most ``most`` ranges and to a multiple of ``step``. Fewer
    # ranges may then be enough, so that none of them is empty.
    rows_each = -(-rows // (max(most, 1) * step)) * step
    return -(-rows // rows_each), rows_each


def column_sums(x: Tensor) -> Tensor:
    """Implement ``ops.sums.column_sums``."""
    flat = _rows(x)
    rows, columns = flat.shape
    # ranges x blocks programs, at most _SUM_PROGRAMS where blocks alone are not more
    blocks = -(-columns // _SUM_COLUMNS)
    ranges, rows_each = ranges_of_rows(rows, _SUM_ROWS, _SUM_PROGRAMS // blocks)
    parts = torch.empty(ranges, columns, dtype=torch.float32, device=x.device)
    options = {"ROWS": _SUM_ROWS, "COLUMNS": _SUM_COLUMNS, "num_warps": 2}
    _kernels().column_sums[(ranges, blocks)](flat, parts, rows, columns, flat.stride(0), rows_each, **options)
    return sum_of_parts(parts, x.dtype)


def sum_of_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum ``[ranges, columns]`` over the ranges, rounded once.

    Takes 2.7 us for 264 x 4,096 (H200); PyTorch takes 6.9 us.
    """
    # One range of rows: a program sums all partial sums of its columns, in a fixed order. Atomic
    # additions in the first kernel would need no second launch, but add in a random order.
    ranges, columns = parts.shape
    _, rows_each = ranges_of_rows(ranges, _PART_ROWS, 1)
    total = torch.empty(columns, dtype=dtype, device=parts.device)
    options = {"ROWS": _PART_ROWS, "COLUMNS": _PART_COLUMNS, "num_warps": 4}
    grid = (1, -(-columns // _PART_COLUMNS))
    _kernels().column_sums[grid](parts, total, ranges, columns, columns, rows_each, **options)
    return total


def affine_branches(
    normalised: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
) -> list[Tensor]:
    """Implement ``ops.norm.affine_branches`` for two branches."""
    flat = normalised.contiguous().view(-1, normalised.size(-1))
    results = [torch.empty_like(flat) for _ in weights]
    rows, hidden = flat.shape
    grid = (rows, -(-hidden // _BLOCK))
    options = {"BLOCK": _BLOCK, "num_warps": 4}
    _kernels().affine_forward[grid](flat, *weights, *biases, *results, hidden, **options)
    return [result.view(normalised.shape) for result in results]


def affine_branches_gradient(
    normalised: Tensor,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Implement ``ops.norm.affine_branches_gradient`` for two branches."""
    flat, *flat_grads = (x.contiguous().view(-1, x.size(-1)) for x in (normalised, *grads))
    rows, hidden = flat.shape
    # parts: [ranges, 4 * H] in fp32, in the order weight 1, bias 1, weight 2, bias 2
    ranges, rows_each = ranges_of_rows(rows, _AFFINE_ROWS, _AFFINE_RANGES)
    result = torch.empty_like(flat)
    parts = torch.empty(ranges, 4 * hidden, dtype=torch.float32, device=flat.device)
    _kernels().affine_backward[(ranges, -(-hidden // _AFFINE_COLUMNS))](
        flat,
        *flat_grads,
        *weights,
        result,
        parts,
        rows,
        hidden,
        rows_each,
        ROWS=_AFFINE_ROWS,
        COLUMNS=_AFFINE_COLUMNS,
        num_warps=1,
    )
    return result.view(normalised.shape), sum_of_parts(parts, parts.dtype).view(2, 2, hidden)
