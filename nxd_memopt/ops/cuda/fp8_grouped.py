"""Float8 operands and products of experts' rows and weights on NVIDIA GPUs; the host reads nothing from the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nxd_memopt.architectures.experts import TILE_ROWS
from nxd_memopt.ops.cuda.fp8 import SMALLEST
from nxd_memopt.ops.cuda.grouped_matmul import ExpertRows, descriptor, multiprocessors
from nxd_memopt.ops.cuda.support import lazy_kernels

_kernels = lazy_kernels("fp8_grouped_kernels")

_LARGEST = {"TILE": TILE_ROWS, "ROWS": 8, "COLUMNS": 1024, "num_warps": 4}
_CAST = {"TILE": TILE_ROWS, "COLUMNS": 128, "num_warps": 8}
# Tiles of 128 x 256 multiply Mixtral's fast sums at 1,390 TFLOP/s on an H200, of 128 x 128 at 1,260. Precise sums with
# an addition in fp32 after each 128 products stop the tensor cores: 1,036, and 885. In sums of 512 errors of one
# sign are by calculation an eighth of the errors in sums of 4,096: about 40 dB (docs/precision.md), not measured.
_FAST = {"BLOCK_M": TILE_ROWS, "BLOCK_N": 256, "BLOCK_K": 128, "SUM": 2**30}
_PRECISE = _FAST | {"SUM": 512}
_OVER_ROWS = {"BLOCK_M": 256, "BLOCK_N": 128, "BLOCK_K": 128, "SUM": 512}
_LAUNCH = {"GROUP_M": 8, "num_warps": 8, "num_stages": 3}


def _groups(x: Tensor, rows: ExpertRows | None) -> tuple[int, int, int]:
    """Return the number of groups, of rows, and of tiles: of ``rows``, or of a weight ``[E, out, in]``."""
    if rows is not None:
        return rows.offsets.numel(), rows.choices.numel(), rows.most_tiles
    experts, count = x.shape[:2]
    return experts, experts * count, experts * -(-count // TILE_ROWS)


def _arguments(x: Tensor, rows: ExpertRows | None, gathers: bool) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return what all kernels of tiles get; a weight has neither tokens nor planned tiles, and passes any tensor."""
    if rows is None:
        return (x, x, x), {"GROUP_ROWS": x.size(1), "GATHERS": False}
    return (x, rows.tokens, rows.tiles), {"GROUP_ROWS": 0, "GATHERS": gathers}


def magnitudes(x: Tensor, rows: ExpertRows | None, is_rowwise: bool, *, gathers: bool) -> tuple[Tensor, Tensor]:
    """Return the largest magnitudes of rows and columns; see ``ops.fp8_grouped.magnitudes``."""
    x = x.contiguous()
    groups, count, tiles = _groups(x, rows)
    width = x.size(-1)
    # The kernel's atomics compare bits, from zero on.
    options = {"dtype": torch.int32, "device": x.device}
    row_sizes = torch.zeros(count if is_rowwise else groups, **options)
    column_sizes = torch.zeros(groups, width, **options) if is_rowwise else row_sizes
    grid = (tiles, -(-width // _LARGEST["COLUMNS"]))
    tensors, constants = _arguments(x, rows, gathers)
    arguments = (*tensors, row_sizes, column_sizes, tiles, width, width)
    _kernels().largest[grid](*arguments, ROWWISE=is_rowwise, **constants, **_LARGEST)
    return row_sizes.view(torch.float32), column_sizes.view(torch.float32)


def cast(
    x: Tensor,
    expert_rows: ExpertRows | None,
    row_sizes: Tensor,
    column_sizes: Tensor,
    dtype: torch.dtype,
    *,
    gathers: bool,
    rows: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return data and scale of ``x`` as rows, then as columns; see ``ops.fp8_grouped.as_both``."""
    x = x.contiguous()
    groups, count, tiles = _groups(x, expert_rows)
    width = x.size(-1)
    if expert_rows is None:
        row_shape, column_shape = tuple(x.shape), (groups, width, x.size(1))
    else:
        row_shape, column_shape = (count, width), (width, tiles * TILE_ROWS)
    # what is not computed is empty
    as_rows = torch.empty(row_shape if rows else (0,), dtype=dtype, device=x.device)
    as_columns = torch.empty(column_shape if columns else (0,), dtype=dtype, device=x.device)
    row_scales = torch.empty(count, device=x.device)
    # of experts without rows no tile writes the scale
    column_scales = torch.zeros(groups, width, device=x.device)
    tensors, constants = _arguments(x, expert_rows, gathers)
    _kernels().cast[(tiles, -(-width // _CAST["COLUMNS"]))](
        *tensors,
        row_sizes,
        column_sizes,
        as_rows,
        row_scales,
        as_columns,
        column_scales,
        tiles,
        width,
        width,
        column_shape[-1],
        LIMIT=torch.finfo(dtype).max,
        SMALLEST=SMALLEST,
        TO_ROWS=rows,
        TO_COLUMNS=columns,
        ROWWISE=column_sizes.dim() > 1,
        **constants,
        **_CAST,
    )
    return as_rows, row_scales, as_columns, column_scales


def product_of_rows(
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    rows: ExpertRows,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """Return ``a_r weight[e]^t`` for each row r of expert e; see ``ops.fp8_grouped.product_of_rows``."""
    options: dict[str, Any] = _LAUNCH | (_FAST if fast else _PRECISE)
    count, inner = a.shape
    outer = weight.size(1)
    block_m, block_n, block_k = options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_K"]
    a_tiles = descriptor(a, block_m, block_k)
    weight_tiles = descriptor(weight, 1, block_n, block_k)
    out = torch.empty(count, outer, dtype=dtype, device=a.device)
    most = rows.most_tiles
    grid = (min(most * -(-outer // block_n), multiprocessors(a.device)),)
    arguments = (a_tiles, a_scale, weight_tiles, weight_scale, out, rows.tiles, most)
    _kernels().matmul_of_rows[grid](*arguments, OUT=outer, IN=inner, **options)
    return out


def product_over_rows(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, rows: ExpertRows, dtype: torch.dtype
) -> Tensor:
    """Return ``a_e b_e^t`` over the rows of each expert e; see ``ops.fp8_grouped.product_over_rows``."""
    options: dict[str, Any] = _LAUNCH | _OVER_ROWS
    left, right = a.size(0), b.size(0)
    experts = rows.offsets.numel()
    block_m, block_n, block_k = options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_K"]
    out = torch.empty(experts, left, right, dtype=dtype, device=a.device)
    tiles = -(-left // block_m) * -(-right // block_n) * experts
    grid = (min(tiles, multiprocessors(a.device)),)
    arguments = (descriptor(a, block_m, block_k), a_scale, descriptor(b, block_n, block_k), b_scale)
    options |= {"LEFT": left, "RIGHT": right, "TILE": TILE_ROWS}
    _kernels().matmul_over_rows[grid](*arguments, rows.tiles, out, rows.most_tiles, experts, **options)
    return out
