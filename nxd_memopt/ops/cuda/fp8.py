"""Magnitudes, casts and products of float8 operands on NVIDIA GPUs, with one read of a tensor each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nxd_memopt.ops.cuda.support import lazy_kernels
from nxd_memopt.planner.sizes.fp8_layers import ALIGNMENT

_kernels = lazy_kernels("fp8_kernels")

# Tiles that reach 3.2 to 3.9 TB/s on an H200 for 8,192 rows of 4,096 to 28,672 columns.
_LARGEST = {"ROWS": 8, "COLUMNS": 1024, "STEPS": 4, "num_warps": 4}
_CAST = {"ROWS": 64, "COLUMNS": 256, "num_warps": 8}
SMALLEST = 2.0**-100


def _tiles(rows: int, columns: int, tile_rows: int, tile_columns: int) -> tuple[int, int]:
    return -(-rows // tile_rows), -(-columns // tile_columns)


def _with_adjacent_columns(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def magnitudes(x: Tensor, is_rowwise: bool, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the largest magnitudes of rows and columns; see ``ops.fp8.magnitudes``."""
    x = _with_adjacent_columns(x)
    rows, columns = x.shape
    # The kernel's atomics compare bits, from zero on.
    sizes = torch.zeros(rows + columns if is_rowwise else 1, 1, dtype=torch.int32, device=x.device)
    row_sizes, column_sizes = (sizes[:rows], sizes[rows:]) if is_rowwise else (sizes, sizes)
    grid = _tiles(rows, columns, _LARGEST["ROWS"] * _LARGEST["STEPS"], _LARGEST["COLUMNS"])
    # without FACTORS the kernel does not read them: pass any tensor
    options = {"ROWWISE": is_rowwise, "FACTORS": factors is not None, **_LARGEST}
    tensors = (x, x if factors is None else factors, row_sizes, column_sizes)
    _kernels().largest[grid](*tensors, rows, columns, x.stride(0), **options)
    return row_sizes.view(torch.float32), column_sizes.view(torch.float32)


def cast(
    x: Tensor,
    row_sizes: Tensor,
    column_sizes: Tensor,
    dtype: torch.dtype,
    factors: Tensor | None = None,
    *,
    rows: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return data and scale of ``x`` as rows, then as columns; see ``ops.fp8.as_both``."""
    x = _with_adjacent_columns(x)
    count, width = x.shape
    padded = -(-count // ALIGNMENT) * ALIGNMENT
    # what is not computed is empty
    as_rows = x.new_empty((count, width) if rows else (0,), dtype=dtype)
    as_columns = x.new_empty((width, padded) if columns else (0,), dtype=dtype)
    row_scales, column_scales = torch.empty_like(row_sizes), torch.empty_like(column_sizes)
    _kernels().cast[_tiles(padded, width, _CAST["ROWS"], _CAST["COLUMNS"])](
        x,
        x if factors is None else factors,
        row_sizes,
        column_sizes,
        as_rows,
        row_scales,
        as_columns,
        column_scales,
        count,
        width,
        padded,
        x.stride(0),
        LIMIT=torch.finfo(dtype).max,
        SMALLEST=SMALLEST,
        TO_ROWS=rows,
        TO_COLUMNS=columns,
        ROWWISE=row_sizes.numel() > 1 or column_sizes.numel() > 1,
        FACTORS=factors is not None,
        **_CAST,
    )
    return as_rows, row_scales, as_columns, column_scales


def transposed(data: Tensor) -> Tensor:
    """Return ``[K, M]`` of float8 ``[M, K]``, M padded with zeros."""
    rows, columns = data.shape
    padded = -(-rows // ALIGNMENT) * ALIGNMENT
    result = data.new_empty(columns, padded)
    _kernels().transpose[_tiles(padded, columns, _CAST["ROWS"], _CAST["COLUMNS"])](
        data.view(torch.uint8), result.view(torch.uint8), rows, columns, padded, **_CAST
    )
    return result


def product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    *,
    fast: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``a b^t + bias``; see ``ops.fp8.product``."""
    # cuBLAS takes a scale for each operand, or one for each row of both.
    if a_scale.numel() == 1 and b_scale.numel() == 1:
        a_scale, b_scale = a_scale.view(()), b_scale.view(())
    else:
        a_scale = a_scale.expand(a.size(0), 1).contiguous()
        b_scale = b_scale.expand(b.size(0), 1).contiguous().t()
    multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    options = {"bias": bias, "out_dtype": dtype, "use_fast_accum": fast}
    if out is not None:
        options["out"] = out
    return multiply(a, b.t(), scale_a=a_scale, scale_b=b_scale, **options)
