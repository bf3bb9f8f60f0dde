"""Triton kernel of ``ops.cuda.folded_norm``; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def gradients(
    grad,
    bias_grad,
    weight,
    gain,
    shift,
    parts,
    rows,
    columns,
    rows_each,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Overwrite ``grad`` with the gradient of the weight; write parts of the sums over rows of gain and shift.

    A program handles a range of rows and a block of columns.
    """
    first = tl.program_id(0).to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, rows)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    gains = tl.load(gain + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    shifts = tl.load(shift + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    of_gain = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_shift = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows_each, ROWS):
        row = first + start + tl.arange(0, ROWS)
        is_row = row < last
        mask = is_row[:, None] & is_column[None, :]
        offset = row[:, None] * columns + column[None, :]
        of_product = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(weight + offset, mask=mask, other=0.0).to(tl.float32)
        of_bias = tl.load(bias_grad + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
        of_gain += of_product * values
        of_shift += of_bias * values
        tl.store(grad + offset, (of_product * gains + of_bias * shifts).to(grad.dtype.element_ty), mask=mask)
    # one row of parts per range: gain, shift
    target = parts + tl.program_id(0).to(tl.int64) * 2 * columns + column
    tl.store(target, tl.sum(of_gain, 0), mask=is_column)
    tl.store(target + columns, tl.sum(of_shift, 0), mask=is_column)
