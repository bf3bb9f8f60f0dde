"""Shards a model's parameters over the data-parallel ranks with PyTorch's FSDP2 (ZeRO stage 3)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.data_parallel.hybrid import hybrid_groups
from nxd_memopt.data_parallel.packed_gathers import PackedGroup, gather_packed, packed_groups
from nxd_memopt.memory.recompute import layer_units
from nxd_memopt.memory.weight_offload import has_offloaded_weights
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.modules.packed_weights import pack_weights
from nxd_memopt.optimizer.groups import require_no_context_parallelism
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.data_shards import MODEL_DTYPE, SHARD_GROUP, is_data_sharded, require_replicated
from nxd_memopt.parallel_layers.utils import is_expert_parallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

UNIT = "data_parallel_unit"
"""Attribute of a sharded parameter: a weak reference to the module that gathers it."""


def shard_model(
    model: ParallelCausalLM,
    *,
    master_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_after_forward: bool = True,
    ranks_per_replica: int | None = None,
) -> None:
    """Shard the parameters of ``model`` in place; the model is called as before.

    Each decoder layer is a unit (the layers of one recompute chunk together), and embedding, final
    norm and head are another, so tied weights are in one unit. Under expert parallelism the experts of
    a layer are a unit too, sharded over the ranks that have the same experts. A unit's parameters are all-gathered
    before its forward and again before its backward, in the dtype of the model, and its gradients are
    reduce-scattered to their mean when its backward is done. Gradients of several backward passes
    are added in ``master_dtype``, in the shards.

    Between steps each parameter is a DTensor with this rank's rows, which are the master weights:
    there is no other copy. Build ``Zero3Optimizer`` from ``model.parameters()`` afterwards.
    Bytes per parameter with AdamW and D ranks: (4 master + 4 gradient + 8 moments) / D, and the
    gathered weights and gradients of the units in use.

    The model may be on the host: each unit is copied to the backend's device when it is sharded, so the
    device has one unit in full at a time, and the rows of those before it.

    Call it after weights are loaded and after ``apply_memory``: recompute and compilation replace a
    layer's forward inside of the unit. Every data-parallel rank must reach the same parameters in
    backward. Weights with a common input that are packed for one matmul, as on GPUs, are gathered
    next to each other, if the ranks divide their rows equally.

    Args:
        model: this rank's tensor-parallel shard of the model.
        master_dtype: dtype of the rows, of their gradients and of the optimizer states; default
            float32, or the dtype of wider parameters. Frozen parameters keep their dtype.
        reduce_dtype: dtype in which gradients are reduced; None takes the dtype of the model, with
            half of the traffic for bf16 and one more rounding of each gradient.
        reshard_after_forward: False keeps the gathered parameters of all layers until their backward:
            2 more bytes per parameter, and no second all-gather.
        ranks_per_replica: hybrid sharding: shard over runs of this many consecutive data-parallel
            ranks, such as those of a host, and replicate over the runs. Default: all ranks.

    Raises:
        ValueError: the backend cannot shard gradients, there is one data-parallel rank, context
            parallelism is enabled, the model is sharded already, its trained parameters have several
            dtypes, or ``ranks_per_replica`` is no divisor above 1 of D, or smaller than D under expert
            parallelism.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes a second to import

    _require_shardable(model)
    # What describes the tensor-parallel shard, as ``partition_dim``, lies on the Parameter objects, which are
    # replaced below.
    attributes = {name: dict(vars(param)) for name, param in model.named_parameters()}
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    dtype = _trained_dtype(model)
    master_dtype = master_dtype or torch.promote_types(dtype, torch.float32)
    mesh, group = _mesh(ranks_per_replica or parallel_state.get_data_parallel_size())
    options: dict[str, Any] = {
        "mesh": mesh,
        # The layers' inputs have the dtype of the model already: nothing is cast.
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False),
    }
    experts = _ExpertSharding(model, reshard_after_forward, options)
    gathers: dict[str, Any] = {"dtype": dtype, "num_ranks": group.size()}
    # One unit at a time is copied to the device and to masters, and only this rank's rows of them stay.
    for layers in layer_units(model.decoder_layers()):
        packed: list[PackedGroup] = []
        for layer in layers:
            _copy_to_device(layer)
            packed += packed_groups(layer)
            _cast_trained(layer, master_dtype)
            experts.shard(layer)
        fully_shard(layers, reshard_after_forward=reshard_after_forward, **options)
        gather_packed(layers[0], packed, **gathers)
    _copy_to_device(model)
    _cast_trained(model, master_dtype)
    # The root's parameters are needed from the first operation of forward to the last of backward.
    fully_shard(model, reshard_after_forward=False, **options)
    # DTensors are new objects: restore what describes the tensor-parallel shard.
    for name, param in model.named_parameters():
        for attribute, value in attributes[name].items():
            setattr(param, attribute, value)
        setattr(param, MODEL_DTYPE, dtypes[name])
        setattr(param, SHARD_GROUP, experts.group if is_expert_parallel(param) else group)
    _record_units(model)


