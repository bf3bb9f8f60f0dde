"""Puts a training checkpoint into a model and an optimizer, whatever T, D and ZeRO-1 it was written with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxd_memopt.architectures.layers import fused_name
from nxd_memopt.checkpoint.layout import Part, parts_of
from nxd_memopt.checkpoint.names import match_names, named_tensors
from nxd_memopt.checkpoint.plain import decode
from nxd_memopt.checkpoint.sharded.index import Index
from nxd_memopt.checkpoint.sharded.logical import name_of, parameter_names
from nxd_memopt.checkpoint.sharded.stored_optimizer import MASTER, StoredOptimizer
from nxd_memopt.modules.lora import adapted_layers, is_adapter, model_type_of, whole_model
from nxd_memopt.modules.packed_weights import pack_weights
from nxd_memopt.modules.staged_model import is_staged
from nxd_memopt.ops.param_remainders import REMAINDER, join, remainder_of
from nxd_memopt.optimizer.sharded_parameters import StoredParameter
from nxd_memopt.parallel_layers.data_shards import local_rows, model_dtype
from nxd_memopt.parallel_layers.resharding import LazySlice, full_shape, local_slice, require_full_shape

_SHOWN = 5


@torch.no_grad()
def load_model(index: Index, model: nn.Module) -> None:
    """Fill the model's parameters and persistent buffers, one at a time.

    A model with adapters (LoRA) keeps the parameters that the checkpoint has left out: the caller has loaded them
    from its base.

    Raises:
        ValueError: names, shapes or dtypes differ, or a file is damaged.
    """
    without = None if index.base is None else (lambda entry: entry.is_frozen)
    targets = match_names(model, list(index.names("model.")), without=without)
    # Check all tensors before the first one changes.
    for name, target in targets.items():
        require_alike(index, f"model.{name}", full_shape(target), model_dtype(target))
    for name, target in targets.items():
        rows = local_rows(target)
        rows.copy_(index.assemble(f"model.{name}", parts_of(target), tuple(rows.shape)))
    pack_weights(model)


@torch.no_grad()
def load_weights(
    index: Index, model: nn.Module, adapter_scale: float | None, base: Mapping[str, Tensor | LazySlice]
) -> bool:
    """Fill the model's parameters and persistent buffers with weights of any dtype.

    A weight with an fp32 master in the checkpoint is taken from the master, so a model of a wider
    dtype than the stored one loses nothing.

    The model computes what the checkpoint's did: adapters (LoRA) of the same layers, rank and scale are
    loaded; others are merged into the weights, next to which the model's own adapters stay as they are.

    Args:
        index: the checkpoint.
        model: the model to fill.
        adapter_scale: scale of the checkpoint's adapters; None if it has none.
        base: full tensors of the checkpoint's base by name, of which it stores none itself; empty without.

    Returns:
        Whether adapters were loaded.

    Raises:
        ValueError: names or shapes differ, or a file is damaged.
    """
    stored = {name: index.shape(f"model.{name}") for name in index.names("model.") if is_adapter(name)}
    entries = named_tensors(whole_model(model))
    own = {each.names[0]: full_shape(each.tensor) for each in entries if is_adapter(each.names[0])}
    if stored and adapter_scale is None:
        raise ValueError(f"{index.directory} has adapters and records no scale: export its model, and start from that")
    is_same = stored == own and all(layer.scale == adapter_scale for layer in adapted_layers(model).values())
    names = {name for name in (*index.names("model."), *base) if is_same or name not in stored}
    targets = match_names(model, names, without=None if is_same else (lambda entry: entry.is_adapter))
    for name, target in targets.items():
        if f"model.{name}" in index:
            require_alike(index, f"model.{name}", full_shape(target), None)
        else:
            require_full_shape(name, base[name], target)
    # The parts of a fused layer have one A, stored under the first part's name.
    downs: dict[str, str] = {}
    for name in stored:
        if name.endswith(".lora_A.weight"):
            downs[fused_name(model_type_of(model), name.removesuffix(".lora_A.weight"))] = name
    for name, target in targets.items():
        parts = parts_of(target)
        if f"model.{name}" in index:
            weight = _weight(index, name, parts, tuple(target.shape))
        else:
            weight = local_slice(base[name], target, dtype=base_dtype(index))
        layer = name.removesuffix(".weight")
        up = f"{layer}.lora_B.weight"
        if not is_same and up in stored:
            weight = weight.double()
            down = downs[fused_name(model_type_of(model), layer)]
            _add_adapter(index, (up, down), cast(float, adapter_scale), weight, parts)
        target.copy_(weight)  # rounds once, to the target's dtype
    pack_weights(model)
    return is_same and bool(stored)


def base_dtype(index: Index) -> torch.dtype:
    """Return the dtype that the base had in the run of a checkpoint with adapters.

    All parameters of a model have one dtype, and adapters have the dtype of their layer. The weights of the base's
    files may have more bits than the run has seen.
    """
    return next(index.dtype(f"model.{name}") for name in index.names("model.") if is_adapter(name))


def _weight(index: Index, name: str, parts: list[Part], shape: tuple[int, ...]) -> Tensor:
    """Return this rank's part of a weight, of its master if the checkpoint has one."""
    master = _name_of_master(index, name)
    if master is not None:
        return _master(index, master, parts, shape)
    return index.assemble(f"model.{name}", parts, shape)


