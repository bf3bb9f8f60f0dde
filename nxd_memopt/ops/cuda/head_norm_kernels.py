"""Triton kernels of the RMSNorm over each head: a program has many short rows."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _offsets(row, heads, tokens, batch_stride, token_stride, head_stride):
    """Return where the rows begin: ``row`` counts heads, then tokens, then batch."""
    token = row // heads
    batch = token // tokens
    in_batch = (token - batch * tokens).to(tl.int64) * token_stride
    return batch.to(tl.int64) * batch_stride + in_batch + (row - token * heads).to(tl.int64) * head_stride


@triton.jit
def head_norm_forward(
    x,
    weight,
    y,
    rstd,
    rows,
    width,
    heads,
    tokens,
    x_batch,
    x_token,
    x_head,
    eps,
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Normalise ROWS rows per program, and write them next to each other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = _offsets(row, heads, tokens, x_batch, x_token, x_head)[:, None] + column[None, :]
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / width + eps)
    tl.store(rstd + row, scale, mask=row < rows)
    normalised = (values * scale[:, None]).to(x.dtype.element_ty)  # rounded before the weight, as in LLaMA
    weights = tl.load(weight + column, mask=column < width, other=0.0)[None, :]
    tl.store(y + row.to(tl.int64)[:, None] * width + column[None, :], normalised * weights, mask=mask)


@triton.jit
def head_norm_backward(
    x,
    weight,
    rstd,
    dy,
    dx,
    dweight,
    rows,
    width,
    heads,
    tokens,
    x_batch,
    x_token,
    x_head,
    dy_batch,
    dy_token,
    dy_head,
    rows_each,
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    TRAINS: tl.constexpr,  # noqa: N803
):
    """Compute dx, rows next to each other, and a part of the weight's gradient in fp32 for a range of rows.

    Without ``TRAINS`` the weight is frozen, and ``dweight`` is not written.
    """
    first = tl.program_id(0) * rows_each
    column = tl.arange(0, BLOCK)
    weights = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(first, tl.minimum(first + rows_each, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        x_at = _offsets(row, heads, tokens, x_batch, x_token, x_head)[:, None] + column[None, :]
        dy_at = _offsets(row, heads, tokens, dy_batch, dy_token, dy_head)[:, None] + column[None, :]
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        normalised = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32) * scale
        grad = tl.load(dy + dy_at, mask=mask, other=0.0).to(tl.float32)
        # As in elementwise_kernels.rms_norm_backward, with n = x * rstd and y = n * w:
        # dw = sum over rows of dy * n, n rounded as in forward; dx = rstd * (dy w - n * mean(dy w n)).
        if TRAINS:
            sums += grad * normalised.to(x.dtype.element_ty).to(tl.float32)
        grad *= weights
        projection = (tl.sum(grad * normalised, 1) / width)[:, None]
        result = scale * (grad - normalised * projection)
        where = row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(dx + where, result.to(dx.dtype.element_ty), mask=mask)
    if TRAINS:
        tl.store(dweight + tl.program_id(0) * width + column, tl.sum(sums, 0), mask=column < width)
