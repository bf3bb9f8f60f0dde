"""The MLP's activations as modules, so that selective recompute can name them."""

from __future__ import annotations

from torch import Tensor, nn

from nxd_memopt.config import require_one_of
from nxd_memopt.ops.activation import ACTIVATIONS, activation, gated_activation
from nxd_memopt.parallel_layers.fusion import FusibleModule


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
