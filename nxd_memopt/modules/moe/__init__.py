"""Mixture of experts: router, losses, capacity, dispatch between ranks, and the experts."""

from nxd_memopt.modules.moe.experts import Experts
from nxd_memopt.modules.moe.load_balancing import RouterStatistics, empty_rows
from nxd_memopt.modules.moe.moe_layer import MoELayer
from nxd_memopt.modules.moe.nxd import (
    ACT2FN,
    ExpertMLPs,
    ExpertMLPsV2,
    MoE,
    RouterSinkhorn,
    RouterTopK,
    load_balancing_loss_func,
)
from nxd_memopt.modules.moe.router import Router

__all__ = [
    "ACT2FN",
    "ExpertMLPs",
    "ExpertMLPsV2",
    "Experts",
    "MoE",
    "MoELayer",
    "Router",
    "RouterSinkhorn",
    "RouterStatistics",
    "RouterTopK",
    "empty_rows",
    "load_balancing_loss_func",
]
