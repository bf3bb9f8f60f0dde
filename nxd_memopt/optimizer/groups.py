"""Finds the ranks that an optimizer works over, and refuses those over which it would be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.utils import is_expert_parallel


def join_group(rank_groups: list[list[int]]) -> ProcessGroup | None:
    """Return this rank's process group of the partition ``rank_groups``, or None if the groups have
    one rank.

    Raises:
        ValueError: ``rank_groups`` is not a partition of the world into groups of equal size.
    """
    world_size = parallel_state.get_world_size()
    # A partition of equal groups: every rank takes part in one collective with shards of equal
    # length. A rank of no group, or of two, would leave the other ranks of a collective waiting.
    members = [rank for ranks in rank_groups for rank in ranks]
    sizes = set(map(len, rank_groups))
    if sorted(members) != list(range(world_size)) or len(sizes) != 1:
        raise ValueError(
            f"sharding_groups {rank_groups} must name each of the world's {world_size} ranks once, in equal groups"
        )
    if len(rank_groups[0]) == 1:
        return None
    return parallel_state.group_of(rank_groups)


def expert_sharding_groups(rank_groups: list[list[int]]) -> list[list[int]]:
    """Return the groups over which the experts are sharded if all other parameters are over
    ``rank_groups``.

    Raises:
        ValueError: ``rank_groups`` are neither the data-parallel groups nor groups of one rank, under
            expert parallelism.
    """
    is_whole = rank_groups == [list(ranks) for ranks in parallel_state.get_data_parallel_replica_groups()]
    if parallel_state.get_expert_model_parallel_size() == 1 or len(rank_groups[0]) == 1:
        return rank_groups
    if not is_whole:
        raise ValueError(
            f"sharding_groups {rank_groups} divide the data-parallel ranks, and expert_model_parallel_size is "
            f"{parallel_state.get_expert_model_parallel_size()}: leave sharding_groups out, or use groups of one rank"
        )
    return [list(ranks) for ranks in parallel_state.get_expert_data_parallel_replica_groups()]


def require_no_experts(params: Iterable[Tensor], what: str, remedy: str) -> None:
    """Raise ``ValueError`` if expert-parallel ranks have different experts of a parameter."""
    if any(is_expert_parallel(param) for param in params):
        size = parallel_state.get_expert_model_parallel_size()
        raise ValueError(f"{what} does not know the groups of expert_model_parallel_size {size}: {remedy}")


def require_no_context_parallelism() -> None:
    """Raise ``ValueError`` if context parallelism is enabled."""
    size = parallel_state.get_context_model_parallel_size()
    if size > 1:
        raise ValueError(f"context_parallel_size {size}: gradients are not reduced over context-parallel ranks; use 1")


def require_tensor_parallel_groups(rank_groups: Sequence[Sequence[int]] | None) -> None:
    """Raise ``ValueError`` if ``rank_groups`` is neither None nor the tensor-parallel groups."""
    expected = parallel_state.get_tensor_model_parallel_replica_groups()
    if rank_groups is not None and [list(ranks) for ranks in rank_groups] != expected:
        raise ValueError(
            f"grad_norm_groups {rank_groups} must be the tensor-parallel groups {expected}, "
            "over which the gradient's norm is summed: pass those or leave it out"
        )
