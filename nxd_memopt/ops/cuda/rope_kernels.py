"""Triton kernels of ``ops.cuda.rope``; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def rope(
    x,
    y,
    cos,
    sin,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    table_batch,
    heads,
    head_dim,
    half,
    TRANSPOSED: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    REST: tl.constexpr,  # noqa: N803
):
    """Rotate all heads of one token per program.

    Dimension i forms a pair with dimension i + half. ``TRANSPOSED`` applies the transposed
    rotation, for gradients. ``REST`` dimensions after the rotated ones are copied.
    """
    # 64-bit, since offsets of tokens may exceed 2^31 elements
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, HALF)
    is_column = column < half
    # a token's table row has 2 * half = rotary_dim entries
    table = batch * table_batch + token * 2 * half + column
    cos_1 = tl.load(cos + table, mask=is_column, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + table + half, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + table, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + table + half, mask=is_column, other=0.0).to(tl.float32)[None, :]
    head = tl.arange(0, HEADS).to(tl.int64)
    source = x + batch * x_batch + token * x_token + head[:, None] * x_head
    target = y + batch * y_batch + token * y_token + head[:, None] * y_head
    mask = (head < heads)[:, None] & is_column[None, :]
    # both halves are read before either is written, so y may be x
    first = tl.load(source + column[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half + column[None, :], mask=mask, other=0.0).to(tl.float32)
    # y_1 = x_1 cos_1 - x_2 sin_1 and y_2 = x_2 cos_2 + x_1 sin_2; the tables of both halves may
    # differ. The gradient is the transposed matrix times (dy_1, dy_2).
    if TRANSPOSED:
        rotated_1 = first * cos_1 + second * sin_2
        rotated_2 = second * cos_2 - first * sin_1
    else:
        rotated_1 = first * cos_1 - second * sin_1
        rotated_2 = second * cos_2 + first * sin_2
    tl.store(target + column[None, :], rotated_1.to(y.dtype.element_ty), mask=mask)
    tl.store(target + half + column[None, :], rotated_2.to(y.dtype.element_ty), mask=mask)
    if REST > 0:
        passed = 2 * half + tl.arange(0, REST)
        mask = (head < heads)[:, None] & (passed < head_dim)[None, :]
        values = tl.load(source + passed[None, :], mask=mask, other=0.0)
        tl.store(target + passed[None, :], values, mask=mask)
