"""Launches the Triton matmuls of several experts on rows sorted by expert; the host reads nothing from the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.architectures.experts import TILE_ROWS
from nxd_memopt.ops.cuda.support import lazy_kernels, power_of_2

_kernels = lazy_kernels("grouped_matmul_kernels")

_ALIGNMENT_BYTES = 16  # of the strides of operands that the copy engine reads
_MOST_32_BIT = 2**31
_OF_ROWS = {"BLOCK_M": TILE_ROWS, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 3}
_OVER_ROWS = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 3}
_OVER_GATHERED_ROWS = _OVER_ROWS | {"num_stages": 5}  # the loads of the indices of gathered rows take one stage


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors the GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def has_copy_engine(device: torch.device) -> bool:
    """Return whether the GPU copies tiles by descriptors (TMA), as all do since Hopper."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def can_be_tiled(tensor: Tensor) -> bool:
    """Return whether ``tensor``, contiguous or copied, can be read by descriptors: begin and length of its rows."""
    row_bytes = tensor.size(-1) * tensor.element_size()
    return row_bytes % _ALIGNMENT_BYTES == 0 and tensor.data_ptr() % _ALIGNMENT_BYTES == 0


def descriptor(tensor: Tensor, *block: int) -> Any:
    """Return a descriptor of ``tensor``, which is read in tiles of the shape ``block``."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


@dataclass(frozen=True)
class ExpertRows:
    """Rows sorted by expert, and the tokens that they are of, on the device.

    Args:
        choices: ``[R]`` int32, the choice that each row is of.
        tokens: ``[R]`` int32, ``choices // top_k``: a division in every step of a matmul would take
            as many instructions as all others.
        offsets: ``[E]`` int32, end of each expert's rows. Rows from the last one on are of no expert:
            results have arbitrary values there.
        top_k: choices of a token.
        tiles: what ``plan_tiles`` writes; empty on a CPU.
    """

    choices: Tensor
    tokens: Tensor
    offsets: Tensor
    top_k: int
    tiles: Tensor

    @staticmethod
    def of(choices: Tensor, offsets: Tensor, top_k: int) -> ExpertRows:
        """Return the rows of ``choices`` and ``offsets`` with their tokens and tiles."""
        experts = offsets.numel()
        most = _most_tiles(choices.numel(), experts) if offsets.is_cuda else 0
        tiles = torch.empty(3 * most + experts + 2, dtype=torch.int32, device=offsets.device)
        if offsets.is_cuda:
            options = {"EXPERTS": power_of_2(experts), "BLOCK": TILE_ROWS}
            _kernels().plan_tiles[(experts,)](offsets, tiles, most, experts, **options)
        return ExpertRows(choices, choices // top_k, offsets, top_k, tiles)

    @property
    def most_tiles(self) -> int:
        """Number of tiles for which there is room."""
        return _most_tiles(self.choices.numel(), self.offsets.numel())


def _most_tiles(rows: int, experts: int) -> int:
    # Every expert has at most one tile that is not full.
    return -(-rows // TILE_ROWS) + experts


def matmul_of_rows(a: Tensor, weight: Tensor, rows: ExpertRows, *, gathers: bool, transposes: bool = False) -> Tensor:
    """Return ``a_r weight[e]^t`` for each row r of expert e, ``[R, out]``.

    Args:
        a: ``[R, in]``, or with ``gathers`` ``[N, in]``, whose rows are those of the tokens.
        weight: ``[E, out, in]``, or with ``transposes`` ``[E, in, out]``.
        rows: the experts' rows.
        gathers: read the row of the token for each row.
        transposes: multiply with ``weight[e]`` itself.
    """
    a = a.contiguous()
    weight = weight.contiguous()
    count = rows.choices.numel()
    inner = a.size(1)
    outer = weight.numel() // weight.size(0) // inner
    options: dict[str, Any] = dict(_OF_ROWS)
    block_m, block_n, block_k = options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_K"]
    block = [1, block_k, block_n] if transposes else [1, block_n, block_k]
    weight_tiles = descriptor(weight, *block)
    # A gathered operand is read by pointers, any other one by tiles. What is not read is any tensor.
    a_tiles = a if gathers else descriptor(a, block_m, block_k)
    out = torch.empty(count, outer, dtype=a.dtype, device=a.device)
    most = rows.most_tiles
    # A program per multiprocessor, which stores a tile while it reads the next one.
    grid = (min(most * -(-outer // block_n), multiprocessors(a.device)),)
    _kernels().matmul_of_rows[grid](
        a,
        a_tiles,
        weight_tiles,
        rows.tokens,
        out,
        rows.tiles,
        most,
        a.stride(0),
        OUT=outer,
        IN=inner,
        GATHERS=gathers,
        TRANSPOSES=transposes,
        **options,
    )
    return out


def matmul_over_rows(
    a: Tensor,
    b: Tensor,
    rows: ExpertRows,
    *,
    gathers_a: bool = False,
    gathers_b: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``a_e^t b_e`` over the rows of each expert e, ``[E, left, right]``; zeros without rows.

    Args:
        a: ``[R, left]``, or with ``gathers_a`` ``[N, left]``.
        b: ``[R, right]``, or with ``gathers_b`` ``[N, right]``.
        rows: the experts' rows.
        gathers_a: the rows of ``a`` are those of the tokens.
        gathers_b: the rows of ``b`` are those of the tokens.
        out: written and returned if given; its columns are contiguous, its rows need not be.
    """
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    a = a.contiguous()
    b = b.contiguous()
    experts = rows.offsets.numel()
    gathers = gathers_a or gathers_b
    options: dict[str, Any] = dict(_OVER_GATHERED_ROWS if gathers else _OVER_ROWS)
    block_m, block_n, block_k = options["BLOCK_M"], options["BLOCK_N"], options["BLOCK_K"]
    a_tiles = a if gathers_a else descriptor(a, block_k, block_m)
    b_tiles = b if gathers_b else descriptor(b, block_k, block_n)
    if out is None:
        out = torch.empty(experts, a.size(1), b.size(1), dtype=a.dtype, device=a.device)
    strides = (a.stride(0), b.stride(0), out.stride(0), out.stride(1))
    options |= {"LEFT": a.size(1), "RIGHT": b.size(1)}
    options["OFFSETS"] = tl.int32 if max(a.numel(), b.numel()) < _MOST_32_BIT else tl.int64
    tiles = -(-a.size(1) // block_m) * -(-b.size(1) // block_n)
    if gathers:
        kernel = _kernels().matmul_over_gathered_rows[(tiles, experts)]
        options |= {"GATHERS_A": gathers_a, "GATHERS_B": gathers_b}
        kernel(a, b, a_tiles, b_tiles, rows.tokens, rows.offsets, out, *strides, **options)
    else:
        kernel = _kernels().matmul_over_rows[(min(tiles * experts, multiprocessors(a.device)),)]
        kernel(a, b, a_tiles, b_tiles, rows.offsets, out, *strides, experts, **options)
    return out