class _ExpertSharding:
    """Shards experts over the data-parallel ranks that have the same ones; does nothing without expert parallelism.

    The experts of a layer are a unit of their own inside that of the layer, because a unit has one mesh.

    Args:
        model: the model.
        reshard_after_forward: see ``shard_model``.
        options: options of ``fully_shard``, whose mesh is replaced.

    Attributes:
        group: the ranks that have the same experts.

    Raises:
        ValueError: the mesh of the other parameters has replicas.
    """

    def __init__(self, model: nn.Module, reshard_after_forward: bool, options: dict[str, Any]) -> None:
        self.group: ProcessGroup | None = None
        if not any(is_expert_parallel(param) for param in model.parameters()):
            return
        if options["mesh"].ndim > 1:
            raise ValueError(
                "ranks_per_replica below the data-parallel size shards over part of the ranks, and "
                f"expert_model_parallel_size is {parallel_state.get_expert_model_parallel_size()}: leave it out"
            )
        from torch.distributed.device_mesh import DeviceMesh

        self.group = parallel_state.group_of(parallel_state.get_expert_data_parallel_replica_groups())
        assert self.group is not None, "several processes run"
        mesh = DeviceMesh.from_group(self.group, backend.device.type)
        self._options = {**options, "mesh": mesh, "reshard_after_forward": reshard_after_forward}

    def shard(self, layer: nn.Module) -> None:
        """Shard the experts in ``layer``."""
        if self.group is None:
            return
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for module in list(layer.modules()):
            if not any(is_expert_parallel(param) for param in module.parameters(recurse=False)):
                continue
            unit: Any = fully_shard(module, **self._options)
            # The dispatcher calls this method, and not ``forward``.
            register_fsdp_forward_method(unit, "routed")
            # A gradient has the tokens of all expert-parallel ranks. The mean over the ranks with these
            # experts, which FSDP2 takes, becomes that over all data-parallel ranks. (The factor of
            # set_gradient_divide_factor applies twice on a mesh of one rank, torch 2.13.)
            unit.set_all_reduce_hook(_divide_by_expert_ranks)


def _divide_by_expert_ranks(gradients: torch.Tensor) -> None:
    gradients.div_(parallel_state.get_expert_model_parallel_size())


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """Accumulate full gradients in the backward passes inside; the next one outside reduces them.

    It saves the reduction of all micro-batches but the last and costs a full gradient of each
    parameter, in ``reduce_dtype``: 4 bytes per parameter.

    Args:
        model: a model that ``shard_model`` has sharded.
    """
    root: Any = model
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)


def _require_shardable(model: nn.Module) -> None:
    refusal = backend.gradient_sharding_refusal()
    if refusal is not None:
        raise ValueError(f"zero3 {refusal}")
    size = parallel_state.get_data_parallel_size()
    if size == 1:
        raise ValueError("zero3 shards over data-parallel ranks, and there is 1: use zero1, or more ranks")
    require_no_context_parallelism()
    if has_offloaded_weights(model.parameters()):
        raise ValueError("zero3 gathers weights for one layer at a time: turn cpu_offloading_weights off, or use zero2")
    require_replicated(model.parameters(), "shard_model", "call it once")


def _trained_dtype(model: nn.Module) -> torch.dtype:
    dtypes = {param.dtype: name for name, param in model.named_parameters() if param.requires_grad}
    if len(dtypes) != 1:
        raise ValueError(
            f"zero3 gathers trained parameters in one dtype, and they have {sorted(map(str, dtypes))} "
            f"({', '.join(dtypes.values())}): build the model in one dtype"
        )
    return next(iter(dtypes))


@torch.no_grad()
def _copy_to_device(module: nn.Module) -> None:
    """Copy the parameters of ``module`` that are not sharded yet, and its buffers, from the host to the device."""
    tensors = [param for param in module.parameters() if not is_data_sharded(param)]
    for tensor in (*tensors, *module.buffers()):
        # ``data`` keeps the objects, so ties stay ties. The host's copy is freed here.
        tensor.data = _on_device(tensor.data)
    # Weights are packed where they are used.
    pack_weights(module)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(backend.device)


@torch.no_grad()
def _cast_trained(module: nn.Module, dtype: torch.dtype) -> None:
    """Copy the trained parameters of ``module`` that are not sharded yet to ``dtype``."""
    for param in module.parameters():
        if param.requires_grad and not is_data_sharded(param):
            # ``data`` keeps the Parameter objects, so ties stay ties.
            param.data = param.data.to(dtype)


def _mesh(ranks_per_replica: int) -> tuple[DeviceMesh, ProcessGroup]:
    """Return the mesh ``[shards]``, or ``[replicas, shards]`` for hybrid sharding, and the shard group."""
    from torch.distributed.device_mesh import DeviceMesh

    device_type = backend.device.type
    size = parallel_state.get_data_parallel_size()
    if ranks_per_replica == size:
        group = parallel_state.get_data_parallel_group()
        return DeviceMesh.from_group(group, device_type), group
    shards, replicas = hybrid_groups(ranks_per_replica)
    groups: list[Any] = [parallel_state.group_of(replicas), parallel_state.group_of(shards)]
    # A row of the grid is a replica: its ranks hold one shard each. FSDP2 reduce-scatters gradients along rows,
    # and all-reduces the shards along columns.
    rank = parallel_state.get_global_rank()
    own = next(ranks for ranks in parallel_state.get_data_parallel_replica_groups() if rank in ranks)
    grid = torch.tensor(own).view(-1, ranks_per_replica)
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=("replica", "shard")), groups[1]


def _record_units(model: nn.Module) -> None:
    """Give each parameter a reference to its unit; modules come before their submodules."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for param in module.parameters():
                setattr(param, UNIT, weakref.ref(module))
