"""The YAML of a planned setting: what the plan chooses, and what it keeps of the run that it was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_memopt.command_line import Run, has_tokenizer
from nxd_memopt.files import require_new, write_text
from nxd_memopt.planner.hardware import GIB
from nxd_memopt.planner.search.plan import Plan, shards_sequences
from nxd_memopt.planner.search.problem import Problem, Setting
from nxd_memopt.training.config.train_config import SECTIONS, MemoryConfig, ModelConfig, OptimizerConfig, TrainConfig

_STAGES = (
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
)
_CHOSEN = {
    "optimizer": (
        "optimizer_offload_fraction",
        "optimizer_staging_gib",
        "optimizer_update_in_forward",
        "store_param_remainders",
    ),
    "parallel": (
        "tensor_model_parallel_size",
        "sequence_parallel_enabled",
        "expert_model_parallel_size",
        *_STAGES,
    ),
    "memory": tuple(option.name for option in dataclasses.fields(MemoryConfig)),
    "trainer": ("enable_cuda_graph", "precision"),
}
"""Section -> options that the plan chooses: they are written if the chosen setting has them."""
_NO_MODEL = "none"


def write_yaml(path: Path, problem: Problem, plan: Plan, content: Mapping[str, Any]) -> list[str]:
    """Write a setting as a configuration of the training program; return what is to be changed in it, if anything.

    Args:
        path: file that does not exist yet.
        problem: what the setting was chosen for.
        plan: the setting.
        content: ``configuration`` of the setting.

    Raises:
        ValueError: the file exists.
    """
    import yaml

    require_new("--write", path)
    lines = [
        f"# Chosen by nxd-memopt plan for {problem.devices} x {problem.device.name}:",
        f"# {plan.setting.describe()}; {plan.memory.device_bytes / GIB:.1f} GiB, {plan.tokens_per_s:,.0f} tokens/s.",
    ]
    # What the file leaves to the user. It is written into the file too, where it is read later.
    notes: list[str] = []
    if not problem.isolate_documents:
        notes.append("documents of a row attend to each other, as planned; isolate_documents: true separates them")
    missing = missing_options(content)
    if missing:
        notes.append(f"training needs {' and '.join(map(' '.join, missing))}, or the same in this file")
    lines += [f"# {note[0].upper()}{note[1:]}." for note in notes]
    write_text(path, "\n".join([*lines, yaml.safe_dump(dict(content), sort_keys=False)]))
    return notes


def configuration(problem: Problem, setting: Setting, run: Run) -> dict[str, Any]:
    """Return the sections of a configuration of the training program.

    Args:
        problem: what the setting was chosen for.
        setting: the chosen setting.
        run: the run, of which the plan keeps all options that it does not choose.
    """
    # Three sources, the later ones for what the earlier ones leave open: the setting, the run that
    # was asked for, and the training program's defaults, which are not written.
    content = _chosen(problem, setting)
    # Compared after the sections have replaced "auto" values, as those of the run have.
    defaults = TrainConfig(ModelConfig(pretrained=_NO_MODEL))
    given: dict[str, dict[str, Any]] = {}
    for name in SECTIONS:
        given[name] = _given(getattr(run.config, name), getattr(defaults, name))
    given["model"] = _model(run, given["model"])
    given["moe"] |= _static_form(problem)
    # Options that the search chooses are dropped from the run's: a chosen default would otherwise
    # leave the run's own value in the file.
    for name, section in given.items():
        kept = {option: value for option, value in section.items() if option not in _CHOSEN.get(name, ())}
        if kept:
            content[name] = kept | content.get(name, {})
    return content


def require_trainable(content: Mapping[str, Any], problem: Problem, setting: Setting, run: Run) -> None:
    """Raise ``ValueError`` if the training program would refuse a configuration.

    Args:
        content: ``configuration`` of the setting.
        problem: what the setting was chosen for.
        setting: the setting.
        run: the run.
    """
    from nxd_memopt.training.config.parsing import config_from_mapping

    # The program's own parser and its checks: the planner has no second set of rules.
    model = content["model"]
    # The user adds it to the written file.
    if not {"pretrained", "tokenizer"} & set(model):
        model = {**model, "tokenizer": "DIRECTORY"}
    try:
        config = config_from_mapping({**content, "model": model})
        config.accumulation_steps(problem.devices)
        config.require_expert_ranks(problem.devices)
    except ValueError as error:
        raise ValueError(f"{run.name}, with {setting.describe()}: {error}") from error


def missing_options(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the options that training needs beyond the written sections, with a placeholder for each value."""
    missing: list[tuple[str, str]] = []
    # A directory of weights may have a tokenizer.
    if not {"pretrained", "tokenizer"} & set(content["model"]):
        missing.append(("--model.tokenizer", "DIRECTORY"))
    if not {"dataset", "mixture"} & set(content["data"]):
        missing.append(("--data.dataset", "DATA"))
    return missing


