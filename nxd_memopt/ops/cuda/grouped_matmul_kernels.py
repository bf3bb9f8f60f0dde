"""Triton matmuls of several experts on rows sorted by expert; rows of an operand may be gathered while they are read.

``offsets[e]`` is the end of expert e's rows, on the device. R is the number of rows, E of experts.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def plan_tiles(offsets, tiles, most, experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Write the tiles of BLOCK rows of one expert per program: expert, first row, end of the expert's rows.

    ``tiles`` is ``[3, most]``, then the number of tiles, then the first tile of each expert, and their number again.
    """
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + index, mask=index < experts, other=0)
    begins = tl.load(offsets + index - 1, mask=(index > 0) & (index < experts), other=0)
    counts = tl.where(index < experts, (ends - begins + BLOCK - 1) // BLOCK, 0)
    begin = tl.sum(tl.where(index == expert, begins, 0))
    end = tl.sum(tl.where(index == expert, ends, 0))
    first = tl.sum(tl.where(index < expert, counts, 0))
    tl.store(tiles + 3 * most + 1 + expert, first)
    if expert == 0:
        tl.store(tiles + 3 * most, tl.sum(counts))
        tl.store(tiles + 3 * most + 1 + experts, tl.sum(counts))
    for start in range(begin, end, BLOCK):
        tile = first + (start - begin) // BLOCK
        tl.store(tiles + tile, expert)
        tl.store(tiles + most + tile, start)
        tl.store(tiles + 2 * most + tile, end)


@triton.jit
def _tile_in_groups(tile, rows, COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):  # noqa: N803
    """Return row and column of a tile, for ``rows`` x COLUMNS tiles by groups of GROUP_M rows.

    The programs that run at the same time then share what they read through the L2 cache.
    """
    width: tl.constexpr = GROUP_M * COLUMNS
    first = tile // width * GROUP_M
    height = min(rows - first, GROUP_M)
    return first + tile % width % height, tile % width // height


@triton.jit
def matmul_of_rows(
    a,
    a_tiles,
    weight_tiles,
    tokens,
    out,
    tiles,
    most,
    a_row,
    OUT: tl.constexpr,  # noqa: N803
    IN: tl.constexpr,  # noqa: N803
    GATHERS: tl.constexpr,  # noqa: N803
    TRANSPOSES: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    GROUP_M: tl.constexpr,  # noqa: N803
):
    """Compute ``out[r] = a[r] w_e``, ``[R, OUT]``, for each expert's rows, fp32 sums.

    Weights are ``[E, OUT, IN]``, or ``[E, IN, OUT]`` with TRANSPOSES. With GATHERS row r of ``a`` is
    ``a[tokens[r]]``. Programs loop over tiles of BLOCK_M x BLOCK_N.
    """
    columns: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    count = tl.load(tiles + 3 * most)
    for tile in tl.range(tl.program_id(0), count * columns, tl.num_programs(0), flatten=True):
        row_tile, column_tile = _tile_in_groups(tile, count, columns, GROUP_M)
        column = column_tile * BLOCK_N
        expert = tl.load(tiles + row_tile)
        begin = tl.load(tiles + most + row_tile)
        end = tl.load(tiles + 2 * most + row_tile)
        row = begin + tl.arange(0, BLOCK_M)
        if GATHERS:
            # Rows of other experts are computed from token 0, and not stored.
            source = tl.load(tokens + row, mask=row < end, other=0)
            a_rows = a + source.to(tl.int64)[:, None] * a_row
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, IN, BLOCK_K):
            if GATHERS:
                inner = k + tl.arange(0, BLOCK_K)
                if IN % BLOCK_K == 0:
                    x = tl.load(a_rows + inner[None, :])
                else:
                    x = tl.load(a_rows + inner[None, :], mask=inner[None, :] < IN, other=0.0)
            else:
                x = a_tiles.load([begin, k])
            if TRANSPOSES:
                w = weight_tiles.load([expert, k, column]).reshape(BLOCK_K, BLOCK_N)
            else:
                w = weight_tiles.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K).T
            total = tl.dot(x, w, total)
        to = column + tl.arange(0, BLOCK_N)
        is_own = (row < end)[:, None]
        if OUT % BLOCK_N != 0:
            is_own = is_own & (to < OUT)[None, :]
        where = out + row.to(tl.int64)[:, None] * OUT + to[None, :]
        tl.store(where, total.to(out.dtype.element_ty), mask=is_own)


@triton.jit
def _rows_of(x, tokens, row, x_row, OFFSETS: tl.constexpr, GATHERS: tl.constexpr):  # noqa: N803
    """Return pointers to the rows ``row`` of x, or to those of their tokens."""
    source = row
    if GATHERS:
        source = tl.load(tokens + row)
    return x + (source.to(OFFSETS) * x_row)[:, None]


@triton.jit
def _last_rows(x, tokens, row, end, column, x_row, OFFSETS: tl.constexpr, GATHERS: tl.constexpr):  # noqa: N803
    """Return the rows before ``end``, and zeros instead of the other ones.

    Those are another expert's or uninitialized, and 0 times NaN is NaN.
    """
    own = tl.minimum(row, end - 1)
    pointers = _rows_of(x, tokens, own, x_row, OFFSETS, GATHERS) + column[None, :]
    return tl.load(pointers, mask=(row < end)[:, None], other=0.0)


@triton.jit
def _last_product(
    total,
    a,
    b,
    tokens,
    last,
    end,
    left,
    right,
    a_row,
    b_row,
    OFFSETS: tl.constexpr,  # noqa: N803
    GATHERS_A: tl.constexpr,  # noqa: N803
    GATHERS_B: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
):
    """Return ``total`` plus the product of an expert's last rows, which are fewer than BLOCK_K."""
    row = last + tl.arange(0, BLOCK_K)
    x = _last_rows(a, tokens, row, end, left, a_row, OFFSETS, GATHERS_A)
    y = _last_rows(b, tokens, row, end, right, b_row, OFFSETS, GATHERS_B)
    return tl.dot(x.T, y, total)


