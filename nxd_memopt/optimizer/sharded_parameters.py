"""The trained parameters of a sharded optimizer, with this rank's shards, and the ranks that store each shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.data_shards import replica_ranks
from nxd_memopt.parallel_layers.utils import is_expert_parallel


@dataclass
class Sharded:
    """A trained parameter, this rank's shard of it, and the version at which both were equal.

    Attributes:
        param: the model's parameter.
        shard: this rank's master elements; ``param`` itself if neither sharded nor cast.
        version: ``param._version`` when both were last equal.
    """

    param: nn.Parameter
    shard: nn.Parameter
    version: int

    def mark_equal(self) -> None:
        self.version = self.param._version

    @property
    def was_written_to(self) -> bool:
        """Whether autograd saw a write to ``param`` since both were equal."""
        return self.shard is not self.param and self.param._version != self.version


@dataclass(frozen=True)
class StoredParameter:
    """A trained parameter and the tensor that the optimizer updates for it.

    Attributes:
        param: the model's parameter.
        stored: the parameter itself, its full master, or, 1-D, chunk ``rank`` of the ``size`` equal
            chunks of the flattened and padded parameter.
        rank: index of this rank's chunk.
        size: number of chunks.
        holders: data-parallel ranks that store the same elements.
    """

    param: nn.Parameter
    stored: nn.Parameter
    rank: int
    size: int
    holders: tuple[int, ...]


def stored_shards(
    sharded: Sequence[Sharded],
    sharding_groups: Sequence[Sequence[int]],
    expert_sharding_groups: Sequence[Sequence[int]],
) -> list[StoredParameter]:
    """Return the stored tensor of each parameter, with the data-parallel ranks that store the same one.

    Args:
        sharded: the trained parameters.
        sharding_groups: partition of the ranks over which parameters are sharded.
        expert_sharding_groups: the same for experts.
    """
    own_rank = parallel_state.get_global_rank()
    ranks = group_with(own_rank, parallel_state.get_data_parallel_replica_groups())
    stored: list[StoredParameter] = []
    for each in sharded:
        groups = expert_sharding_groups if is_expert_parallel(each.param) else sharding_groups
        own = group_with(own_rank, groups)
        index_of = {rank: i for group in groups for i, rank in enumerate(group)}
        index = index_of[own_rank]
        # Of the data-parallel ranks with this rank's experts, those with the same index in their
        # sharding groups store the same elements.
        replicas = replica_ranks(each.param, len(ranks))
        holders = tuple(i for i in replicas if index_of[ranks[i]] == index)
        stored.append(StoredParameter(each.param, each.shard, index, len(own), holders))
    return stored


def group_with(rank: int, rank_groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the group that ``rank`` belongs to."""
    return next(ranks for ranks in rank_groups if rank in ranks)


def full_shapes(sharded: Sequence[Sharded]) -> dict[int, list[int]]:
    """Return the shape of each parameter by its number."""
    return {i: list(each.param.shape) for i, each in enumerate(sharded)}


def require_same_trained(param_groups: Sequence[dict[str, Any]], sharded: Sequence[Sharded]) -> None:
    """Raise ``ValueError`` if other parameters of ``param_groups`` require gradients than were sharded.

    The optimizer has shards of the parameters that were trainable then: one that was frozen or
    unfrozen since would be updated wrongly or not at all.
    """
    trained: list[int] = []
    for group in param_groups:
        trained += [id(param) for param in group["params"] if param.requires_grad]
    known = [id(each.param) for each in sharded]
    if trained != known:
        raise ValueError(
            f"{len(trained)} parameters require gradients but {len(known)} did when they were sharded, "
            f"{len(set(trained) & set(known))} are the same: call init_zero() after freezing or unfreezing"
        )


def require_matching(state_dict: dict[str, Any], sharded: Sequence[Sharded], sharding: list[int]) -> None:
    """Raise ``ValueError`` unless ``state_dict`` is of these parameters and this rank.

    Args:
        state_dict: saved state of a sharded optimizer.
        sharded: the trained parameters.
        sharding: ``[rank, size]`` of this rank in its sharding group.
    """
    for name, expected in (("sharding", sharding), ("shape_info", full_shapes(sharded))):
        if state_dict.get(name) != expected:
            raise ValueError(
                f"the saved optimizer has {name} {state_dict.get(name)}, this one {expected}: build the same model "
                "with the same parameter groups and parallel sizes, and load this rank's own file"
            )
