"""Partitions the ranks for hybrid sharding: shards over runs of data-parallel ranks, replicas over the runs."""

from __future__ import annotations

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.rank_grid import RankGroups


def hybrid_groups(ranks_per_replica: int) -> tuple[RankGroups, RankGroups]:
    """Return the partitions of the world into shard groups and into groups of replicas.

    For data-parallel ranks ``[0, 2, 4, 6]`` and 2 ranks per replica the shard groups are ``[0, 2]``
    and ``[4, 6]``, and the replicas of a shard ``[0, 4]`` and ``[2, 6]``.

    Args:
        ranks_per_replica: number of consecutive data-parallel ranks that share one replica.

    Raises:
        ValueError: it is no divisor above 1 of the data-parallel size.
    """
    size = parallel_state.get_data_parallel_size()
    if ranks_per_replica < 2 or size % ranks_per_replica:
        raise ValueError(
            f"ranks_per_replica {ranks_per_replica} must be a divisor above 1 of the data-parallel size {size}"
        )
    shards: RankGroups = []
    replicas: RankGroups = []
    for ranks in parallel_state.get_data_parallel_replica_groups():
        for first in range(0, len(ranks), ranks_per_replica):
            shards.append(ranks[first : first + ranks_per_replica])
        for first in range(ranks_per_replica):
            replicas.append(ranks[first::ranks_per_replica])
    return shards, replicas