@triton.jit
def _columns(start, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Return the BLOCK columns from ``start`` on; the last column instead of those beyond it."""
    column = start + tl.arange(0, BLOCK)
    return tl.minimum(column, SIZE - 1) if SIZE % BLOCK else column


@triton.jit
def _store_tile(
    total,
    out,
    left_start,
    right_start,
    out_row,
    LEFT: tl.constexpr,  # noqa: N803
    RIGHT: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
):
    """Write a tile of one expert's ``[LEFT, RIGHT]``."""
    left = left_start + tl.arange(0, BLOCK_M)
    right = right_start + tl.arange(0, BLOCK_N)
    where = out + (left.to(tl.int64) * out_row)[:, None] + right[None, :]
    result = total.to(out.dtype.element_ty)
    if LEFT % BLOCK_M == 0 and RIGHT % BLOCK_N == 0:
        tl.store(where, result)
    else:
        tl.store(where, result, mask=(left < LEFT)[:, None] & (right < RIGHT)[None, :])


@triton.jit
def matmul_over_gathered_rows(
    a,
    b,
    a_tiles,
    b_tiles,
    tokens,
    offsets,
    out,
    a_row,
    b_row,
    out_expert,
    out_row,
    LEFT: tl.constexpr,  # noqa: N803
    RIGHT: tl.constexpr,  # noqa: N803
    OFFSETS: tl.constexpr,  # noqa: N803
    GATHERS_A: tl.constexpr,  # noqa: N803
    GATHERS_B: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    GROUP_M: tl.constexpr,  # noqa: N803
):
    """Compute ``out[e] = a_e^t b_e``, ``[E, LEFT, RIGHT]``, over the rows of each expert, fp32 sums.

    An expert without rows gets zeros. With GATHERS_A (GATHERS_B) row r of a (b) is that of token
    ``tokens[r]``. OFFSETS is the dtype of offsets in a and b. Grid: tiles of one expert, experts.
    """
    lefts: tl.constexpr = (LEFT + BLOCK_M - 1) // BLOCK_M
    rights: tl.constexpr = (RIGHT + BLOCK_N - 1) // BLOCK_N
    expert = tl.program_id(1)
    left_tile, right_tile = _tile_in_groups(tl.program_id(0), lefts, rights, GROUP_M)
    left = _columns(left_tile * BLOCK_M, LEFT, BLOCK_M)
    right = _columns(right_tile * BLOCK_N, RIGHT, BLOCK_N)
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # All full blocks of rows without masks, which would double the loop's instructions.
    last = begin + (end - begin) // BLOCK_K * BLOCK_K
    for start in range(begin, last, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        if GATHERS_A:
            x = tl.load(_rows_of(a, tokens, row, a_row, OFFSETS, True) + left[None, :])
        else:
            x = a_tiles.load([start, left_tile * BLOCK_M])
        if GATHERS_B:
            y = tl.load(_rows_of(b, tokens, row, b_row, OFFSETS, True) + right[None, :])
        else:
            y = b_tiles.load([start, right_tile * BLOCK_N])
        total = tl.dot(x.T, y, total)
    if last < end:
        total = _last_product(
            total, a, b, tokens, last, end, left, right, a_row, b_row, OFFSETS, GATHERS_A, GATHERS_B, BLOCK_K
        )
    to = out + expert.to(tl.int64) * out_expert
    _store_tile(total, to, left_tile * BLOCK_M, right_tile * BLOCK_N, out_row, LEFT, RIGHT, BLOCK_M, BLOCK_N)


@triton.jit
def matmul_over_rows(
    a,
    b,
    a_tiles,
    b_tiles,
    offsets,
    out,
    a_row,
    b_row,
    out_expert,
    out_row,
    experts,
    LEFT: tl.constexpr,  # noqa: N803
    RIGHT: tl.constexpr,  # noqa: N803
    OFFSETS: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    GROUP_M: tl.constexpr,  # noqa: N803
):
    """Compute ``matmul_over_gathered_rows`` of operands that are not gathered.

    Programs loop over the tiles of all experts, and load the next one while they store a result: 2 %
    faster for Mixtral's sizes on an H200. With gathered rows it is 40 % slower.
    """
    lefts: tl.constexpr = (LEFT + BLOCK_M - 1) // BLOCK_M
    rights: tl.constexpr = (RIGHT + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), experts * lefts * rights, tl.num_programs(0), flatten=True):
        expert = tile // (lefts * rights)
        left_tile, right_tile = _tile_in_groups(tile % (lefts * rights), lefts, rights, GROUP_M)
        begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets + expert)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        last = begin + (end - begin) // BLOCK_K * BLOCK_K
        for start in range(begin, last, BLOCK_K):
            x = a_tiles.load([start, left_tile * BLOCK_M])
            y = b_tiles.load([start, right_tile * BLOCK_N])
            total = tl.dot(x.T, y, total)
        if last < end:
            left = _columns(left_tile * BLOCK_M, LEFT, BLOCK_M)
            right = _columns(right_tile * BLOCK_N, RIGHT, BLOCK_N)
            total = _last_product(
                total, a, b, offsets, last, end, left, right, a_row, b_row, OFFSETS, False, False, BLOCK_K
            )
        to = out + expert.to(tl.int64) * out_expert
        _store_tile(total, to, left_tile * BLOCK_M, right_tile * BLOCK_N, out_row, LEFT, RIGHT, BLOCK_M, BLOCK_N)
