"""The process groups of every parallel dimension, and all other module-level state of the library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.config import require_divisible
from nxd_memopt.parallel_layers.rank_grid import RankGroups, rank_grid, remaining_ranks
from nxd_memopt.parallel_layers.rank_order import replica_groups

Group = Any
"""``ProcessGroup | None``; with ``as_list=True`` the ``RankGroups`` of all groups."""


@dataclass(frozen=True)
class _Axis:
    """One parallel dimension: this rank's group and the partition of the world into groups."""

    rank_groups: RankGroups
    ranks: list[int]
    group: ProcessGroup | None

    def group_or_ranks(self, as_list: bool) -> Group:
        if as_list:
            return self.rank_groups
        return self.group

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        return self.ranks.index(get_global_rank())


@dataclass
class _State:
    axes: dict[str, _Axis] = field(default_factory=dict)
    kv_groups: dict[int, _Axis] = field(default_factory=dict)
    kv_rank_strides: dict[int, int] = field(default_factory=dict)
    other_groups: list[_Axis] = field(default_factory=list)
    host_groups: list[_Axis] = field(default_factory=list)
    rng_states: dict[str, Tensor] = field(default_factory=dict)
    functional_mappings: bool = False
    default_group: ProcessGroup | None = None  # torch.distributed's, when the first of the groups was created


_STATE = _State()
# Activations are exchanged over these groups while gradients may be reduced over the same ranks. Ranks may start
# the two in different orders, which mixes the data of one communicator or blocks it.
_AXES_WITH_OWN_GROUPS = ("context", "expert", "token_shuffle")
_SINGLE_PROCESS = _Axis(rank_groups=[[0]], ranks=[0], group=None)
UNFINISHED_SAVES: list[Any] = []
"""The tagged checkpoint being written in the background, if any; see ``trainer.background``."""


