"""Float8 operands and products of several experts: each expert is a linear layer of its own rows.

An expert's rows, its weight and their gradients have scales of their own, as the operands of ``ops.fp8`` have: one
for each expert, or with rowwise scales one for each row, and for each column of an expert. The results of an expert
depend on no other one, nor on the rank that has it. Scales have the shapes ``[R]`` and ``[E, K]`` in both recipes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_memopt.ops.autograd import without_autocast
from nxd_memopt.ops.cuda import fp8_grouped as cuda
from nxd_memopt.ops.cuda.grouped_matmul import ExpertRows
from nxd_memopt.ops.cuda.support import can_use_triton
from nxd_memopt.ops.fp8 import FORWARD_DTYPE, Fp8Recipe, Magnitudes, Operand, largest, scales, times


def magnitudes(x: Tensor, rows: ExpertRows | None, recipe: Fp8Recipe, *, gathers: bool = False) -> Magnitudes:
    """Return the largest magnitudes, fp32: tensorwise ``[E]`` for both forms, rowwise ``[R]`` and ``[E, K]``.

    Args:
        x: ``[R, K]``, or with ``gathers`` ``[N, K]``; weights ``[E, n, K]``, with ``E n`` for R.
        rows: the experts' rows, None of weights; those after the last expert's end are not read.
        recipe: one number for each expert, or for its rows and columns.
        gathers: read the row of the token for each row.
    """
    if can_use_triton(x):
        return Magnitudes(*cuda.magnitudes(x, rows, recipe.is_rowwise, gathers=gathers))
    parts = _rows_by_expert(x.abs().float(), rows, gathers)
    if recipe.is_rowwise:
        return Magnitudes(torch.cat(parts).amax(1), torch.stack([largest(part, (0,)) for part in parts]))
    sizes = torch.stack([largest(part, (0, 1)) for part in parts])
    return Magnitudes(sizes, sizes)


def as_rows(x: Tensor, rows: ExpertRows, sizes: Magnitudes, dtype: torch.dtype, *, gathers: bool = False) -> Operand:
    """Return the experts' rows rounded to float8, ``[R, K]``; see ``ops.fp8.as_rows``.

    Args:
        x: as in ``magnitudes``.
        rows: the experts' rows; after the last expert's end the result is arbitrary.
        sizes: magnitudes of ``x``.
        dtype: of the data.
        gathers: read the row of the token for each row.
    """
    if can_use_triton(x):
        return Operand(*cuda.cast(x, rows, *sizes, dtype, gathers=gathers, rows=True, columns=False)[:2])
    parts = _rows_by_expert(x, rows, gathers)
    by_row = sizes.rows
    if sizes.columns.dim() == 1:
        by_row = torch.cat([size.expand(part.size(0)) for size, part in zip(sizes.rows, parts, strict=True)])
    scale, inverse = scales(by_row, dtype)
    return Operand(times(torch.cat(parts), inverse.unsqueeze(1), dtype), scale)


def as_columns(x: Tensor, rows: ExpertRows, sizes: Magnitudes, dtype: torch.dtype, *, gathers: bool = False) -> Operand:
    """Return the experts' rows transposed in float8, ``[K, R]``, for ``product_over_rows``; see ``as_rows``.

    On a GPU each expert's part of R is padded with zeros to tiles.
    """
    if can_use_triton(x):
        return Operand(*cuda.cast(x, rows, *sizes, dtype, gathers=gathers, rows=False, columns=True)[2:])
    parts = _rows_by_expert(x, rows, gathers)
    scale, inverse = scales(_by_column(sizes, x.size(-1)), dtype)
    rounded = [times(part, factors, dtype) for part, factors in zip(parts, inverse, strict=True)]
    return Operand(torch.cat(rounded).t(), scale)


def as_both(
    x: Tensor, rows: ExpertRows, sizes: Magnitudes, dtype: torch.dtype, *, gathers: bool = False
) -> tuple[Operand, Operand]:
    """Return ``as_rows`` and ``as_columns`` with one read of ``x``."""
    if can_use_triton(x):
        results = cuda.cast(x, rows, *sizes, dtype, gathers=gathers, rows=True, columns=True)
        return Operand(*results[:2]), Operand(*results[2:])
    return as_rows(x, rows, sizes, dtype, gathers=gathers), as_columns(x, rows, sizes, dtype, gathers=gathers)


def weight_rows(weight: Tensor, sizes: Magnitudes) -> Operand:
    """Return weights in float8, ``[E, n, K]``, with a scale for each row, ``[E n]``."""
    if can_use_triton(weight):
        return Operand(*cuda.cast(weight, None, *sizes, FORWARD_DTYPE, gathers=False, rows=True, columns=False)[:2])
    experts, count, _ = weight.shape
    by_row = sizes.rows.view(experts, -1).expand(experts, count)
    scale, inverse = scales(by_row, FORWARD_DTYPE)
    return Operand(times(weight, inverse.unsqueeze(2), FORWARD_DTYPE), scale.flatten())


def weight_columns(weight: Tensor, sizes: Magnitudes) -> Operand:
    """Return transposed weights in float8, ``[E, K, n]``, with a scale for each row, ``[E K]``."""
    if can_use_triton(weight):
        results = cuda.cast(weight, None, *sizes, FORWARD_DTYPE, gathers=False, rows=False, columns=True)
        return Operand(results[2], results[3].flatten())
    scale, inverse = scales(_by_column(sizes, weight.size(2)), FORWARD_DTYPE)
    return Operand(times(weight.transpose(1, 2), inverse.unsqueeze(2), FORWARD_DTYPE), scale.flatten())


def product_of_rows(a: Operand, weight: Operand, rows: ExpertRows, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Return ``a_r weight[e]^t`` for each row r of expert e, ``[R, n]``; arbitrary after the last expert's end.

    Args:
        a: ``[R, K]``.
        weight: ``[E, n, K]``.
        rows: the experts' rows.
        dtype: of the result.
        fast: see ``ops.fp8.product``.
    """
    if a.data.is_cuda and can_use_triton(a.scale):
        return cuda.product_of_rows(*a, *weight, rows, dtype, fast=fast)
    experts, outputs, _ = weight.data.shape
    wide = weight.data.float() * weight.scale.view(experts, outputs, 1)
    parts = _rows_by_expert(a.data.float() * a.scale.unsqueeze(1), rows)
    # fp32 as the accumulators of a GPU, which autocast would round to bf16
    with without_autocast(a.data):
        results = torch.cat([part @ each.t() for part, each in zip(parts, wide, strict=True)])
    # NaN would show that someone reads the rows of no expert.
    rest = results.new_full((rows.choices.numel() - results.size(0), outputs), torch.nan)
    return torch.cat([results, rest]).to(dtype)


