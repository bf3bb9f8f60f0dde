"""Reads a TrainConfig from YAML sections, NeMo's option names and command-line overrides."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
import yaml

from nxd_memopt.config import MemoryConfig, ParallelConfig, from_mapping
from nxd_memopt.training.config import (
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrainerConfig,
)

RECIPES = Path(__file__).parent / "recipes"

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "memory": MemoryConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "trainer": TrainerConfig,
    "launch": LaunchConfig,
}

ALIASES = {  # NeMo's name, in whatever section it stands: (our section, our name)
    "sequence_parallel": ("parallel", "sequence_parallel_enabled"),
    "activations_checkpoint_granularity": ("memory", "recompute_granularity"),
    "activations_checkpoint_method": ("memory", "recompute_method"),
    "activations_checkpoint_num_layers": ("memory", "recompute_num_layers"),
    "encoder_seq_length": ("data", "seq_length"),
    "micro_batch_size": ("data", "micro_batch_size"),
    "global_batch_size": ("data", "global_batch_size"),
    "gradient_clip_val": ("optimizer", "clip_grad"),
} | {
    field.name: (section, field.name)
    for section in ("parallel", "memory")
    for field in dataclasses.fields(SECTIONS[section])
}

NEUTRAL = {  # NeMo's options for dimensions that are not split here: accepted at the value that changes nothing
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
}


def parse_config(arguments: Sequence[str], *, program: str = "nxd-memopt train") -> TrainConfig:
    """Return the configuration of ``--config FILE`` or ``--recipe NAME``, overridden by the other arguments.

    Args:
        program: the name that ``--help`` shows.

    Raises:
        ValueError: for a missing or malformed file, an unknown recipe or key, or a value that does not fit.
        SystemExit: with code 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--recipe")
    known, overrides = parser.parse_known_args(arguments)
    if known.config is not None and known.recipe is not None:
        raise ValueError(f"--config {known.config} and --recipe {known.recipe} both name a configuration: pass one")
    if known.recipe is not None:
        base = read_yaml(recipe_path(known.recipe))
    elif known.config is not None:
        base = read_yaml(Path(known.config))
    else:
        base = _unchecked_config({})
    return _checked(_override(base, overrides, program) if overrides else base)


def recipe_path(name: str) -> Path:
    """Return the file of a recipe that is installed with the package, such as ``"llama3_8b"``.

    Raises:
        ValueError: there is no such recipe; names those that there are.
    """
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if name not in names:
        raise ValueError(f"there is no recipe {name!r}: the recipes are {', '.join(names)}; --config takes a file")
    return RECIPES / f"{name}.yaml"


def config_from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """Build the configuration from nested mappings, as YAML gives them."""
    return _checked(_unchecked_config(values))


def _override(base: TrainConfig, overrides: Sequence[str], program: str) -> TrainConfig:
    base, overrides = _add_config_overrides(base, overrides)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(TrainConfig, prog=program, args=overrides, default=base)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        raise ValueError(_message_of_box(shown.getvalue())) from None


