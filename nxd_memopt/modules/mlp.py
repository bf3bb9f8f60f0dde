"""MLP activations, and the gated MLP with a fused form that does not save the activation for backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nxd_memopt.backends import ChunkedAllGather, backend
from nxd_memopt.config import require_one_of
from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.modules.packed_weights import PackedWeights
from nxd_memopt.ops.activation import ACTIVATIONS, activation, gated_activation, gated_activation_gradient
from nxd_memopt.ops.autograd import (
    SavedInputs,
    as_dtype,
    cast_if_autocast_enabled,
    first_derivative_only,
    link_saved_inputs,
    save_inputs_first,
    saved_inputs,
)
from nxd_memopt.ops.cuda.support import can_use_triton, unavailable_reason
from nxd_memopt.parallel_layers.functional.linear import ActivationSharding
from nxd_memopt.parallel_layers.fusion import FusedPath, FusibleModule
from nxd_memopt.parallel_layers.layers import RowParallelLinear


class Activation(nn.Module):
    """Activation ``act(x)``; ``[..., F/T] -> [..., F/T]``."""

    def __init__(self, hidden_act: str) -> None:
        super().__init__()
        self.function = activation(hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class GatedActivation(FusibleModule):
    """Gated activation ``act(gate) * up``, ``[..., F/T]``; SwiGLU for silu (arXiv:2002.05202)."""

    def __init__(self, hidden_act: str) -> None:
        super().__init__()
        require_one_of("hidden_act", hidden_act, tuple(ACTIVATIONS))
        self.hidden_act = hidden_act

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return gated_activation(gate, up, self.hidden_act)


_TILE_BYTES = 256 * 2**20  # of the activation's gradient; each further tile adds one pass over dW


class _FusedGatedMLP(torch.autograd.Function):
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
        ctx.is_overwritten = False
        link_saved_inputs(ctx, handle, gate, up, weight)

        # The activation exists for one chunk of rows at a time, and is not saved.
        def rows(start: int, stop: int) -> Tensor:
            return F.linear(gated_activation(gate[start:stop], up[start:stop], hidden_act), weight)

        return as_dtype(comm.reduce(rows, (gate.size(0), weight.size(0)), gate.dtype).wait(), gate.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_overwritten:
            raise RuntimeError(
                "the gated MLP's graph allows one backward: compute the loss again, or drop retain_graph"
            )
        ctx.is_overwritten = True
        (gate, up, weight), (_, _, needs_weight) = saved_inputs(ctx)
        # On XLA the barrier keeps the activation of forward from being reused, and thus stored.
        gate, up, grad = backend.optimization_barrier([gate, up, grad])
        gathering = ctx.comm.gather(grad, materialize=False)
        weight_grad: Tensor | None = None
        # For each tile: dA = dY W, one kernel that recomputes A and overwrites G and U with dG
        # and dU, dW += dY^t A. 4 * F/T FLOPs for each element of dY: two GEMMs.
        for start, grads in _tiles(gathering, gate, 4 * weight.size(1)):
            tile = slice(start, start + grads.size(0))
            activated = gated_activation_gradient(gate[tile], up[tile], grads @ weight, ctx.hidden_act)
            if not needs_weight:
                continue
            if weight_grad is None:
                weight_grad = grads.t() @ activated
            else:
                weight_grad.addmm_(grads.t(), activated)
        # gate and up are overwritten: with new versions autograd rejects a use of the old values.
        torch.autograd.graph.increment_version((gate, up))
        return None, None, None, gate, up, weight_grad


def _tiles(gathering: ChunkedAllGather, gate: Tensor, operations_per_element: int) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of rows as they arrive, split so that the activation fits ``_TILE_BYTES``."""
    most = max(1, _TILE_BYTES // (gate.size(-1) * gate.element_size()))
    for first, rows in gathering.chunks(operations_per_element):
        for start in range(0, rows.size(0), most):
            yield first + start, rows[start : start + most]


def fused_gated_mlp(gate: Tensor, up: Tensor, layer: RowParallelLinear, hidden_act: str) -> Tensor:
    """Compute ``layer(act(gate) * up)`` and save only gate and up, which backward overwrites.

    Args:
        gate: ``[..., input_size/T]``.
        up: ``[..., input_size/T]``.
        layer: row-parallel layer with ``input_is_parallel``.
        hidden_act: one of ``ops.activation.ACTIVATIONS``.

    Returns:
        The output of ``layer``. The weight gradient is rounded once for each tile of rows.

    Raises:
        ValueError: T does not divide the sequence length to be scattered.
        RuntimeError: second backward of one graph.
    """
    gate, up, weight = cast("list[Tensor]", cast_if_autocast_enabled(gate, up, layer.weight))
    layer.require_divisible_sequence(gate.shape)
    comm = layer.activation_sharding()
    # The kernels read rows [tokens, F/T], and chunks of a reduction are ranges of the sequence:
    # with the sequence first, a range of the sequence is a range of rows.
    first = comm.sequence_first(gate)
    rows = [comm.sequence_first(x).reshape(-1, x.size(-1)) for x in (gate, up)]
    # The leading dimensions are merged; under sequence parallelism dim 0 of the output is S/T.
    with torch.autocast(gate.device.type, enabled=False):
        handle, saved = save_inputs_first(*rows, weight)
        output = cast(Tensor, _FusedGatedMLP.apply(comm, hidden_act, handle, *saved))
    leading = list(first.shape[:-1])
    if comm.sequence_dimension is not None:
        leading[0] //= backend.group_size(comm.group)
    output = comm.original_layout(output.view(*leading, output.size(-1)))
    # The bias is replicated and added after the reduction, as in ``RowParallelLinear.forward``.
    if layer.bias is None:
        return output
    return output + layer.bias.to(output.dtype)


class GatedMLP(PackedWeights):
    """Gated MLP ``down_proj(act(gate_proj(x)) * up_proj(x))`` with Hugging Face's names.

    ``[B, S, H] -> [B, S, H]``; under sequence parallelism ``[s, B, H] -> [s, B, H]``.

    Args:
        hidden_size: H.
        intermediate_size: F.
        hidden_act: one of ``ops.activation.ACTIVATIONS``.
        bias: add biases to all three layers.
        factory: builds the layers.
    """

    packed_layers = ("gate_proj", "up_proj")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        *,
        bias: bool,
        factory: LayerFactory,
    ) -> None:
        super().__init__()
        self.gate_proj = factory.column("gate_proj", hidden_size, intermediate_size, bias=bias)
        self.up_proj = factory.column("up_proj", hidden_size, intermediate_size, bias=bias)
        self.down_proj = factory.row("down_proj", intermediate_size, hidden_size, bias=bias)
        self.act = GatedActivation(hidden_act)
        self.share_input()
        # The gain is a Triton kernel that computes the activation together with its gradient.
        self.fused = FusedPath(
            self,
            "gated activation with down projection",
            {"act": GatedActivation, "down_proj": RowParallelLinear},
            cost="the activation is stored for backward",
            unavailable=unavailable_reason(backend.device),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.project(hidden)  # [..., F/T]
        if self.fused.is_active and can_use_triton(gate, up, self.down_proj.weight):
            return fused_gated_mlp(gate, up, self.down_proj, self.act.hidden_act)
        return self.down_proj(self.act(gate, up))
