"""Owns the gated activation and the row-parallel layer behind it in one: the activation is never kept for backward."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.activation import gated_activation, gated_activation_gradient
from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.ops.cuda.support import serves
from nxd_memopt.parallel_layers.layers import RowParallelLinear
from nxd_memopt.parallel_layers.utils import cast_if_autocast_enabled, runs_as

_TILE_BYTES = 256 * 2**20  # of the activation's gradient; a further tile costs one more pass over dW


class _GatedRow(torch.autograd.Function):
    """``P = (act(G) * U) W^t``. Saves G, U and W; backward makes the activation again, tile by tile of tokens.

    dG and dU take the places of G and U, of which nothing else makes use; a second backward is an error.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, hidden_act: str) -> Tensor:
        ctx.hidden_act, ctx.is_overwritten = hidden_act, False
        ctx.save_for_backward(gate, up, weight)
        return F.linear(gated_activation(gate, up, hidden_act), weight)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_overwritten:
            raise RuntimeError(
                "the gated MLP's graph allows one backward: compute the loss again, or drop retain_graph"
            )
        ctx.is_overwritten = True
        gate, up, weight = ctx.saved_tensors
        gate, up, grad = backend.optimization_barrier([gate, up, grad])
        weight_grad: Tensor | None = None
        tile = max(1, _TILE_BYTES // (gate.size(-1) * gate.element_size()))
        for gates, ups, grads in zip(*(x.split(tile) for x in (gate, up, grad)), strict=True):
            activated = gated_activation_gradient(gates, ups, grads @ weight, ctx.hidden_act)
            if not ctx.needs_input_grad[2]:
                continue
            if weight_grad is None:
                weight_grad = grads.t() @ activated
            else:
                weight_grad.addmm_(grads.t(), activated)
        torch.autograd.graph.increment_version((gate, up))
        return gate, up, weight_grad, None


def gated_row_parallel(gate: Tensor, up: Tensor, layer: RowParallelLinear, hidden_act: str) -> Tensor:
    """``layer(act(gate) * up)``, keeping gate and up alone for backward, which overwrites them.

    Args:
        gate: ``[..., input_size/T]``.
        up: ``[..., input_size/T]``.
        layer: with ``input_is_parallel``.
        hidden_act: one of ``ops.activation.ACTIVATIONS``.

    Returns:
        As ``layer``; ``RuntimeError`` in a second backward of one graph.
    """
    gate, up, weight = cast("list[Tensor]", cast_if_autocast_enabled(gate, up, layer.weight))
    flat = [x.reshape(-1, x.size(-1)) for x in (gate, up)]
    with torch.autocast(gate.device.type, enabled=False):
        partial = cast(Tensor, _GatedRow.apply(*flat, weight, hidden_act)).view(*gate.shape[:-1], -1)
        output = layer.reduce(partial)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


def gated_row_pays(gate: Tensor, up: Tensor, layer: torch.nn.Module) -> bool:
    """Whether ``gated_row_parallel`` is to be used: one kernel makes the activation beside its gradient, on GPUs."""
    return runs_as(layer, RowParallelLinear) and serves(gate, up, cast(RowParallelLinear, layer).weight)
