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
    """Neuron platforms. ``hardware("trn1n")`` and ``hardware("inf2")`` are TRN1."""

    TRN1 = "trn1"
    TRN2 = "trn2"
    TRN3 = "trn3"

    @classmethod
    def _missing_(cls, value: object) -> hardware | None:
        if value in ("trn1n", "inf2"):
            return cls.TRN1
        return None


class ParallelGroups(NamedTuple):
    """Rank groups along each dimension of parallelism."""

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
    """Return groups in which tensor-parallel ranks are consecutive.

    Args:
        lnc_size: ignored.
        cluster_ranks_nonexp: all ranks, ``[pp, dp, cp, tp]``, int64.
        cluster_ranks_exp: all ranks, ``[pp, ep_data_degree, ep_model_degree, tp]``, int64.
        tp, dp, pp, ep_model_degree, ep_data_degree, cp: ignored, the tensors have these sizes.
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
    """Return groups along a trn2 node's torus, which has 4 rows of chips; arguments as above.

    A node's ranks are ordered as its first and last row of chips, then the two rows between.
    """
    # [nodes, 4 rows, ranks per row], with the rows reordered. A data, pipeline or expert
    # dimension of size 1 gives one group per rank, in the order of ranks.
    del lnc_size, cluster_ranks_nonexp
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "64"))
    rows = torch.arange(dist.get_world_size()).view(-1, 4, ranks_per_node // 4)
    order = rows[:, TRN2_ROWS_AROUND_TORUS].reshape(pp, dp, cp, tp)
    groups = _groups(order, cluster_ranks_exp)
    # _groups would list the single ranks in the order of the torus.
    sizes = {"dp_groups": dp, "pp_groups": pp, "ep_model_groups": ep_model_degree, "ep_data_groups": ep_data_degree}
    singles = [[rank] for rank in range(order.numel())]
    return groups._replace(**{name: singles for name, size in sizes.items() if size <= 1})


def _groups(dense: Tensor, sparse: Tensor) -> ParallelGroups:
    """Return the groups of grids ``[pp, dp, cp, tp]`` and ``[pp, ep_data, ep_model, tp]``."""
    # Without experts the dense grid gives tp, dp, pp and cp groups; experts split the ranks of
    # dp x cp into ep_data x ep_model.
    return ParallelGroups(
        tp_groups=_along(dense, 3),
        dp_groups=_along(dense, 1),
        pp_groups=_along(dense, 0),
        ep_model_groups=_along(sparse, 2),
        ep_data_groups=_along(sparse, 1),
        cp_groups=_along(dense, 2),
    )


def _along(grid: Tensor, dim: int) -> RankGroups:
    """Return the groups of ranks that differ in dimension ``dim`` of ``grid`` only."""
    # With ``dim`` last, each row is a group; rows are ordered by the other dimensions.
    return grid.movedim(dim, -1).reshape(-1, grid.size(dim)).tolist()


class PG_Group_Logic(Enum):  # noqa: N801 (neuronx-distributed's name)
    """Orders of ranks in tensor-parallel groups; calling a member calls its function."""

    LOGIC1 = (ascending_ring_PG_group, "neighbouring ranks")
    LOGIC2 = (ascending_descending_ring_PG_group, "around the torus")

    def __init__(self, function: Callable[..., ParallelGroups], description: str) -> None:
        self.function = function
        self.description = description

    def __call__(self, *args: Any, **kwargs: Any) -> ParallelGroups:
        return self.function(*args, **kwargs)


def get_logic_chosen(lnc_size: int, hardware_type: hardware, tp: int) -> PG_Group_Logic:
    """Return the order of ranks that neuronx-distributed chooses.

    It is the torus if a tensor-parallel group is half a trn2 node: 64 ranks with LNC 1, or 32
    ranks with LNC 2 and at least one full node of 64 ranks. Otherwise ranks are consecutive.
    """
    # A trn2 node has 128 physical cores: 64 ranks with LNC 2, 128 with LNC 1. Half of them are
    # two of its four rows of chips, which are neighbours in the order around the torus.
    if hardware_type != hardware.TRN2 or (lnc_size, tp) not in ((1, 64), (2, 32)):
        return PG_Group_Logic.LOGIC1
    if lnc_size == 2 and dist.get_world_size() < 64:
        return PG_Group_Logic.LOGIC1
    return PG_Group_Logic.LOGIC2


def arrange_kv_groups(
    num_tensor_model_parallel_groups: int = 1,
    tensor_model_parallel_size: int = 1,
    kv_shared_group_size: int = 1,
    sequential_ranks_in_group: bool = False,
    hardware_type: hardware = hardware.TRN1,
) -> RankGroups:
    """Return the groups of ranks with the same KV head.

    Ranks of a group are consecutive on trn2 or with ``sequential_ranks_in_group``. Otherwise they
    are T / ``kv_shared_group_size`` apart.
    """
    groups = num_tensor_model_parallel_groups
    ranks = torch.arange(groups * tensor_model_parallel_size)
    if sequential_ranks_in_group or hardware_type == hardware.TRN2:
        return ranks.view(-1, kv_shared_group_size).tolist()
    # [groups, replicas m, KV shards n]: rank j + i * n has replica i of KV shard j. Transposed,
    # a row has the m ranks of one KV shard.
    strided = ranks.view(groups, kv_shared_group_size, -1).transpose(1, 2)
    return strided.reshape(-1, kv_shared_group_size).tolist()
