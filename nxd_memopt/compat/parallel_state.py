"""neuronx-distributed's signatures of ``parallel_state``, where they differ."""

from __future__ import annotations

import functools
import os

import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxd_memopt.backends.neuron.topology import logical_nc_config
from nxd_memopt.compat.rank_groups import PG_Group_Logic, RankGroups
from nxd_memopt.parallel_layers import parallel_state

# Module variables of neuronx-distributed that programs assign: their own rank groups, which
# get_pipeline_model_parallel_rank and get_data_parallel_rank read, and the order of ranks, which
# has no effect here because the backend chooses it.
_PIPELINE_MODEL_PARALLEL_GROUP_SPMD: RankGroups | None = None
_DATA_PARALLEL_GROUP_SPMD: RankGroups | None = None
_REPLICA_LOGIC = PG_Group_Logic.LOGIC1


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    lnc_size: int = 1,
    mesh_only: bool = False,
) -> dict[str, RankGroups]:
    """Create the process groups; see ``parallel_state.initialize_model_parallel``.

    As in neuronx-distributed, a second call replaces the groups: build modules and optimizers again. With the sizes of
    the first call it changes nothing.

    Args:
        tensor_model_parallel_size: T.
        pipeline_model_parallel_size: number of pipeline stages.
        context_parallel_size: number of context-parallel ranks.
        expert_model_parallel_size: number of expert-parallel ranks.
        skip_collective_init: do not run the first collective over all ranks.
        lnc_size: physical cores per logical core; 1, or the environment's value
            (``topology.logical_nc_config``).
        mesh_only: return the rank groups without creating process groups.

    Raises:
        ValueError: ``lnc_size`` contradicts the environment.
    """
    # 1 is the default of the argument, so it cannot be told from an option that was left out.
    configured = logical_nc_config(os.environ)
    if lnc_size not in (1, configured):
        raise ValueError(f"lnc_size {lnc_size} is not the environment's {configured}: set NEURON_LOGICAL_NC_CONFIG")
    create = functools.partial(
        parallel_state.initialize_model_parallel,
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        context_parallel_size,
        expert_model_parallel_size,
    )
    grid = create(mesh_only=True)
    if mesh_only or parallel_state.has_groups_of(grid):
        return grid
    # With the groups go what was made for them: KV groups, groups of token shuffling and the ranks' random streams.
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return create(skip_collective_init=skip_collective_init)


def get_pipeline_model_parallel_rank() -> int:
    """Return this rank's pipeline stage, from the program's own groups if it has set them."""
    groups = _PIPELINE_MODEL_PARALLEL_GROUP_SPMD
    if groups is None:
        return parallel_state.get_pipeline_model_parallel_rank()
    return _rank_in(groups)


def get_data_parallel_rank() -> int:
    """Return this rank's data-parallel rank, from the program's own groups if it has set them."""
    groups = _DATA_PARALLEL_GROUP_SPMD
    if groups is None:
        return parallel_state.get_data_parallel_rank()
    return _rank_in(groups)


def _rank_in(groups: RankGroups) -> int:
    """Return this rank's position in its group."""
    rank = dist.get_rank()
    return next(ranks.index(rank) for ranks in groups if rank in ranks)


def get_kv_shared_group(as_list: bool = False) -> ProcessGroup | RankGroups | None:
    """Return this rank's KV group, or all KV groups as lists of ranks."""
    return parallel_state.get_kv_shared_group(get_kv_shared_group_size(), as_list)


def get_kv_shared_replica_groups() -> RankGroups:
    """Return all KV groups as lists of ranks."""
    return parallel_state.get_kv_shared_group(get_kv_shared_group_size(), as_list=True)


def get_kv_shared_group_size() -> int:
    """Return the size of KV groups, of which neuronx-distributed has one.

    Raises:
        RuntimeError: KV groups of several sizes exist, or none.
    """
    # This library creates KV groups for each size that a layer needs, so several may exist.
    sizes = list(parallel_state.kv_rank_strides())
    if len(sizes) != 1:
        raise RuntimeError(f"KV groups of sizes {sizes} exist: ask nxd_memopt's get_kv_shared_group for one of them")
    return sizes[0]