def _add_adapter(index: Index, names: tuple[str, str], scale: float, weight: Tensor, parts: list[Part]) -> None:
    """Add this rank's part of ``scale * B A`` of the adapter ``names`` (B, A) to the ``weight``, in float64."""
    factors = []
    for name in names:
        shape = index.shape(f"model.{name}")
        full = _weight(index, name, parts_of(torch.empty(shape, device="meta")), shape)
        factors.append(full.to(weight.dtype))
    up, down = factors
    for part in parts:
        rows, columns = (slice(start, start + size) for start, size in zip(part.offset, part.size, strict=True))
        part.of(weight).add_(scale * (up[rows] @ down[:, columns]))


def require_alike(index: Index, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """Raise ``ValueError`` if a full tensor has another shape or dtype in the checkpoint."""
    stored = index.dtype(name)
    if index.shape(name) != shape or (dtype is not None and stored != dtype):
        raise ValueError(
            f"{name} has shape {list(index.shape(name))} and dtype {stored} in {index.directory}, here {list(shape)} "
            f"and {dtype or stored}: build the model and the optimizer of the run that wrote it"
        )


@torch.no_grad()
def load_optimizer(index: Index, optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Fill masters, states and options.

    Return warnings about state that is not restored bit for bit.

    Call it after ``load_model``.

    Raises:
        ValueError: the checkpoint has no optimizer, the parameter groups differ, or the
            checkpoint has states of other parameters.
    """
    names = parameter_names(model)
    content = index.content["optimizer"]
    if content is None:
        raise ValueError(f"{index.directory} holds no optimizer: resume without one, or from another checkpoint")
    content = decode(content, index.plain_tensor)
    stored = StoredOptimizer(optimizer)
    notes: list[str] = []
    elsewhere = _trained_elsewhere(model)
    _load_groups(_own_groups(content["groups"], elsewhere), stored, names)
    states = _states_by_parameter(index)
    # Masters are read below. Without this, ``stored.parameters`` would first cut them from the
    # loaded parameters, because these were written to after the optimizer was built.
    stored.mark_masters_synced()
    # Parameters without states in the checkpoint must start without states here, too.
    stored.base.state.clear()
    # Options of each parameter's group decide where torch expects the step.
    groups = {id(param): group for group in stored.base.param_groups for param in group["params"]}
    without_master = []
    for each in stored.parameters:
        if not _load_master(index, stored, each, names):
            without_master.append(each)
    if without_master:
        notes.append(
            f"{index.directory} holds no master weights of {len(without_master)} parameters: they start from the "
            f"parameters, rounded to {without_master[0].param.dtype}"
        )
    for each in stored.parameters:
        name = name_of(each.param, names)
        # Plain values come from the JSON index, tensors from the files.
        state: dict[Any, Any] = dict(content["numbers"].get(name, {}))
        for key in states.get(name, ()):
            # Was read with the master.
            if key == REMAINDER:
                continue
            state[key] = _state_tensor(index, key, name, each, groups[id(each.stored)])
        if state:
            stored.base.state[each.stored] = state
    # The masters were written to just now. They belong to the loaded parameters and must not be
    # cut from them, or the low bits of every master would be lost.
    stored.mark_masters_synced()
    _require_all_used(index, {name_of(each.param, names) for each in stored.parameters} | elsewhere)
    return notes


def _trained_elsewhere(model: nn.Module) -> set[str]:
    """Return the names of the parameters that other stages of a pipeline train; empty of a complete model."""
    if not is_staged(model):
        return set()
    own = {entry.names[0] for entry in named_tensors(model)}
    return {entry.names[0] for entry in named_tensors(whole_model(model)) if not entry.is_frozen} - own


def _own_groups(saved: list[dict[str, Any]], elsewhere: set[str]) -> list[dict[str, Any]]:
    """Return the groups without the parameters of other stages."""
    if not elsewhere:
        return saved
    groups = [{**group, "parameters": [n for n in group["parameters"] if n not in elsewhere]} for group in saved]
    return [group for group in groups if group["parameters"]]


def _load_groups(saved: list[dict[str, Any]], optimizer: StoredOptimizer, names: Mapping[int, str]) -> None:
    """Restore the options of each parameter group.

    Raises:
        ValueError: the parameters are grouped differently.
    """
    groups = optimizer.param_groups
    current = [[name_of(p, names) for p in group["params"] if p.requires_grad] for group in groups]
    stored = [group["parameters"] for group in saved]
    # The order may differ: states are found by name, and stages of a pipeline may lack a group.
    groups_of = {frozenset(group): entry["options"] for group, entry in zip(stored, saved, strict=True)}
    if {frozenset(group) for group in current} != groups_of.keys():
        differing = sorted(set().union(*stored) ^ set().union(*current))
        raise ValueError(
            f"the checkpoint's optimizer has parameter groups of {[len(group) for group in stored]} parameters, this "
            f"one of {[len(group) for group in current]}; in one of the two only: {differing[:_SHOWN]}: build the "
            "parameter groups of the run that wrote it"
        )
    optimizer.load_options([groups_of[frozenset(group)] for group in current])


def _states_by_parameter(index: Index) -> dict[str, list[str]]:
    """Return the names of the states of each parameter in the checkpoint.

    Parameter names contain dots, state names do not: the first dot separates the two.
    """
    found: dict[str, list[str]] = {}
    for full_name in index.names("optimizer."):
        key, _, name = full_name.partition(".")
        if key != MASTER:
            found.setdefault(name, []).append(key)
    return found


def _load_master(index: Index, optimizer: StoredOptimizer, each: StoredParameter, names: Mapping[int, str]) -> bool:
    """Fill the optimizer's tensor of one parameter.

    Return False if it needs a master that the checkpoint lacks.

    Raises:
        ValueError: the checkpoint has a master and the optimizer has none.
    """
    # Three cases: no stored master (cut from the weights), a stored master that this optimizer
    # cannot keep (error), and a stored master, which may be a remainder there, here, or both.
    param_name = name_of(each.param, names)
    name = f"optimizer.{MASTER}.{param_name}"
    parts = parts_of(each.param, rank=each.rank, size=each.size)
    shape = tuple(each.stored.shape)
    found = _name_of_master(index, param_name)
    keeps_remainder = optimizer.keeps_remainder(each)
    # Without a stored master, the optimizer's tensor starts from the model's values: exact if the
    # dtypes are equal.
    if found is None:
        if each.stored is not each.param:
            each.stored.copy_(index.assemble(f"model.{param_name}", parts, shape))
        return not (keeps_remainder or optimizer.has_master(each))
    if not keeps_remainder and (each.stored is each.param or each.stored.dtype == model_dtype(each.param)):
        raise ValueError(
            f"{index.directory} has {found}, and this optimizer keeps no master weights of {each.param.dtype} "
            "parameters: resume with the optimizer that wrote it"
        )
    expected = torch.float32 if keeps_remainder else each.stored.dtype
    if found != name:
        expected = torch.int16
    require_alike(index, found, full_shape(each.param), expected)
    master = _master(index, found, parts, shape)
    each.stored.copy_(master)
    if keeps_remainder:
        optimizer.states_of(each)[REMAINDER].copy_(remainder_of(master, each.stored.detach().to(master.device)))
    return True


def _name_of_master(index: Index, param_name: str) -> str | None:
    """Return the name of a parameter's master in the checkpoint, or of the master's remainder; None if it has none."""
    names = [f"optimizer.{kind}.{param_name}" for kind in (MASTER, REMAINDER)]
    return next((name for name in names if name in index), None)


def _master(index: Index, name: str, parts: list[Part], shape: tuple[int, ...]) -> Tensor:
    """Return this rank's part of the master in tensor ``name``; a remainder is joined with its parameter."""
    value = index.assemble(name, parts, shape)
    _, kind, param_name = name.split(".", 2)
    if kind == MASTER:
        return value
    return join(index.assemble(f"model.{param_name}", parts, shape), value)


def _state_tensor(index: Index, key: str, name: str, each: StoredParameter, group: Mapping[str, Any]) -> Tensor:
    """Return one state of one parameter: this rank's shard, or a step counter."""
    full_name = f"optimizer.{key}.{name}"
    shape = index.shape(full_name)
    # A state in the parameter's shape is sharded like the parameter; all others are equal on all
    # ranks.
    if shape == full_shape(each.param):
        parts = parts_of(each.param, rank=each.rank, size=each.size)
        return index.assemble(full_name, parts, tuple(each.stored.shape)).to(each.stored.device)
    value = index.assemble(full_name, parts_of(torch.empty(shape, device="meta")), shape)
    # torch's optimizers count steps on the host, where reading the count does not wait for the
    # device. A fused kernel or a CUDA graph needs the step on the device.
    if value.dim() or group.get("fused") or group.get("capturable"):
        return value.to(each.stored.device)
    return value


def _require_all_used(index: Index, names: Iterable[str]) -> None:
    """Raise ``ValueError`` if the checkpoint has states of parameters that the optimizer does not
    train.
    """
    known = set(names)
    unused = [name for name in index.names("optimizer.") if name.partition(".")[2] not in known]
    if unused:
        raise ValueError(
            f"{index.directory} has {len(unused)} optimizer states of parameters that this optimizer does not train: "
            f"{unused[:_SHOWN]}: train the parameters of the run that wrote it"
        )