def get_global_rank() -> int:
    """Return this rank in the world; 0 in a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of ranks in the world; 1 in a single process."""
    return dist.get_world_size() if dist.is_initialized() else 1


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    *,
    skip_collective_init: bool = False,
    mesh_only: bool = False,
) -> dict[str, RankGroups]:
    """Create the process groups. Every rank of the world calls this with the same sizes.

    The rank grid is ``[pipeline, data, context, tensor]``, tensor fastest. For expert layers the
    same ranks are ``[pipeline, expert data, expert, tensor]`` (neuronx-distributed's order). The
    backend's ``device_order`` may reorder the ranks to match the links between devices.

    Args:
        tensor_model_parallel_size: number of ranks that share a layer.
        pipeline_model_parallel_size: number of ranks that share a stack of layers.
        context_parallel_size: number of ranks that share a sequence.
        expert_model_parallel_size: number of ranks that share a set of experts.
        skip_collective_init: skip the first collective of the world (Neuron runtime setup on trn1).
        mesh_only: only return the rank groups; create nothing.

    Returns:
        The partition of the world's ranks for each dimension.

    Raises:
        ValueError: the sizes do not divide the world size.
        RuntimeError: the groups exist already: call ``destroy_model_parallel`` first.
    """
    if model_parallel_is_initialized() and not mesh_only:
        raise RuntimeError("model parallelism is initialized already: call destroy_model_parallel() first")
    world_size = get_world_size()
    tensor = tensor_model_parallel_size
    pipeline = pipeline_model_parallel_size
    context = context_parallel_size
    expert = expert_model_parallel_size
    # One world, two grids: dense layers divide the ranks that are not tensor- or
    # pipeline-parallel into data x context, expert layers into expert data x expert. Both have
    # the same tensor- and pipeline-parallel groups, so the dense grid may overwrite those of the
    # expert grid.
    order = backend.device_order(world_size, tensor)
    data = remaining_ranks(world_size, tensor=tensor, pipeline=pipeline, context=context)
    expert_data = remaining_ranks(world_size, tensor=tensor, pipeline=pipeline, expert=expert)
    dense = rank_grid({"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}, order)
    sparse = rank_grid({"pipeline": pipeline, "expert_data": expert_data, "expert": expert, "tensor": tensor}, order)
    grid = {**sparse, **dense, "world": [list(range(world_size))]}
    if not mesh_only:
        if not skip_collective_init:
            backend.initialize_collectives()
        for name, rank_groups in grid.items():
            create = _find_or_create_axis
            if name in _AXES_WITH_OWN_GROUPS and len(rank_groups[0]) > 1:
                create = _create_axis
            _STATE.axes[name] = create(rank_groups)
    return grid


def has_groups_of(grid: dict[str, RankGroups]) -> bool:
    """Return whether the groups of ``grid``, which ``initialize_model_parallel`` returned, exist and can be used."""
    # Destroying torch.distributed's default group destroys all groups: groups of an earlier world are of no use.
    if not model_parallel_is_initialized() or _STATE.default_group is not _default_group():
        return False
    return all(_STATE.axes[name].rank_groups == rank_groups for name, rank_groups in grid.items())


def _default_group() -> ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _find_or_create_axis(rank_groups: RankGroups) -> _Axis:
    """Return a partition of the world with the groups that exist for it, or new ones. Every rank calls."""
    _STATE.default_group = _STATE.default_group or _default_group()
    # NCCL's communicators need memory of the device (planner.hardware.NCCL_GIB), and a partition into single
    # ranks takes one new_group call per rank.
    shared = [axis for name, axis in _STATE.axes.items() if name not in _AXES_WITH_OWN_GROUPS]
    for axis in (*shared, *_STATE.kv_groups.values(), *_STATE.other_groups):
        if axis.rank_groups == rank_groups:
            return axis
    is_world = dist.is_initialized() and rank_groups == [list(range(get_world_size()))]
    if is_world and backend.default_group_is_complete:
        return _Axis(rank_groups, rank_groups[0], dist.group.WORLD)
    return _create_axis(rank_groups)


def _create_axis(rank_groups: RankGroups) -> _Axis:
    own_ranks = next(ranks for ranks in rank_groups if get_global_rank() in ranks)
    # Every rank passes the groups of all ranks: creating a group is collective over the world,
    # and torch_xla's collectives name all groups of the partition.
    group = None
    if dist.is_initialized():
        group = backend.new_group(rank_groups)
    return _Axis(rank_groups, own_ranks, group)


def destroy_model_parallel() -> None:
    """Destroy every group and random stream; the default process group of the world stays."""
    # First the backend's resources of the groups, such as peer memory, which need them to be
    # alive.
    backend.release_groups()
    axes = _all_axes()
    _STATE.axes = {}
    _STATE.other_groups = []
    _STATE.host_groups = []
    _STATE.rng_states = {}
    _STATE.kv_groups = {}
    _STATE.kv_rank_strides = {}
    _destroy_groups(axes)
    _STATE.default_group = None


def _all_axes() -> list[_Axis]:
    return [*_STATE.axes.values(), *_STATE.kv_groups.values(), *_STATE.other_groups, *_STATE.host_groups]


def _destroy_groups(axes: Iterable[_Axis]) -> None:
    """Destroy the groups of removed axes, except those that other axes still have and that of the world."""
    if not dist.is_initialized() or _STATE.default_group is not dist.group.WORLD:
        return
    destroyed: list[Group] = [None, dist.group.WORLD, *process_groups()]
    for axis in axes:
        if all(axis.group is not group for group in destroyed):
            dist.destroy_process_group(axis.group)
            destroyed.append(axis.group)


def model_parallel_is_initialized() -> bool:
    return bool(_STATE.axes)


def _axis(name: str) -> _Axis:
    if name in _STATE.axes:
        return _STATE.axes[name]
    # A single process needs no groups. With several, T = 1 would be a silent fallback: each rank
    # would train a model of its own.
    if get_world_size() > 1:
        raise RuntimeError(
            f"{get_world_size()} processes are running but model parallelism is not initialized: "
            "call parallel_state.initialize_model_parallel(tensor_model_parallel_size=...) first"
        )
    return _SINGLE_PROCESS


def _group(name: str, as_list: bool) -> Group:
    return _axis(name).group_or_ranks(as_list)


def process_groups() -> list[ProcessGroup]:
    """Return all existing groups; copies of a module share them."""
    return [axis.group for axis in _all_axes() if axis.group is not None]


def group_of(rank_groups: RankGroups) -> ProcessGroup | None:
    """Return this rank's group of a partition of the world, created if needed. Every rank calls."""
    axis = _find_or_create_axis(rank_groups)
    # Also one that exists: its group stays when, for example, the KV groups are destroyed.
    if axis not in _STATE.other_groups:
        _STATE.other_groups.append(axis)
    return axis.group


def host_group_of(rank_groups: RankGroups) -> ProcessGroup | None:
    """Return this rank's group of a partition of the world for tensors on the host (gloo), created if needed.

    Every rank calls.
    """
    for axis in _STATE.host_groups:
        if axis.rank_groups == rank_groups:
            return axis.group
    own_ranks = next(ranks for ranks in rank_groups if get_global_rank() in ranks)
    group: Any = None
    if dist.is_initialized():
        group, _ = dist.new_subgroups_by_enumeration(rank_groups, backend="gloo")
    _STATE.host_groups.append(_Axis(rank_groups, own_ranks, group))
    return group


def rng_states() -> dict[str, Tensor]:
    """Return the generator states of the named random streams; see ``parallel_layers.random``."""
    return _STATE.rng_states


def initialize_kv_group(kv_shared_group_size: int = 1, sequential_ranks_in_group: bool = False) -> ProcessGroup | None:
    """Create, once per size, the groups of ranks that hold the same KV heads. Every rank calls.

    Args:
        kv_shared_group_size: number of ranks that share a KV head.
        sequential_ranks_in_group: use consecutive ranks; default the order of ``kv_rank_stride``.

    Raises:
        ValueError: size does not divide T, or the groups exist with another order of ranks.
    """
    # The order of the ranks is that of the query heads (``rank_order``). Layers that were built
    # with another order have other heads: existing groups are not replaced.
    stride = kv_rank_stride(kv_shared_group_size)
    if sequential_ranks_in_group and stride > 1:
        if kv_shared_group_size in _STATE.kv_groups:
            raise ValueError(
                f"KV groups of size {kv_shared_group_size} exist with ranks {stride} apart: call initialize_kv_group "
                "with sequential_ranks_in_group=True before layers are built, or destroy_kv_group() first"
            )
        stride = 1
    if kv_shared_group_size not in _STATE.kv_groups:
        rank_groups = replica_groups(_axis("tensor").rank_groups, kv_shared_group_size, stride)
        _STATE.kv_groups[kv_shared_group_size] = _find_or_create_axis(rank_groups)
        _STATE.kv_rank_strides[kv_shared_group_size] = stride
    return _STATE.kv_groups[kv_shared_group_size].group


def kv_rank_stride(kv_shared_group_size: int) -> int:
    """Return the distance between ranks with the same KV heads (``rank_order``); create no group.

    The distance of existing groups, else the backend's choice: 1 (neighbors), or T/m on trn1.
    """
    size = get_tensor_model_parallel_size()
    require_divisible("tensor_model_parallel_size", size, "kv_shared_group_size", kv_shared_group_size)
    if kv_shared_group_size in _STATE.kv_rank_strides:
        return _STATE.kv_rank_strides[kv_shared_group_size]
    return backend.kv_rank_stride(size, kv_shared_group_size)


def kv_rank_strides() -> dict[int, int]:
    """Return ``kv_rank_stride`` of each size that ``initialize_kv_group`` was called with."""
    return dict(_STATE.kv_rank_strides)


def replica_group(replicas: int, rank_stride: int) -> ProcessGroup | None:
    """Return the ranks that hold this rank's shard, or None for 1 replica. Every rank calls."""
    if replicas == 1:
        return None
    if rank_stride == kv_rank_stride(replicas):
        return initialize_kv_group(replicas)
    return group_of(replica_groups(_axis("tensor").rank_groups, replicas, rank_stride))


def get_kv_shared_group(kv_shared_group_size: int, as_list: bool = False) -> Group:
    """Return the group that ``initialize_kv_group`` created for this size."""
    if kv_shared_group_size not in _STATE.kv_groups:
        raise RuntimeError(f"no KV groups of size {kv_shared_group_size}: call initialize_kv_group first")
    return _STATE.kv_groups[kv_shared_group_size].group_or_ranks(as_list)


def destroy_kv_group() -> None:
    """Destroy the groups of ``initialize_kv_group``."""
    axes = list(_STATE.kv_groups.values())
    _STATE.kv_groups = {}
    _STATE.kv_rank_strides = {}
    _destroy_groups(axes)


def initialize_token_shuffle_group(token_shuffle_group_size: int = 1) -> None:
    """Split data-parallel groups into runs of consecutive ranks that exchange tokens.

    Raises:
        ValueError: the size does not divide the data-parallel size.
    """
    size = token_shuffle_group_size
    require_divisible("data-parallel size", get_data_parallel_size(), "token_shuffle_group_size", size)
    runs: RankGroups = []
    for ranks in get_data_parallel_replica_groups():
        for start in range(0, len(ranks), size):
            runs.append(ranks[start : start + size])
    # Every layer that shuffles calls this: layers of one size share a process group.
    axis = _STATE.axes.get("token_shuffle")
    if axis is None or axis.rank_groups != runs:
        destroy_token_shuffle_group()
        _STATE.axes["token_shuffle"] = _create_axis(runs)


def destroy_token_shuffle_group() -> None:
    """Destroy the groups of ``initialize_token_shuffle_group``."""
    axis = _STATE.axes.pop("token_shuffle", None)
    if axis is not None:
        _destroy_groups([axis])


def get_token_shuffle_group(as_list: bool = False) -> Group:
    return _group("token_shuffle", as_list)


def get_token_shuffle_replica_groups() -> RankGroups:
    return _axis("token_shuffle").rank_groups


def get_token_shuffle_group_size() -> int:
    return _axis("token_shuffle").size


def get_world_group(as_list: bool = False) -> Group:
    return _group("world", as_list)


def get_tensor_model_parallel_group(as_list: bool = False) -> Group:
    return _group("tensor", as_list)


def get_tensor_model_parallel_replica_groups() -> RankGroups:
    return _axis("tensor").rank_groups


def get_tensor_model_parallel_size() -> int:
    return _axis("tensor").size


def get_tensor_model_parallel_rank() -> int:
    return _axis("tensor").rank


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first member of this rank's tensor-parallel group."""
    return _axis("tensor").ranks[0]


def get_data_parallel_group(as_list: bool = False) -> Group:
    return _group("data", as_list)


def get_data_parallel_replica_groups() -> RankGroups:
    return _axis("data").rank_groups


def get_data_parallel_size() -> int:
    return _axis("data").size


def get_data_parallel_rank() -> int:
    return _axis("data").rank


def get_data_parallel_src_rank() -> int:
    """Return the global rank of the first member of this rank's data-parallel group."""
    return _axis("data").ranks[0]


def get_pipeline_model_parallel_group(as_list: bool = False) -> Group:
    return _group("pipeline", as_list)


def get_pipeline_model_parallel_replica_groups() -> RankGroups:
    return _axis("pipeline").rank_groups


def get_pipeline_model_parallel_size() -> int:
    return _axis("pipeline").size


def get_pipeline_model_parallel_rank() -> int:
    return _axis("pipeline").rank


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; of the last stage it is the first one."""
    axis = _axis("pipeline")
    return axis.ranks[(axis.rank + 1) % axis.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the stage before; of the first stage it is the last one."""
    axis = _axis("pipeline")
    return axis.ranks[axis.rank - 1]


def stages_group(stages: Iterable[int]) -> ProcessGroup | None:
    """Return this rank's group of some stages of its pipeline, or of itself alone on other stages. Every rank calls.

    Args:
        stages: positions of ranks in each pipeline.
    """
    chosen = sorted(set(stages))
    rank_groups: RankGroups = []
    for ranks in get_pipeline_model_parallel_replica_groups():
        rank_groups.append(sorted(ranks[stage] for stage in chosen))
        rank_groups += [[rank] for stage, rank in enumerate(ranks) if stage not in chosen]
    return group_of(rank_groups)


def get_tied_stages_group() -> ProcessGroup | None:
    """Return this rank's group of the first and the last stage of its pipeline. Every rank calls."""
    return stages_group([0, get_pipeline_model_parallel_size() - 1])


def get_context_model_parallel_group(as_list: bool = False) -> Group:
    return _group("context", as_list)


def get_context_model_parallel_replica_groups() -> RankGroups:
    return _axis("context").rank_groups


def get_context_model_parallel_size() -> int:
    return _axis("context").size


def get_context_model_parallel_rank() -> int:
    return _axis("context").rank


def get_context_model_parallel_src_tgt_pairs() -> RankGroups:
    """Return ``[source, target]`` for each step around this rank's context-parallel ring."""
    ranks = _axis("context").ranks
    return [[rank, ranks[(i + 1) % len(ranks)]] for i, rank in enumerate(ranks)]


def get_zero1_sharding_groups() -> RankGroups:
    """Return groups with equal parameters: same pipeline stage and same tensor-parallel rank."""
    context_groups = get_context_model_parallel_replica_groups()
    stages = get_pipeline_model_parallel_size()
    data_size = get_data_parallel_size()
    # Context groups are ordered [stage, data, tensor]: the group of one stage, data rank and
    # tensor rank is ``tensor_size`` positions before that of the next data rank.
    tensor_size = len(context_groups) // (stages * data_size)
    groups: RankGroups = []
    for stage in range(stages):
        for tensor in range(tensor_size):
            group: list[int] = []
            for data in range(data_size):
                group += context_groups[(stage * data_size + data) * tensor_size + tensor]
            groups.append(group)
    return groups


def get_expert_model_parallel_group(as_list: bool = False) -> Group:
    return _group("expert", as_list)


def get_expert_model_parallel_replica_groups() -> RankGroups:
    return _axis("expert").rank_groups


def get_expert_model_parallel_size() -> int:
    return _axis("expert").size


def get_expert_model_parallel_rank() -> int:
    return _axis("expert").rank


def get_expert_data_parallel_group(as_list: bool = False) -> Group:
    return _group("expert_data", as_list)


def get_expert_data_parallel_replica_groups() -> RankGroups:
    return _axis("expert_data").rank_groups


def get_expert_data_parallel_size() -> int:
    return _axis("expert_data").size


def get_expert_data_parallel_rank() -> int:
    return _axis("expert_data").rank


def is_global_rank_zero() -> bool:
    return get_global_rank() == 0


def rmsg(msg: str) -> str:
    """Prefix ``msg`` with this rank's coordinates, for logs of many ranks."""
    axes = (("pp", "pipeline"), ("tp", "tensor"), ("dp", "data"))
    coordinates = "_".join(f"{name}{_axis(axis).rank}" for name, axis in axes)
    return f"[rank_{get_global_rank()}_{coordinates}] {msg}"


def has_functional_mappings() -> bool:
    """Return whether no mapping may modify its input, even outside autograd: in regions that run twice."""
    return _STATE.functional_mappings


def set_functional_mappings(value: bool) -> bool:
    """Set ``has_functional_mappings`` and return its previous value."""
    previous = _STATE.functional_mappings
    _STATE.functional_mappings = value
    return previous
