"""Continues a run of neuronx-distributed's samples with this library's models: weights and ZeRO-1 states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nxd_memopt.checkpoint.names import match_names
from nxd_memopt.checkpoint.nxd.architectures import build_rules
from nxd_memopt.checkpoint.nxd.converting import load_nxd, plain_config
from nxd_memopt.checkpoint.nxd.parts import KVOrder, Layout, Part, Rule
from nxd_memopt.checkpoint.nxd.reading import as_hugging_face, open_weights
from nxd_memopt.checkpoint.sharded.logical import name_of
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.optimizer.nxd_reading import OptimizerFiles, read_tensor_parallel_shard
from nxd_memopt.optimizer.sharding import flat_shard
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.rank_files import find_rank_files
from nxd_memopt.parallel_layers.resharding import local_slice
from nxd_memopt.parallel_layers.tensor_files import StoredTensor, read_stored, resolve
from nxd_memopt.trainer.rank_states import unwrap

GroupOf = Callable[[str], int]
"""Returns the index of the parameter group, by the parameter's name in neuronx-distributed's
model.
"""


def load_nxd_training_state(
    directory: str | Path,
    model: nn.Module,
    optimizer: Any,
    *,
    kv_order: KVOrder | None = None,
    query_key_value_stride: int = 1,
    accept_drift: bool = False,
    group_of: GroupOf | None = None,
) -> list[str]:
    """Load weights, optimizer states, steps and masters of a tag of neuronx-distributed.

    Every rank calls.

    The tag may have any T, D and number of stages. Its optimizer files number the parameters
    group by group, in the order of ``named_parameters()``. The groups are those of NxD's samples:
    a single one, or a second one for names with ``bias`` or ``norm``. The shapes in the files
    must agree.

    Args:
        directory: directory of the tag.
        model: ``LlamaForCausalLM`` or ``GPTNeoXForCausalLM`` of this library.
        optimizer: a ``NeuronZero1Optimizer`` of the parameters of ``model``, in any groups. It
            keeps its options.
        kv_order: see ``load_nxd``.
        query_key_value_stride: see ``load_nxd``.
        accept_drift: see ``load_nxd``; applies to the states too.
        group_of: maps names to groups, if the run had other parameter groups.

    Returns:
        A line for each entry that was not loaded, including the options of the groups in the
        files.

    Raises:
        ValueError: on every rank, if files are missing, damaged, or do not fit.
    """
    inner = unwrap(optimizer)
    path = Path(directory)
    layout_options: dict[str, Any] = {
        "kv_order": kv_order,
        "query_key_value_stride": query_key_value_stride,
        "accept_drift": accept_drift,
    }
    # The model first: the states are read by the layout of the same files, which this checks.
    report = load_nxd(model, path, **layout_options)
    with raise_together(f"loading {path}"):
        if not isinstance(inner, NeuronZero1Optimizer):
            raise ValueError(f"optimizer must be a NeuronZero1Optimizer, got {type(inner).__name__}")
        run = _open(path, model, layout_options, group_of)
        state = inner.state_dict()
        state.update(_read(run, inner, state["sharding"]))
        report += _describe_unused(run)
    # Not inside raise_together: loading all-gathers the parameters.
    inner.load_state_dict(state)
    return report


@dataclass(frozen=True)
class _Run:
    """The run that wrote the tag.

    Attributes:
        layout: layout of the shards.
        rules: rules by neuronx-distributed's names.
        locations: (stage, number in the optimizer files) by neuronx-distributed's names.
        source: the optimizer files.
        targets: Hugging Face names of the model's tensors, by id.
    """

    layout: Layout
    rules: dict[str, Rule]
    locations: dict[str, tuple[int, int]]
    source: OptimizerFiles
    targets: dict[int, str]


def _open(path: Path, model: nn.Module, layout_options: Mapping[str, Any], group_of: GroupOf | None) -> _Run:
    """Open the model and optimizer files of a tag, and find each parameter's number in the
    optimizer files.
    """
    config = plain_config(model)
    weights = open_weights(path, config, **layout_options)
    rules = {rule.name: rule for rule in build_rules(config, weights.layout, weights.form)}
    source = OptimizerFiles(find_rank_files(path / "optim", "optim"))
    # Three name spaces: Hugging Face names (model), NxD's names (files of the model), numbers
    # (files of the optimizer).
    full_tensors, _ = as_hugging_face(weights, config)
    targets = {id(param): name for name, param in match_names(model, full_tensors).items()}
    model_files = find_rank_files(path / "model")
    if model_files.tensor_model_parallel_size != source.files.tensor_model_parallel_size:
        raise ValueError(
            f"{path}: the model was written with {model_files.sizes()}, the optimizer with "
            f"{source.files.sizes()}: they are not of one save"
        )
    locations: dict[str, tuple[int, int]] = {}
    for stage in range(model_files.pipeline_model_parallel_size):
        # The state dict is in the order of ``named_parameters()``, like the numbers in the
        # optimizer files.
        names = [name for name in read_stored(model_files.file(0, stage)) if name in rules]
        shapes = {name: rules[name].local_shape(weights.layout) for name in names}
        for name, number in _number(source, stage, shapes, group_of).items():
            locations[name] = (stage, number)
    return _Run(weights.layout, rules, locations, source, targets)


def _number(
    source: OptimizerFiles, stage: int, shapes: Mapping[str, tuple[int, ...]], group_of: GroupOf | None
) -> dict[str, int]:
    """Return each parameter's number in the stage's optimizer files.

    ``shapes`` is in the order of the model.
    """
    content = source.content(0, stage)
    groups = [options["params"] for options in content["param_groups"]]
    # Group g of the files lists its parameters in the model's order: pair them, and check every
    # shape.
    if group_of is None:
        group_of = _weight_decay_group if len(groups) == 2 else lambda name: 0
    numbers: dict[str, int] = {}
    for group, saved in enumerate(groups):
        members = [name for name in shapes if group_of(name) == group]
        stored = [tuple(content.get("shape_info", {}).get(number, ())) for number in saved]
        if stored != [shapes[name] for name in members]:
            raise ValueError(
                f"{source.files.file(0, stage)}: group {group} of {len(groups)} has {len(saved)} parameters, of the "
                f"model's {len(members)} belong to it, or shapes differ: pass group_of, which says what the run grouped"
            )
        numbers |= dict(zip(members, saved, strict=True))
    return numbers


def _weight_decay_group(name: str) -> int:
    """Return the group in NxD's samples: 0 for matrices, 1 for biases and norms (no weight
    decay).
    """
    return int("bias" in name or "norm" in name)


def _read(run: _Run, optimizer: NeuronZero1Optimizer, sharding: Sequence[int]) -> dict[str, Any]:
    """Return the entries of ``NeuronZero1Optimizer.state_dict()`` that come from the files."""
    parts = {part.name: (rule, part) for rule in run.rules.values() for part in rule.parts}
    # ``NeuronZero1Optimizer.state_dict()`` numbers the trained parameters group by group.
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    for i, param in enumerate(params):
        # A fused parameter of NxD (gate_up_proj) has several of this model's parameters as parts;
        # all of them have its number.
        rule, part = parts[name_of(param, run.targets)]
        stage, number = run.locations[rule.name]
        values: dict[str, Any] = {}
        for name, value in run.source.values(number, 0, stage, 0).items():
            if isinstance(value, StoredTensor):
                value = resolve(value)
            # One value per element of the parameter: distributed over the files of the D ranks.
            # A tensor without dimensions or a number (the step) is equal in all files.
            if isinstance(value, Tensor) and value.dim() > 0:
                value = _shard(run, rule, part, (stage, number), name, param, sharding)
            values[name] = value
        if "master" in values:
            # ``read_tensor_parallel_shard`` returns masters like states; ``load_state_dict``
            # takes them separately.
            masters[i] = values.pop("master")
        if values:
            state[i] = values
    return {"state": state, "sharded_master_weights": masters}


def _shard(
    run: _Run, rule: Rule, part: Part, location: tuple[int, int], name: str, param: Tensor, sharding: Sequence[int]
) -> Tensor:
    """Return this rank's shard of one state: merged over the files' D and T, cut for this run's T
    and D.
    """
    # Flat shards over D -> shard of each of T ranks -> full Hugging Face tensor -> this rank's
    # slice -> flat shard of this rank.
    shape = rule.local_shape(run.layout)
    shards = []
    for rank in range(run.layout.size):
        shards.append(read_tensor_parallel_shard(run.source, location, rank, name, shape))
    full = rule.merge(part, shards, run.layout)
    return flat_shard(local_slice(full, param, dtype=full.dtype), *sharding)


def _describe_unused(run: _Run) -> list[str]:
    """Return a line for each unused state and for the options of each group in the files."""
    used = set(run.targets.values())
    report = [
        f"left out: states of {rule.name}: the model has no such parameter"
        for rule in run.rules.values()
        if rule.name in run.locations and not any(part.name in used for part in rule.parts)
    ]
    for i, options in enumerate(run.source.content(0)["param_groups"]):
        unused = {name: value for name, value in options.items() if name != "params"}
        report.append(f"left out: options of parameter group {i}: {unused}: the optimizer keeps its own")
    return report
