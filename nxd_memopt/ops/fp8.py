"""Float8 operands of matmuls: magnitudes, scales, casts and products.

A matmul on a GPU contracts the last dimension of both operands, which must be contiguous in float8. An
operand of a linear layer therefore exists in two forms: its rows ``[M, K]`` for a contraction over
features, and its columns ``[K, M]``, the transpose, for a contraction over tokens. Scales follow the
current tensor (arXiv:2209.05433 without history): ``value = data * scale`` with ``scale = largest
magnitude / largest float8``, one for a tensor or one for each row of a form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.ops.autograd import without_autocast
from nxd_memopt.ops.cuda import fp8 as cuda
from nxd_memopt.ops.cuda.support import can_use_triton
from nxd_memopt.options import require_one_of
from nxd_memopt.planner.sizes.fp8_layers import ALIGNMENT as ALIGNMENT

FORWARD_DTYPE = torch.float8_e4m3fn
"""Dtype of activations and weights, of all recipes."""
FORMATS = ("hybrid", "e4m3")
GRANULARITIES = ("tensorwise", "rowwise")
SMALLEST = cuda.SMALLEST
"""Magnitude below which all numbers of a scale become zeros: the inverse of their scale would overflow in fp32."""


@dataclass(frozen=True)
class Fp8Recipe:
    """How the matmuls of linear layers round their operands.

    Args:
        format: ``hybrid`` rounds gradients to e5m2 (3 bits of precision, range 2^-16 to 57,344), ``e4m3``
            as all else to e4m3 (4 bits, range 2^-9 to 448).
        granularity: ``tensorwise`` has a scale for a tensor, ``rowwise`` for each row of an operand.

    Raises:
        ValueError: an unknown name.
    """

    format: str = "hybrid"
    granularity: str = "tensorwise"

    def __post_init__(self) -> None:
        require_one_of("fp8", self.format, FORMATS)
        require_one_of("fp8_recipe", self.granularity, GRANULARITIES)

    @property
    def gradient_dtype(self) -> torch.dtype:
        return torch.float8_e5m2 if self.format == "hybrid" else torch.float8_e4m3fn

    @property
    def is_rowwise(self) -> bool:
        return self.granularity == "rowwise"


class Magnitudes(NamedTuple):
    """Largest magnitudes, fp32, of a tensor ``[M, K]``.

    Args:
        rows: ``[M, 1]`` of each row; tensorwise ``[1, 1]`` of the tensor.
        columns: ``[K, 1]`` of each column; tensorwise the same tensor as ``rows``.
    """

    rows: Tensor
    columns: Tensor


class Operand(NamedTuple):
    """Operand of a float8 matmul.

    Args:
        data: float8, ``[n, K]``, contracted over K.
        scale: fp32, ``[n, 1]`` or ``[1, 1]``.
    """

    data: Tensor
    scale: Tensor


def magnitudes(
    x: Tensor, recipe: Fp8Recipe, group: ProcessGroup | None = None, *, factors: Tensor | None = None
) -> Magnitudes:
    """Return the largest magnitudes of ``x``; NaN if there is a NaN.

    Args:
        x: ``[M, K]``.
        recipe: one number for the tensor, or one for each row and column.
        group: ranks that have other rows of the same tensor.
        factors: ``[K]``, multiply the columns first, in fp32; the casts get the same.
    """
    if can_use_triton(x):
        rows, columns = cuda.magnitudes(x, recipe.is_rowwise, factors)
    elif recipe.is_rowwise:
        absolute = _scaled(x, factors).abs()
        rows, columns = (largest(absolute, (dim,)).float().unsqueeze(1) for dim in (1, 0))
    else:
        rows = columns = largest(_scaled(x, factors).abs(), (0, 1)).float().view(1, 1)
    if backend.group_size(group) > 1:
        columns = _maximum(columns, group)
        rows = rows if recipe.is_rowwise else columns
    return Magnitudes(rows, columns)


def _scaled(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else x.float() * factors.float()


def largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the largest of numbers that are not negative; 0 without any, of which PyTorch has no maximum."""
    if x.numel() == 0:
        return x.new_zeros([size for dim, size in enumerate(x.shape) if dim not in dims])
    return x.amax(dims)


def _maximum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    # Of floats that are not negative the bits have the order of the values, with NaN above all: as
    # integers, a NaN of any rank is the maximum, if its sign is cleared: amax on a CPU returns negative NaNs.
    bits = values.view(torch.int32) & 0x7FFFFFFF
    return backend.all_reduce(bits, group, "max").view(torch.float32)


