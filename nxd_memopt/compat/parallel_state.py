"""neuronx-distributed's signatures of ``parallel_state``, where they differ."""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import torch
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


# Stages of a pipeline


def get_pipeline_model_parallel_sr_group(parity: bool | None = None) -> RankGroups:
    """Return the links between stages of all pipelines, ``[rank, next rank]``.

    Args:
        parity: links that begin at stages of this parity, which have no rank in common; default all links. With an
            odd number of stages the link from the last stage to the first one is of neither parity.
    """
    size = parallel_state.get_pipeline_model_parallel_size()
    stages = range(size) if parity is None else [each for each in range(size) if _link_kind(each) == int(parity)]
    return [[ranks[i], ranks[(i + 1) % size]] for ranks in _pipelines() for i in stages]


def _pipelines() -> RankGroups:
    return parallel_state.get_pipeline_model_parallel_replica_groups()


def _link_kind(stage: int) -> int:
    """Return which set of links without common ranks has the link that begins at ``stage``."""
    size = parallel_state.get_pipeline_model_parallel_size()
    if size % 2 and stage == size - 1:
        return 2
    return stage % 2


def _links_like(stage: int) -> RankGroups:
    """Return the links of all pipelines in the set of the link that begins at ``stage``."""
    size = parallel_state.get_pipeline_model_parallel_size()
    like = [each for each in range(size) if _link_kind(each) == _link_kind(stage)]
    return [[ranks[i], ranks[(i + 1) % size]] for ranks in _pipelines() for i in like]


def get_next_rank_replica_groups() -> RankGroups:
    """Return the links of all pipelines that are used together with the link from this stage to the next one."""
    return _links_like(get_pipeline_model_parallel_rank())


def get_prev_rank_replica_groups() -> RankGroups:
    """Return the links of all pipelines that are used together with the link to this stage."""
    size = parallel_state.get_pipeline_model_parallel_size()
    return _links_like((get_pipeline_model_parallel_rank() - 1) % size)


def get_next_rank_group(as_list: bool = False) -> ProcessGroup | RankGroups | None:
    """Return the group of this stage and the next one, or all links as lists. Every rank calls."""
    return get_next_rank_replica_groups() if as_list else _link_group(get_pipeline_model_parallel_rank())


def get_prev_rank_group(as_list: bool = False) -> ProcessGroup | RankGroups | None:
    """Return the group of the previous stage and this one, or all links as lists. Every rank calls."""
    size = parallel_state.get_pipeline_model_parallel_size()
    stage = (get_pipeline_model_parallel_rank() - 1) % size
    return get_prev_rank_replica_groups() if as_list else _link_group(stage)


def _link_group(stage: int) -> ProcessGroup | None:
    """Return the group of the link that begins at ``stage``."""
    # Ranks ask for links of different sets: all of them are created, in one order.
    groups: dict[int, ProcessGroup | None] = {}
    world = range(parallel_state.get_world_size())
    for first in range(parallel_state.get_pipeline_model_parallel_size()):
        if _link_kind(first) not in groups:
            links = [sorted(set(link)) for link in _links_like(first)]
            linked = {rank for link in links for rank in link}
            alone = [[rank] for rank in world if rank not in linked]
            groups[_link_kind(first)] = parallel_state.group_of([*links, *alone])
    return groups[_link_kind(stage)]


def create_pg_with_ranks(ranks: list[int]) -> ProcessGroup | None:
    """Return the group of the stages ``ranks`` of this rank's pipeline. Every rank of the world calls."""
    return parallel_state.stages_group(ranks)


def initialize_pp_gloo_groups() -> None:
    """Create the groups of the stages of a pipeline for tensors on the host. Every rank calls."""
    parallel_state.host_group_of(_pipelines())


def get_pp_gloo_group() -> ProcessGroup | None:
    """Return the group of ``initialize_pp_gloo_groups``."""
    return parallel_state.host_group_of(_pipelines())


def is_tcp_store_available() -> bool:
    """Return whether there is a key-value store of the rendezvous."""
    return dist.is_initialized()


def get_tcp_store() -> Any:
    """Return the rendezvous's key-value store."""
    return dist.distributed_c10d._get_default_store()


def gather_python_object(obj: Any, group: ProcessGroup | None) -> list[Any]:
    """Return the JSON objects of all ranks of a group of the host on its first rank; empty on the others."""
    if group is None:
        return [obj]
    if dist.get_rank(group) > 0:
        send_text(json.dumps(obj), dist.get_global_rank(group, 0), group)
        return []
    others = dist.get_process_group_ranks(group)[1:]
    return [obj, *(json.loads(receive_text(rank, group)) for rank in others)]


def send_text(text: str, rank: int, group: ProcessGroup | None) -> None:
    """Send ``text`` to a global rank over a group of the host."""
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    dist.send(torch.tensor(content.numel()), rank, group=group)
    dist.send(content, rank, group=group)


def receive_text(rank: int, group: ProcessGroup | None) -> str:
    """Receive the text that a global rank sends."""
    size = torch.zeros((), dtype=torch.int64)
    dist.recv(size, rank, group=group)
    content = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(content, rank, group=group)
    return content.numpy().tobytes().decode()


def get_rank_info_str() -> str:
    """Return this rank's coordinates, for logs."""
    if not parallel_state.model_parallel_is_initialized():
        return "model_parallel_uninitialized"
    tensor = parallel_state.get_tensor_model_parallel_rank()
    return f"DP_{get_data_parallel_rank()}_TP_{tensor}_PP_{get_pipeline_model_parallel_rank()}"
