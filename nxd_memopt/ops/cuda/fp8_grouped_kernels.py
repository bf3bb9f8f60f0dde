"""Triton kernels of ``ops.cuda.fp8_grouped``; imported only where Triton is installed.

A tile has TILE rows of one group at most. Tiles of rows by expert are those that ``plan_tiles`` wrote; with
GROUP_ROWS every group has that many rows, as a weight has.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from nxd_memopt.ops.cuda.fp8_kernels import scales
from nxd_memopt.ops.cuda.grouped_matmul_kernels import _store_tile, _tile_in_groups


@triton.jit
def _rows_of_tile(tiles, tile, most, GROUP_ROWS: tl.constexpr, TILE: tl.constexpr):  # noqa: N803
    """Return group, first row and end of the rows of a tile; no row for one that does not exist."""
    if GROUP_ROWS > 0:
        tiles_each: tl.constexpr = (GROUP_ROWS + TILE - 1) // TILE
        group = tile // tiles_each
        begin = group * GROUP_ROWS + tile % tiles_each * TILE
        end = group * GROUP_ROWS + GROUP_ROWS
    else:
        exists = tile < tl.load(tiles + 3 * most)
        group = tl.load(tiles + tile, mask=exists, other=0)
        begin = tl.load(tiles + most + tile, mask=exists, other=0)
        end = tl.load(tiles + 2 * most + tile, mask=exists, other=0)
    return group, begin, end


@triton.jit
def _read(x, tokens, row, exists, column, is_column, stride, GATHERS: tl.constexpr):  # noqa: N803
    """Return rows of x, or with GATHERS the rows of their tokens, in fp32; zeros for rows that do not exist."""
    source = row
    if GATHERS:
        source = tl.load(tokens + row, mask=exists, other=0)
    pointers = x + source.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(pointers, mask=exists[:, None] & is_column[None, :], other=0.0).to(tl.float32)


@triton.jit
def largest(
    x,
    tokens,
    tiles,
    row_sizes,
    column_sizes,
    most,
    columns,
    stride,
    GROUP_ROWS: tl.constexpr,  # noqa: N803
    GATHERS: tl.constexpr,  # noqa: N803
    ROWWISE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Raise the magnitudes, as bits of fp32, to the largest of a tile: of its group, or of its rows and columns."""
    group, begin, end = _rows_of_tile(tiles, tl.program_id(0), most, GROUP_ROWS, TILE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, TILE, ROWS):
        row = begin + start + tl.arange(0, ROWS)
        exists = row < end
        values = tl.abs(_read(x, tokens, row, exists, column, is_column, stride, GATHERS))
        # Integers, whose order is the order of the values, with NaN above infinity.
        if ROWWISE:
            sizes = tl.max(values.to(tl.int32, bitcast=True), 1)
            tl.atomic_max(row_sizes + row, sizes, mask=exists, sem="relaxed")
        found = tl.maximum(found, values, propagate_nan=tl.PropagateNan.ALL)
    sizes = tl.max(found.to(tl.int32, bitcast=True), 0)
    if ROWWISE:
        at = column_sizes + group.to(tl.int64) * columns + column
        tl.atomic_max(at, sizes, mask=is_column & (begin < end), sem="relaxed")
    else:
        tl.atomic_max(row_sizes + group, tl.max(sizes, 0), mask=begin < end, sem="relaxed")


