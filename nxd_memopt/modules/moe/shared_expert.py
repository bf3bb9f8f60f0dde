"""The shared expert: an MLP that every token passes in addition to its routed experts, and its gate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.modules.mlp import GatedMLP
from nxd_memopt.modules.moe.router import initialize_replicated_
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers.utils import ShardedModule, mark_sequence_parallel


class SharedExpertGate(ShardedModule):
    """One weight for each token, ``sigmoid(x w)``; ``[..., H] -> [..., 1]`` (Qwen2-MoE, arXiv:2407.10671).

    Its weight ``[1, H]`` is replicated. Under sequence parallelism it sees this rank's tokens only, so the gradient
    is a partial sum, and the weight is tagged for ``grads.allreduce_sequence_parallel_gradients``.

    Args:
        hidden_size: H.
        factory: dtype, device and initialization.
    """

    def __init__(self, hidden_size: int, *, factory: LayerFactory) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=factory.dtype, device=factory.device))
        mark_sequence_parallel(self, factory.parallel.sequence_parallel_enabled)
        initialize_replicated_(self.weight, factory.init_weight, on_cpu=factory.parallel.use_cpu_initialization)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight).sigmoid()


def shared_gated_mlp(config: Any, moe: MoEConfig, factory: LayerFactory) -> GatedMLP | None:
    """Return the shared expert of Mixtral and Qwen's models, or None if ``moe`` has none."""
    width = moe.moe_shared_expert_intermediate_size
    if width is None:
        return None
    return GatedMLP(config.hidden_size, width, config.hidden_act, bias=False, factory=factory)