def product_over_rows(a: Operand, b: Operand, rows: ExpertRows, dtype: torch.dtype) -> Tensor:
    """Return ``a_e b_e^t`` over the rows of each expert e, ``[E, left, right]``; zeros without rows.

    Args:
        a: ``[left, R]``, of ``as_columns``.
        b: ``[right, R]``.
        rows: the experts' rows.
        dtype: of the result.
    """
    if a.data.is_cuda and can_use_triton(a.scale):
        return cuda.product_over_rows(*a, *b, rows, dtype)
    lefts = _rows_by_expert(a.data.float().t(), rows)
    rights = _rows_by_expert(b.data.float().t(), rows)
    with without_autocast(a.data):
        results = torch.stack([left.t() @ right for left, right in zip(lefts, rights, strict=True)])
    return (results * a.scale.unsqueeze(2) * b.scale.unsqueeze(1)).to(dtype)


def _rows_by_expert(x: Tensor, rows: ExpertRows | None, gathers: bool = False) -> list[Tensor]:
    """Return the rows of each expert, ``[R_e, K]``; the host waits for their numbers."""
    if rows is None:
        return list(x)
    ends = rows.offsets.tolist()
    if gathers:
        x = x.index_select(0, rows.tokens[: ends[-1]])
    return [x[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _by_column(sizes: Magnitudes, width: int) -> Tensor:
    """Return magnitudes ``[E, width]`` of columns."""
    return sizes.columns if sizes.columns.dim() == 2 else sizes.columns.unsqueeze(1).expand(-1, width)
