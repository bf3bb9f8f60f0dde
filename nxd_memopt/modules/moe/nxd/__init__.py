"""Mixture of experts with neuronx-distributed's names, signatures, layout of weights and definitions."""

from nxd_memopt.modules.moe.nxd.configs import (
    DEFAULT_BLOCK_SIZE,
    BlockwiseMatmulConfig,
    MoeConfigValidator,
    RouterConfig,
)
from nxd_memopt.modules.moe.nxd.expert_mlps import ACT2FN, ExpertMLPs, ExpertMLPsV2, GLUType, RoutedExpertsMLPOpsConfig
from nxd_memopt.modules.moe.nxd.layer import MoE
from nxd_memopt.modules.moe.nxd.loss import load_balancing_loss_func
from nxd_memopt.modules.moe.nxd.routers import GroupLimitedRouter, RouterBase, RouterSinkhorn, RouterTopK
from nxd_memopt.modules.moe.nxd.shared_experts import SharedExperts

__all__ = [
    "ACT2FN",
    "DEFAULT_BLOCK_SIZE",
    "BlockwiseMatmulConfig",
    "ExpertMLPs",
    "ExpertMLPsV2",
    "GLUType",
    "GroupLimitedRouter",
    "MoE",
    "MoeConfigValidator",
    "RoutedExpertsMLPOpsConfig",
    "RouterBase",
    "RouterConfig",
    "RouterSinkhorn",
    "RouterTopK",
    "SharedExperts",
    "load_balancing_loss_func",
]
