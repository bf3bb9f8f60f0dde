"""neuronx-distributed's functions from sizes to rank groups, and its hardware names."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_memopt.backends.neuron.topology import TRN2_ROWS_AROUND_TORUS

RankGroups = list[list[int]]


class hardware(Enum):  # noqa: N801 (neuronx-distributed's name)
    """Neuron platforms; ``hardware("trn1n")`` and ``hardware("inf2")`` are built as trn1 is."""

    TRN1 = "trn1"
    TRN2 = "trn2"
    TRN3 = "trn3"

    @classmethod
    def _missing_(cls, value: object) -> hardware | None:
        return cls.TRN1 if value in ("trn1n", "inf2") else None


class ParallelGroups(NamedTuple):
    """The partition of the world along each dimension."""

    tp_groups: RankGroups
    dp_groups: RankGroups
    pp_groups: RankGroups
    ep_model_groups: RankGroups
    ep_data_groups: RankGroups
    cp_groups: RankGroups


def ascending_ring_PG_group(  # noqa: N802 (neuronx-distributed's name)
    lnc_size: int,
    cluster_ranks_nonexp: Tensor,
    cluster_ranks_exp: Tensor,
    tp: int,
    dp: int,
    pp: int,
    ep_model_degree: int,
    ep_data_degree: int,
    cp: int = 1,
) -> ParallelGroups:
    """Groups of neighbouring ranks.

    Args:
        cluster_ranks_nonexp: the ranks as ``[pp, dp, cp, tp]``.
        cluster_ranks_exp: the ranks as ``[pp, ep_data_degree, ep_model_degree, tp]``.

    The sizes are those of the tensors; ``lnc_size`` has no influence on this order.
    """
    del lnc_size, tp, dp, pp, ep_model_degree, ep_data_degree, cp
    return _groups(cluster_ranks_nonexp, cluster_ranks_exp)


def ascending_descending_ring_PG_group(  # noqa: N802 (neuronx-distributed's name)
    lnc_size: int,
    cluster_ranks_nonexp: Tensor,
    cluster_ranks_exp: Tensor,
    tp: int,
    dp: int,
    pp: int,
    ep_model_degree: int,
    ep_data_degree: int,
    cp: int = 1,
) -> ParallelGroups:
    """Groups along a trn2 node's torus: its first and last row of chips, then the two between; arguments as above."""
    del lnc_size, cluster_ranks_nonexp
    node = int(os.environ.get("LOCAL_WORLD_SIZE", "64"))
    rows = torch.arange(dist.get_world_size()).view(-1, 4, node // 4)
    order = rows[:, TRN2_ROWS_AROUND_TORUS].reshape(pp, dp, cp, tp)
    groups = _groups(order, cluster_ranks_exp)
    singles = [[rank] for rank in range(order.numel())]
    return groups._replace(
        dp_groups=groups.dp_groups if dp > 1 else singles,
        pp_groups=groups.pp_groups if pp > 1 else singles,
        ep_model_groups=groups.ep_model_groups if ep_model_degree > 1 else singles,
        ep_data_groups=groups.ep_data_groups if ep_data_degree > 1 else singles,
    )


def _groups(dense: Tensor, sparse: Tensor) -> ParallelGroups:
    along = {name: _along(dense, dim) for dim, name in enumerate(("pp_groups", "dp_groups", "cp_groups", "tp_groups"))}
    return ParallelGroups(ep_data_groups=_along(sparse, 1), ep_model_groups=_along(sparse, 2), **along)


def _along(grid: Tensor, dim: int) -> RankGroups:
    return grid.movedim(dim, -1).reshape(-1, grid.size(dim)).tolist()


class PG_Group_Logic(Enum):  # noqa: N801 (neuronx-distributed's name)
    """How tensor-parallel groups are laid over the ranks; a member is called as its function."""

    LOGIC1 = (ascending_ring_PG_group, "neighbouring ranks")
    LOGIC2 = (ascending_descending_ring_PG_group, "around the torus")

    def __init__(self, function: Callable[..., ParallelGroups], description: str) -> None:
        self.function, self.description = function, description

    def __call__(self, *args: Any, **kwargs: Any) -> ParallelGroups:
        return self.function(*args, **kwargs)


def get_logic_chosen(lnc_size: int, hardware_type: hardware, tp: int) -> PG_Group_Logic:
    """The torus for half a trn2 node (64 cores, or 32 with two cores as one in a full node); neighbours otherwise."""
    if hardware_type != hardware.TRN2 or (lnc_size, tp) not in ((1, 64), (2, 32)):
        return PG_Group_Logic.LOGIC1
    full_nodes = lnc_size == 1 or dist.get_world_size() >= 64
    return PG_Group_Logic.LOGIC2 if full_nodes else PG_Group_Logic.LOGIC1


def arrange_kv_groups(
    num_tensor_model_parallel_groups: int = 1,
    tensor_model_parallel_size: int = 1,
    kv_shared_group_size: int = 1,
    sequential_ranks_in_group: bool = False,
    hardware_type: hardware = hardware.TRN1,
) -> RankGroups:
    """The ranks that hold the same KV head: neighbours on trn2 and where asked for, otherwise far apart."""
    groups, size = num_tensor_model_parallel_groups, tensor_model_parallel_size
    ranks = torch.arange(groups * size)
    if sequential_ranks_in_group or hardware_type == hardware.TRN2:
        return ranks.view(-1, kv_shared_group_size).tolist()
    return ranks.view(groups, kv_shared_group_size, -1).transpose(1, 2).reshape(-1, kv_shared_group_size).tolist()
