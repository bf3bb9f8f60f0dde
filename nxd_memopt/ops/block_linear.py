"""Linear layers of several experts on blocks of rows, with shapes that do not depend on the routing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.ops.autograd import first_derivative_only


def block_linear(rows: Tensor, weight: Tensor, block_experts: Tensor) -> Tensor:
    """Return ``rows_b weight[block_experts[b]]^t`` for each block b of equally many rows.

    Args:
        rows: ``[blocks * B, in]``.
        weight: ``[E, out, in]``.
        block_experts: ``[blocks]`` integers, the expert of each block.

    Returns:
        ``[blocks * B, out]``.
    """
    # A single expert (EP = E) has all blocks, which are one matmul.
    if weight.size(0) == 1:
        return F.linear(rows, weight.squeeze(0))
    output: Tensor = BlockLinear.apply(rows, weight, block_experts)  # pyright: ignore[reportAssignmentType]
    return output


class BlockLinear(torch.autograd.Function):
    """``block_linear``, one matmul per block.

    A batched matmul would need the weights of all blocks, ``[blocks, out, in]``: for Mixtral's 16,384
    tokens in blocks of 512 that is 72 experts instead of 8. Here one block's weight is read at a time.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, block_experts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, block_experts)
        outputs: list[Tensor] = []
        for block, index in zip(_blocks(rows, block_experts), _numbers(block_experts), strict=True):
            outputs.append(block @ weight.index_select(0, index).squeeze(0).t())
        return torch.cat(outputs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, block_experts = ctx.saved_tensors
        # An expert's gradient is a sum over its blocks, in fp32 as within one matmul.
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight_grad = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        parts: list[Tensor] = []
        inputs, upstreams = _blocks(rows, block_experts), _blocks(grad, block_experts)
        for block, upstream, index in zip(inputs, upstreams, _numbers(block_experts), strict=True):
            parts.append(upstream @ weight.index_select(0, index).squeeze(0))
            weight_grad = weight_grad.index_add(0, index, (upstream.t() @ block).to(wide).unsqueeze(0))
        return torch.cat(parts), weight_grad.to(weight.dtype), None


def _blocks(rows: Tensor, block_experts: Tensor) -> tuple[Tensor, ...]:
    """Return the blocks of ``rows``."""
    return rows.unflatten(0, (block_experts.numel(), -1)).unbind()


def _numbers(block_experts: Tensor) -> tuple[Tensor, ...]:
    """Return the expert of each block, ``[1]``."""
    return block_experts.unsqueeze(1).unbind()
