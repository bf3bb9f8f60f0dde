"""Linear layers of several experts on rows that are sorted by expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_GROUPED_MM = getattr(F, "grouped_mm", None)  # torch 2.10 and later
_ALIGNMENT_BYTES = 16  # of the strides of grouped_mm's operands


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
    """Return ``rows_e weight[e]^t`` for the rows of each expert e, in the order of ``rows``.

    An expert without rows gets a gradient of zeros.

    Args:
        rows: ``[R, in]``, the rows of expert 0, then those of expert 1, and so on.
        weight: ``[E, out, in]``.
        counts: ``[E]`` integers, the rows of each expert, which add up to R; None for R / E each.

    Returns:
        ``[R, out]``.
    """
    if counts is None:
        # Equal numbers of rows: one batched matmul with static shapes.
        return torch.bmm(rows.unflatten(0, (weight.size(0), -1)), weight.transpose(1, 2)).flatten(0, 1)
    if can_use_grouped_mm(rows, weight):
        return grouped_mm_linear(rows, weight, counts)
    return loop_linear(rows, weight, counts)


def loop_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute ``grouped_linear`` with one matmul per expert; reads ``counts`` on the host."""
    outputs: list[Tensor] = []
    start = 0
    # unbind, whose backward stacks the gradients of all experts once. Indexing weight[e] would add
    # up E tensors of the size of all weights.
    for count, expert in zip(counts.tolist(), weight.unbind(0), strict=True):
        outputs.append(F.linear(rows.narrow(0, start, count), expert))
        start += count
    assert start == rows.size(0), f"counts add up to {start}, and there are {rows.size(0)} rows"
    return torch.cat(outputs)


def can_use_grouped_mm(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped matmul takes these tensors and is made for them.

    It has kernels for bf16 on GPUs; elsewhere it is a loop of its own.
    """
    is_aligned = all(size * rows.element_size() % _ALIGNMENT_BYTES == 0 for size in weight.shape[1:])
    is_bf16 = rows.dtype == weight.dtype == torch.bfloat16
    return _GROUPED_MM is not None and rows.is_cuda and is_bf16 and is_aligned and rows.size(0) > 0


def grouped_mm_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute ``grouped_linear`` as one grouped matmul, without reading ``counts`` on the host."""
    assert _GROUPED_MM is not None
    # The last offset is R: rows beyond it would be uninitialised in the result and in the gradient.
    offsets = counts.cumsum(0).to(torch.int32)
    return _GROUPED_MM(rows, weight.transpose(1, 2), offs=offsets)
