"""Autograd function of a gated activation and its down projection, which recomputes the activation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import ChunkedAllGather, backend
from nxd_memopt.ops.activation import gated_activation, gated_activation_gradient
from nxd_memopt.ops.autograd import (
    SavedInputs,
    as_dtype,
    first_derivative_only,
    link_saved_inputs,
    require_first_backward,
    saved_inputs,
)
from nxd_memopt.ops.cross_entropy import add_matmul
from nxd_memopt.parallel_layers.functional.linear import ActivationSharding
from nxd_memopt.planner.techniques.tiling import ACTIVATION_TILE_BYTES


class GatedRowParallel(torch.autograd.Function):
    """``Y = reduce((act(G) * U) W^t)`` on sequence-first rows.

    Saves G, U and W; backward recomputes the activation. dG and dU overwrite G and U, which have no
    other reader, so a graph supports a single backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        comm: ActivationSharding,
        hidden_act: str,
        handle: SavedInputs | None,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
    ) -> Tensor:
        ctx.comm = comm
        ctx.hidden_act = hidden_act
        link_saved_inputs(ctx, handle, gate, up, weight)

        # The activation exists for one chunk of rows at a time, and is not saved.
        def rows(start: int, stop: int) -> Tensor:
            return F.linear(gated_activation(gate[start:stop], up[start:stop], hidden_act), weight)

        return as_dtype(comm.reduce(rows, (gate.size(0), weight.size(0)), gate.dtype).wait(), gate.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first_backward(ctx)
        (gate, up, weight), (_, _, needs_weight) = saved_inputs(ctx)
        # On XLA the barrier keeps the activation of forward from being reused, and thus stored.
        gate, up, grad = backend.optimization_barrier([gate, up, grad])
        gathering = ctx.comm.gather(grad, materialize=False)
        weight_grad: Tensor | None = None
        # For each tile: dA = dY W, one kernel that recomputes A and overwrites G and U with dG
        # and dU, dW += dY^t A. 4 * F/T FLOPs for each element of dY: two GEMMs.
        for start, grads in row_tiles(gathering, gate, 4 * weight.size(1)):
            tile = slice(start, start + grads.size(0))
            activated = gated_activation_gradient(gate[tile], up[tile], grads @ weight, ctx.hidden_act)
            if needs_weight:
                weight_grad = add_matmul(weight_grad, grads.t(), activated, weight.dtype)
            # Otherwise this tile would still exist while the next one is computed.
            del activated
        # gate and up are overwritten: with new versions autograd rejects a use of the old values.
        torch.autograd.graph.increment_version((gate, up))
        return None, None, None, gate, up, weight_grad


def row_tiles(gathering: ChunkedAllGather, gate: Tensor, operations_per_element: int) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of rows as they arrive, split so that the activation fits ``ACTIVATION_TILE_BYTES``."""
    most = max(1, ACTIVATION_TILE_BYTES // (gate.size(-1) * gate.element_size()))
    for first, rows in gathering.chunks(operations_per_element):
        for start in range(0, rows.size(0), most):
            yield first + start, rows[start : start + most]
