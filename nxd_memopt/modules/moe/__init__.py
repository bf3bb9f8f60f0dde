"""Mixture of experts: router, losses, capacity, dispatch between ranks, and the experts."""

from nxd_memopt.modules.moe.experts import Experts
from nxd_memopt.modules.moe.load_balancing import RouterStatistics, empty_rows
from nxd_memopt.modules.moe.moe_layer import MoELayer
from nxd_memopt.modules.moe.router import Router

__all__ = ["Experts", "MoELayer", "Router", "RouterStatistics", "empty_rows"]