def as_rows(x: Tensor, sizes: Magnitudes, dtype: torch.dtype, factors: Tensor | None = None) -> Operand:
    """Return ``x`` rounded to float8, ``[M, K]``.

    Numbers that are all below ``SMALLEST`` are zeros with the scale 1. An infinity or NaN makes all values of its
    scale NaN.

    Args:
        x: ``[M, K]``.
        sizes: magnitudes of ``x``.
        dtype: of the data.
        factors: as for the magnitudes.
    """
    if can_use_triton(x):
        return Operand(*cuda.cast(x, sizes.rows, sizes.columns, dtype, factors, rows=True, columns=False)[:2])
    return _rounded(_scaled(x, factors), sizes.rows, dtype)


def as_columns(x: Tensor, sizes: Magnitudes, dtype: torch.dtype, factors: Tensor | None = None) -> Operand:
    """Return ``x^t`` rounded to float8, ``[K, M]``, M padded with zeros to ``ALIGNMENT``; see ``as_rows``."""
    if can_use_triton(x):
        return Operand(*cuda.cast(x, sizes.rows, sizes.columns, dtype, factors, rows=False, columns=True)[2:])
    return _rounded(padded(_scaled(x, factors).t()), sizes.columns, dtype)


def as_both(x: Tensor, sizes: Magnitudes, dtype: torch.dtype) -> tuple[Operand, Operand]:
    """Return ``as_rows`` and ``as_columns`` with one read of ``x``."""
    if can_use_triton(x):
        results = cuda.cast(x, sizes.rows, sizes.columns, dtype, rows=True, columns=True)
        return Operand(*results[:2]), Operand(*results[2:])
    return as_rows(x, sizes, dtype), as_columns(x, sizes, dtype)


def transposed(operand: Operand) -> Operand:
    """Return the columns of rows with one scale."""
    data = operand.data
    if data.is_cuda:
        return Operand(cuda.transposed(data), operand.scale)
    columns = padded(as_bytes(data).t())
    return Operand(columns.contiguous().view(data.dtype), operand.scale)


def as_bytes(data: Tensor) -> Tensor:
    """Return float8 numbers as integers, which collectives and copies take."""
    return data.view(torch.uint8)


def padded(columns: Tensor) -> Tensor:
    """Return ``[K, M]`` with M padded with zeros to ``ALIGNMENT``."""
    return F.pad(columns, (0, -columns.size(1) % ALIGNMENT))


def scales(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scales of numbers with these magnitudes, and their inverses; both 1 below ``SMALLEST``."""
    # A tensor: PyTorch divides a number by a tensor as the number times the reciprocal, which rounds twice.
    limit = torch.tensor(torch.finfo(dtype).max, device=largest.device)
    is_zero = largest < SMALLEST
    return torch.where(is_zero, 1.0, largest / limit), torch.where(is_zero, 1.0, limit / largest)


def times(x: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` times the inverse of its scales in float8."""
    # The product may exceed the limit by a rounding, which a float8 of PyTorch would turn into NaN.
    limit = torch.finfo(dtype).max
    return (x.float() * inverse).clamp(-limit, limit).to(dtype)


def _rounded(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Operand:
    """Round ``[n, K]`` with the magnitudes ``[n, 1]`` or ``[1, 1]``."""
    scale, inverse = scales(largest, dtype)
    return Operand(times(x, inverse, dtype), scale)


def product(
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``a b^t + bias``, ``[m, n]``.

    Args:
        a: ``[m, K]``.
        b: ``[n, K]``.
        dtype: of the result.
        bias: ``[n]``.
        fast: on Hopper add up in the tensor cores' registers alone, which keep about 14 bits, without the
            addition to fp32 registers after each 128 elements of K: 9 % faster.
        out: is overwritten with the result, contiguous; None: a new tensor.
    """
    if a.data.is_cuda:
        return cuda.product(a.data, a.scale, b.data, b.scale, dtype, bias, fast=fast, out=out)
    # fp32 as the accumulators of a GPU, which autocast would round to bf16
    with without_autocast(a.data):
        result = (a.data.float() * a.scale) @ (b.data.float() * b.scale).t()
    if bias is not None:
        result += bias
    return result.to(dtype) if out is None else out.copy_(result)