def _chosen(problem: Problem, setting: Setting) -> dict[str, Any]:
    """Return the sections with what was chosen and planned."""
    # Options with the training program's default are left out, so that the file shows what was chosen.
    size = setting.tensor_model_parallel_size
    replicas = problem.devices // setting.ranks_of_replica
    parallel: dict[str, Any] = {
        "tensor_model_parallel_size": size,
        "sequence_parallel_enabled": shards_sequences(problem, setting),
    }
    if setting.expert_model_parallel_size > 1:
        parallel["expert_model_parallel_size"] = setting.expert_model_parallel_size
    for name in _STAGES:
        value = getattr(setting, name)
        if value not in (1, None):
            parallel[name] = _plain(value)
    data_parallel: dict[str, Any] = {"sharding": setting.sharding}
    if not setting.grad_reduce_in_fp32:
        data_parallel["grad_reduce_in_fp32"] = False
    content: dict[str, Any] = {
        "model": {},
        "parallel": parallel,
        "memory": _given(setting.memory, MemoryConfig()),
        "data": {
            "seq_length": problem.sequence_length,
            "micro_batch_size": setting.micro_batch_size,
            "global_batch_size": problem.global_batch_size or setting.micro_batch_size * replicas,
            "isolate_documents": problem.isolate_documents,
        },
        "optimizer": _offload(setting),
        "trainer": {"precision": problem.precision},
        "data_parallel": data_parallel,
    }
    if problem.device.kind == "cuda":
        content["trainer"]["enable_cuda_graph"] = setting.cuda_graph
    return content


def _offload(setting: Setting) -> dict[str, Any]:
    """Return the options of optimizer states in host memory; none if they are on the device."""
    if not setting.optimizer_offload_fraction:
        return {}
    values = {name: getattr(setting, name) for name in _CHOSEN["optimizer"]}
    return {name: value for name, value in values.items() if value != getattr(OptimizerConfig, name)}


def _model(run: Run, given: dict[str, Any]) -> dict[str, Any]:
    """Return the ``model`` section to write."""
    # The placeholder of a run that names no tokenizer must not get into the file.
    if not has_tokenizer(run.config):
        given.pop("tokenizer")
    if given["pretrained"] is None:
        given.pop("pretrained")
    if not run.is_bare:
        return given
    pretrained = Path(given.pop("pretrained"))
    # A directory may have weights and tokenizer too, which the training program then uses.
    if pretrained.is_dir():
        return {"pretrained": str(pretrained.resolve()), **given}
    return {**given, "config_overrides": run.file_config()}


def _static_form(problem: Problem) -> dict[str, Any]:
    """Return the options of the static form of experts, which is planned for Trainium."""
    # Blocks of GPUs are the run's own choice, and among its options already.
    moe = problem.moe
    if moe is None or moe.moe_expert_block_size is None:
        return {}
    return {name: getattr(moe, name) for name in ("moe_expert_block_size", "moe_token_dispatcher_type")}


def _given(section: Any, default: Any) -> dict[str, Any]:
    """Return the options of a section that are not the default's, as values of YAML."""
    values = {option.name: getattr(section, option.name) for option in dataclasses.fields(section)}
    return {name: _plain(value) for name, value in values.items() if value != getattr(default, name)}


def _plain(value: Any) -> Any:
    """Return ``value`` with lists, dicts and texts in place of tuples, dataclasses and paths."""
    # A safe loader reads plain types alone. Of a tuple or a path, yaml would write a tag of Python.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