@triton.jit
def cast(
    x,
    tokens,
    tiles,
    row_sizes,
    column_sizes,
    as_rows,
    row_scales,
    as_columns,
    column_scales,
    most,
    columns,
    stride,
    padded_rows,
    LIMIT: tl.constexpr,  # noqa: N803
    SMALLEST: tl.constexpr,  # noqa: N803
    GROUP_ROWS: tl.constexpr,  # noqa: N803
    GATHERS: tl.constexpr,  # noqa: N803
    TO_ROWS: tl.constexpr,  # noqa: N803
    TO_COLUMNS: tl.constexpr,  # noqa: N803
    ROWWISE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Round a tile to float8 as it is, transposed, or both; write a scale for each row, and group and column.

    Transposed, the rows of tile t are the numbers ``t TILE`` to ``(t + 1) TILE``, with zeros after its last row.
    With GROUP_ROWS every group is a matrix ``[columns, padded_rows]`` of its own.
    """
    tile = tl.program_id(0)
    group, begin, end = _rows_of_tile(tiles, tile, most, GROUP_ROWS, TILE)
    row = begin + tl.arange(0, TILE)
    exists = row < end
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    values = _read(x, tokens, row, exists, column, is_column, stride, GATHERS)
    if TO_ROWS:
        if ROWWISE:
            sizes = tl.load(row_sizes + row, mask=exists, other=1.0)
        else:
            sizes = tl.load(row_sizes + group + tl.zeros([TILE], tl.int32))
        scale, inverse = scales(sizes, LIMIT, SMALLEST)
        if tl.program_id(1) == 0:
            tl.store(row_scales + row, scale, mask=exists)
        rounded = (values * inverse[:, None]).to(as_rows.dtype.element_ty)
        to = as_rows + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(to, rounded, mask=exists[:, None] & is_column[None, :])
    if TO_COLUMNS:
        at = group.to(tl.int64) * columns + column
        if ROWWISE:
            sizes = tl.load(column_sizes + at, mask=is_column, other=1.0)
        else:
            sizes = tl.load(column_sizes + group + tl.zeros([COLUMNS], tl.int32))
        scale, inverse = scales(sizes, LIMIT, SMALLEST)
        # All tiles of a group write the same numbers.
        tl.store(column_scales + at, scale, mask=is_column & (begin < end))
        rounded = (values * inverse[None, :]).to(as_columns.dtype.element_ty)
        if GROUP_ROWS > 0:
            line, number = at, begin - group * GROUP_ROWS + tl.arange(0, TILE)
        else:
            line, number = column.to(tl.int64), tile * TILE + tl.arange(0, TILE)
        to = as_columns + line[:, None] * padded_rows + number[None, :]
        tl.store(to, tl.trans(rounded), mask=is_column[:, None] & ((number < padded_rows) & (begin < end))[None, :])


@triton.jit
def matmul_of_rows(
    a_tiles,
    a_scales,
    weight_tiles,
    weight_scales,
    out,
    tiles,
    most,
    OUT: tl.constexpr,  # noqa: N803
    IN: tl.constexpr,  # noqa: N803
    SUM: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    GROUP_M: tl.constexpr,  # noqa: N803
):
    """Compute ``out[r] = a[r] w_e^t``, ``[R, OUT]``, for each expert's rows; weights are ``[E, OUT, IN]``.

    Rows of other experts in a tile are computed and not stored. Beyond IN the copy engine reads zeros.
    """
    columns: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    count = tl.load(tiles + 3 * most)
    for tile in tl.range(tl.program_id(0), count * columns, tl.num_programs(0), flatten=True):
        row_tile, column_tile = _tile_in_groups(tile, count, columns, GROUP_M)
        column = column_tile * BLOCK_N
        expert = tl.load(tiles + row_tile)
        begin = tl.load(tiles + most + row_tile)
        end = tl.load(tiles + 2 * most + row_tile)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(0, IN, SUM):
            # Sums of SUM products stay in the tensor cores' registers, and are added up in fp32.
            part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for k in range(first, min(first + SUM, IN), BLOCK_K):
                x = a_tiles.load([begin, k])
                w = weight_tiles.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K).T
                part = tl.dot(x, w, part)
            total += part
        row = begin + tl.arange(0, BLOCK_M)
        to = column + tl.arange(0, BLOCK_N)
        is_own = row < end
        is_column = to < OUT
        total = total * tl.load(a_scales + row, mask=is_own, other=0.0)[:, None]
        total = total * tl.load(weight_scales + expert * OUT + to, mask=is_column, other=0.0)[None, :]
        where = out + row.to(tl.int64)[:, None] * OUT + to[None, :]
        if OUT % BLOCK_N == 0:
            tl.store(where, total.to(out.dtype.element_ty), mask=is_own[:, None])
        else:
            tl.store(where, total.to(out.dtype.element_ty), mask=is_own[:, None] & is_column[None, :])


@triton.jit
def matmul_over_rows(
    a_tiles,
    a_scales,
    b_tiles,
    b_scales,
    tiles,
    out,
    most,
    experts,
    LEFT: tl.constexpr,  # noqa: N803
    RIGHT: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    SUM: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    GROUP_M: tl.constexpr,  # noqa: N803
):
    """Compute ``out[e] = a_e b_e^t``, ``[E, LEFT, RIGHT]``, of the columns ``[LEFT, tiles TILE]`` and ``[RIGHT, ...]``.

    An expert's tiles end with zeros, so that nothing is masked. An expert without rows gets zeros.
    """
    lefts: tl.constexpr = (LEFT + BLOCK_M - 1) // BLOCK_M
    rights: tl.constexpr = (RIGHT + BLOCK_N - 1) // BLOCK_N
    first_tiles = tiles + 3 * most + 1
    for tile in tl.range(tl.program_id(0), experts * lefts * rights, tl.num_programs(0), flatten=True):
        expert = tile // (lefts * rights)
        left_tile, right_tile = _tile_in_groups(tile % (lefts * rights), lefts, rights, GROUP_M)
        begin = tl.load(first_tiles + expert) * TILE
        end = tl.load(first_tiles + expert + 1) * TILE
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(begin, end, SUM):
            part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for start in range(first, min(first + SUM, end), BLOCK_K):
                x = a_tiles.load([left_tile * BLOCK_M, start])
                y = b_tiles.load([right_tile * BLOCK_N, start])
                part = tl.dot(x, y.T, part)
            total += part
        left = left_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        right = right_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        total = total * tl.load(a_scales + expert * LEFT + left, mask=left < LEFT, other=0.0)[:, None]
        total = total * tl.load(b_scales + expert * RIGHT + right, mask=right < RIGHT, other=0.0)[None, :]
        to = out + expert.to(tl.int64) * LEFT * RIGHT
        _store_tile(total, to, left_tile * BLOCK_M, right_tile * BLOCK_N, RIGHT, LEFT, RIGHT, BLOCK_M, BLOCK_N)