def _add_config_overrides(base: TrainConfig, arguments: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """Return ``base`` with entries of ``model.config_overrides`` that only ``arguments`` name, and the other arguments.

    tyro knows the entries of a mapping from its default alone, so it can change those that the file has and no others.
    """
    prefix = "--model.config-overrides."
    added: dict[str, Any] = {}
    others: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, separator, value = argument.removeprefix(prefix).partition("=")
        key = name.replace("-", "_")
        if not argument.startswith(prefix) or key.removeprefix("no_") in base.model.config_overrides or "." in key:
            others.append(argument)
            continue
        if not separator:
            if not remaining:
                raise ValueError(f"{argument} has no value: write {argument} VALUE")
            value = remaining.pop(0)
        added[key] = yaml.safe_load(value)
    if not added:
        return base, others
    model = copy.copy(base.model)
    object.__setattr__(model, "config_overrides", base.model.config_overrides | added)  # not validated yet, as ``base``
    changed = copy.copy(base)
    object.__setattr__(changed, "model", model)
    return changed, others


def _message_of_box(box: str) -> str:
    """The first paragraph of a framed message of tyro's, and its first suggestion, in one line."""
    lines = [line.strip("│|╭╮╰╯+ ") for line in box.strip().splitlines()[1:]]  # the first is the frame with a title
    paragraphs = [" ".join(group.split()) for group in re.split("[─-]{4,}", " ".join(lines)) if group.strip()]
    suggestion = re.search(r"Perhaps you meant: (--\S+)", " ".join(paragraphs[1:]))
    return paragraphs[0] + (f": did you mean {suggestion[1]}?" if suggestion else "")


def read_yaml(path: Path) -> TrainConfig:
    """Read a configuration file; nothing is checked yet but names and types."""
    if not path.is_file():
        raise ValueError(f"configuration file {path} does not exist: pass --config with an existing YAML file")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    return _unchecked_config({} if values is None else values)


def _unchecked_config(values: Mapping[str, Any]) -> TrainConfig:
    """Values as they stand: what one section lacks, or contradicts, the command line may still set."""
    if not isinstance(values, Mapping):
        raise ValueError(f"the configuration must be a mapping of sections, got {type(values).__name__}")
    _require_known(TrainConfig, values, "the configuration")
    sections = _resolve_aliases({name: {} if options is None else options for name, options in values.items()})
    return _unchecked(TrainConfig, {name: _build(name, sections.get(name, {})) for name in SECTIONS})


def _build(name: str, values: Mapping[str, Any]) -> Any:
    _require_known(SECTIONS[name], values, name)
    hints = typing.get_type_hints(SECTIONS[name])
    return _unchecked(SECTIONS[name], {key: _fit(value, hints[key], f"{name}.{key}") for key, value in values.items()})


def _require_known(cls: type, values: Mapping[str, Any], section: str) -> None:
    plain = dataclasses.make_dataclass(cls.__name__, [(field.name, Any, None) for field in dataclasses.fields(cls)])
    from_mapping(plain, values, section=section)


def _unchecked(cls: type, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass ``cls`` that has not validated itself."""
    instance = object.__new__(cls)
    for field in dataclasses.fields(cls):
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING and field.name not in values:
            default = field.default_factory()
        object.__setattr__(instance, field.name, values.get(field.name, default))
    return instance


def _checked(config: TrainConfig) -> TrainConfig:
    return TrainConfig(**{name: dataclasses.replace(getattr(config, name)) for name in SECTIONS})


def _resolve_aliases(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Move every option that stands under another name or in another section to where it belongs."""
    moved: dict[str, dict[str, Any]] = {}
    for section, options in values.items():
        if not isinstance(options, Mapping):
            raise ValueError(f"{section} must be a mapping of option names to values, got {type(options).__name__}")
        for name, value in options.items():
            _place(moved, section, str(name), value)
    return moved


def _place(moved: dict[str, dict[str, Any]], section: str, name: str, value: Any) -> None:
    is_own = name in {field.name for field in dataclasses.fields(SECTIONS[section])}
    if not is_own and name in NEUTRAL and name not in ALIASES:
        if value != NEUTRAL[name]:
            raise ValueError(f"{section}.{name} {value} is not supported: only {NEUTRAL[name]} is")
        return
    target, target_name = (section, name) if is_own else ALIASES.get(name, (section, name))
    options = moved.setdefault(target, {})
    if target_name in options:
        raise ValueError(f"{section}.{name} sets {target}.{target_name} a second time: remove one of the two")
    options[target_name] = value


def _fit(value: Any, hint: Any, name: str) -> Any:
    """Return ``value`` as the type that ``hint`` asks for; YAML reads ``1e-4`` as a string and tuples as lists."""
    alternatives = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        alternatives = list(typing.get_args(hint))
    for alternative in alternatives:
        with contextlib.suppress(TypeError):
            return _fit_one(value, alternative, name)
    raise ValueError(f"{name} must be {_type_name(hint)}, got {value!r} of type {type(value).__name__}")


def _fit_one(value: Any, hint: Any, name: str) -> Any:
    origin = typing.get_origin(hint) or hint
    if origin is typing.Literal:  # the dataclass names the allowed values
        return value
    if origin is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_fit(item, typing.get_args(hint)[0], name) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return dict(value)
    if origin in (str, int, bool, types.NoneType) and type(value) is origin:
        return value
    raise TypeError


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
