"""Triton kernels of ``ops.cuda.fp8``; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def largest(
    x,
    factors,
    row_sizes,
    column_sizes,
    rows,
    columns,
    stride,
    ROWWISE: tl.constexpr,  # noqa: N803
    FACTORS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    STEPS: tl.constexpr,  # noqa: N803
):
    """Raise the magnitudes, as bits of fp32, to the largest of ``STEPS`` tiles of rows."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    if FACTORS:
        factor = tl.load(factors + column, mask=is_column, other=0.0).to(tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & is_column[None, :]
        values = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if FACTORS:
            values *= factor[None, :]
        values = tl.abs(values)
        # Integers, whose order is the order of the values, with NaN above infinity.
        if ROWWISE:
            sizes = tl.max(values.to(tl.int32, bitcast=True), 1)
            tl.atomic_max(row_sizes + row, sizes, mask=row < rows, sem="relaxed")
        found = tl.maximum(found, values, propagate_nan=tl.PropagateNan.ALL)
    bits = found.to(tl.int32, bitcast=True)
    sizes = tl.max(bits, 0)
    if ROWWISE:
        tl.atomic_max(column_sizes + column, sizes, mask=is_column, sem="relaxed")
    else:
        tl.atomic_max(row_sizes, tl.max(sizes, 0), sem="relaxed")


@triton.jit
def scales(sizes, limit: tl.constexpr, smallest: tl.constexpr):
    """Return the scale of values with the magnitudes ``sizes``, and its inverse; both 1 below ``smallest``."""
    is_zero = sizes < smallest
    scale = tl.where(is_zero, 1.0, tl.math.div_rn(sizes, limit))
    inverse = tl.where(is_zero, 1.0, tl.math.div_rn(limit, tl.where(is_zero, 1.0, sizes)))
    return scale, inverse


# ``rows`` is not compiled in: with a constant 1 the padding's zeros are constants too, and machine code of Triton 3.6's
# ptxas (PTX 8.7, which is right) wrote bytes of other registers among them.
@triton.jit(do_not_specialize=["rows"])
def cast(
    x,
    factors,
    row_sizes,
    column_sizes,
    as_rows,
    row_scales,
    as_columns,
    column_scales,
    rows,
    columns,
    padded_rows,
    stride,
    LIMIT: tl.constexpr,  # noqa: N803
    SMALLEST: tl.constexpr,  # noqa: N803
    TO_ROWS: tl.constexpr,  # noqa: N803
    TO_COLUMNS: tl.constexpr,  # noqa: N803
    ROWWISE: tl.constexpr,  # noqa: N803
    FACTORS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Round a tile to float8 as it is, transposed, or both; write the scales."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = row < rows
    is_column = column < columns
    mask = is_row[:, None] & is_column[None, :]
    # rows from ``rows`` to ``padded_rows`` are zeros in the transposed result
    values = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if FACTORS:
        factor = tl.load(factors + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        values = tl.where(mask, values * factor, 0.0)  # 0 by a negative factor is -0
    if TO_ROWS:
        if ROWWISE:
            scale, inverse = scales(tl.load(row_sizes + row, mask=is_row, other=0.0), LIMIT, SMALLEST)
            if tl.program_id(1) == 0:
                tl.store(row_scales + row, scale, mask=is_row)
            rounded = (values * inverse[:, None]).to(as_rows.dtype.element_ty)
        else:
            scale, inverse = scales(tl.load(row_sizes), LIMIT, SMALLEST)
            if tl.program_id(0) + tl.program_id(1) == 0:
                tl.store(row_scales, scale)
            rounded = (values * inverse).to(as_rows.dtype.element_ty)
        tl.store(as_rows + row[:, None] * columns + column[None, :], rounded, mask=mask)
    if TO_COLUMNS:
        if ROWWISE:
            scale, inverse = scales(tl.load(column_sizes + column, mask=is_column, other=0.0), LIMIT, SMALLEST)
            if tl.program_id(0) == 0:
                tl.store(column_scales + column, scale, mask=is_column)
            rounded = (values * inverse[None, :]).to(as_columns.dtype.element_ty)
        else:
            scale, inverse = scales(tl.load(column_sizes), LIMIT, SMALLEST)
            if tl.program_id(0) + tl.program_id(1) == 0:
                tl.store(column_scales, scale)
            rounded = (values * inverse).to(as_columns.dtype.element_ty)
        mask = is_column[:, None] & (row < padded_rows)[None, :]
        tl.store(as_columns + column[:, None] * padded_rows + row[None, :], tl.trans(rounded), mask=mask)


@triton.jit
def transpose(x, result, rows, columns, padded_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    """Transpose bytes; the result's rows end with zeros."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=mask, other=0)
    mask = (column < columns)[:, None] & (row < padded_rows)[None, :]
    tl.store(result + column[:, None] * padded_rows + row[None, :], tl.trans(values), mask=mask)
