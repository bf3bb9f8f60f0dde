"""Triton kernels of experts beside the matmuls: gated activation with weights of rows, and sums of rows."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from nxd_memopt.ops.cuda.elementwise_kernels import _activated


@triton.jit
def gated_of_rows(gate_up, out, rows, WIDTH: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Compute ``act(gate) * up`` of ``[R, 2 WIDTH]``, for ROWS x BLOCK elements per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < WIDTH)
    x = tl.load(gate_up + row * (2 * WIDTH) + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activated(x, KIND)
    tl.store(out + row * WIDTH + column, (value * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated_of_rows_backward(
    gate_up,
    grad,
    weights,
    choices,
    weight_grads,
    last,
    rows,
    WIDTH: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Compute the gradients of ``weight * act(gate) * up`` for ROWS rows per program, in place.

    ``grad`` is the gradient of the weighted value, and is overwritten by that value; ``gate_up`` is
    overwritten by its gradient. The gradient of a row's weight is the sum over the row of ``grad``
    times the value without its weight, in fp32. Rows from ``last`` on are of no expert.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < tl.minimum(rows, tl.load(last))
    choice = tl.load(choices + row, mask=exists, other=0)
    weight = tl.load(weights + choice, mask=exists, other=0.0).to(tl.float32)[:, None]
    sums = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        mask = exists[:, None] & (column < WIDTH)
        gate_at = gate_up + row[:, None] * (2 * WIDTH) + column
        grad_at = grad + row[:, None] * WIDTH + column
        x = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(gate_at + WIDTH, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(grad_at, mask=mask, other=0.0).to(tl.float32)
        value, slope = _activated(x, KIND)
        activated = value * factor
        sums += tl.sum(dy * activated, axis=1)
        dy = dy * weight
        tl.store(gate_at, (dy * factor * slope).to(gate_up.dtype.element_ty), mask=mask)
        tl.store(gate_at + WIDTH, (dy * value).to(gate_up.dtype.element_ty), mask=mask)
        tl.store(grad_at, (activated * weight).to(grad.dtype.element_ty), mask=mask)
    tl.store(weight_grads + choice, sums.to(weight_grads.dtype.element_ty), mask=exists)


@triton.jit
def add_rows(
    rows_of,
    positions,
    weights,
    out,
    last,
    out_row,
    WIDTH: tl.constexpr,  # noqa: N803
    TOP_K: tl.constexpr,  # noqa: N803
    HAS_WEIGHTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Sum the TOP_K rows of one token per program in fp32, times their weights with HAS_WEIGHTS.

    A choice whose position is ``last`` or more has no row, and adds nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    count = tl.load(last)
    for j in tl.static_range(TOP_K):
        position = tl.load(positions + token * TOP_K + j).to(tl.int64)
        mask = (column < WIDTH) & (position < count)
        value = tl.load(rows_of + position * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value = value * tl.load(weights + token * TOP_K + j).to(tl.float32)
        total += value
    tl.store(out + token * out_row + column, total.to(out.dtype.element_ty), mask=column < WIDTH)
