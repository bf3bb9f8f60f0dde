"""MLP activations and the gated MLP, which on GPUs does not save the activation for backward."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.modules.packed_weights import PackedWeights
from nxd_memopt.modules.plain_layers import add_bias
from nxd_memopt.modules.tiled_mlp import MLPLayers
from nxd_memopt.ops.activation import ACTIVATIONS, activation, gated_activation
from nxd_memopt.ops.autograd import cast_if_autocast_enabled, save_inputs_first
from nxd_memopt.ops.cuda.support import can_use_triton, unavailable_reason
from nxd_memopt.options import require_one_of
from nxd_memopt.parallel_layers.base_linear import bypassed_layer
from nxd_memopt.parallel_layers.functional.adapted_row import adapted_gated_mlp
from nxd_memopt.parallel_layers.functional.fp8_gated_mlp import Fp8GatedRowParallel
from nxd_memopt.parallel_layers.functional.gated_mlp import GatedRowParallel
from nxd_memopt.parallel_layers.fusion import FusedPath, FusibleModule
from nxd_memopt.parallel_layers.layers import RowParallelLinear
from nxd_memopt.parallel_layers.wrapping import is_only_wrapped


class Activation(nn.Module):
    """Activation ``act(x)``; ``[..., F/T] -> [..., F/T]``."""

    def __init__(self, hidden_act: str) -> None:
        super().__init__()
        self.function = activation(hidden_act)
        self.hidden_act = hidden_act

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
    factors = layer.factors
    gate, up, weight = cast("list[Tensor]", cast_if_autocast_enabled(gate, up, layer.weight))
    layer.require_divisible_sequence(gate.shape)
    comm = layer.activation_sharding()
    # The kernels read rows [tokens, F/T], and chunks of a reduction are ranges of the sequence:
    # with the sequence first, a range of the sequence is a range of rows.
    first = comm.sequence_first(gate)
    rows = [comm.sequence_first(x).reshape(-1, x.size(-1)) for x in (gate, up)]
    # The leading dimensions are merged; under sequence parallelism dim 0 of the output is S/T.
    if factors is not None:
        output = adapted_gated_mlp(rows[0], rows[1], weight, factors, comm, hidden_act)
    else:
        with torch.autocast(gate.device.type, enabled=False):
            handle, saved = save_inputs_first(*rows, weight)
            function = GatedRowParallel if comm.fp8 is None else Fp8GatedRowParallel
            output = cast(Tensor, function.apply(comm, hidden_act, handle, *saved))
    leading = list(first.shape[:-1])
    if comm.sequence_dimension is not None:
        leading[0] //= backend.group_size(comm.group)
    output = comm.original_layout(output.view(*leading, output.size(-1)))
    return add_bias(output, layer)


def _is_recomputed_activation(module: nn.Module) -> bool:
    """Return whether ``module`` is an activation under recompute, which the fused path computes again anyway."""
    return isinstance(module, GatedActivation) and is_only_wrapped(module, "recompute")


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

    shared_input_layers = ("gate_proj", "up_proj")

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: str, *, bias: bool, factory: LayerFactory
    ) -> None:
        super().__init__()
        self.gate_proj = factory.column("gate_proj", hidden_size, intermediate_size, bias=bias)
        self.up_proj = factory.column("up_proj", hidden_size, intermediate_size, bias=bias)
        self.down_proj = factory.row("down_proj", intermediate_size, hidden_size, bias=bias)
        self.act = GatedActivation(hidden_act)
        self.share_input()

    def share_input(self) -> None:
        super().share_input()
        # The gain is a Triton kernel that computes the activation together with its gradient.
        self.fused = FusedPath(
            self,
            "gated activation with down projection",
            {"act": GatedActivation, **bypassed_layer(self, "down_proj", RowParallelLinear)},
            cost="the activation is stored for backward",
            unavailable=unavailable_reason(backend.device),
            accepts_forward=_is_recomputed_activation,
            overwritten=self.shared_input_layers,
        )

    def _fits_kernels(self, *activations: Tensor) -> bool:
        # a weight that is stored in float8 has another dtype, and is not read by the kernels
        if self.down_proj.weight_scale is not None:
            return can_use_triton(*activations)
        return can_use_triton(*activations, self.down_proj.weight)

    def layers(self) -> MLPLayers:
        """Return the submodules, for tiles of tokens."""
        return MLPLayers((self.gate_proj, self.up_proj), self.act, self.down_proj, self.act.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.project(hidden)  # [..., F/T]
        if self.fused.is_active and self._fits_kernels(gate, up):
            return fused_gated_mlp(gate, up, self.down_proj, self.act.hidden_act)
        return self.down_proj(self.act(gate, up))
