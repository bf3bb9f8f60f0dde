"""Reads a TrainConfig from YAML sections, NeMo's option names and command-line overrides."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nxd_memopt.architectures.published import spelled
from nxd_memopt.config import MemoryConfig, ParallelConfig, from_mapping, require_one_of
from nxd_memopt.training.config.command_line import override
from nxd_memopt.training.config.data_parallel import DataParallelConfig
from nxd_memopt.training.config.lora import LoraOptions
from nxd_memopt.training.config.moe import MoEOptions
from nxd_memopt.training.config.nemo.model import translate
from nxd_memopt.training.config.train_config import (
    RECIPES,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrainerConfig,
)
from nxd_memopt.training.config.yaml_file import read_yaml_file

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "memory": MemoryConfig,
    "data": DataConfig,
    "data_parallel": DataParallelConfig,
    "moe": MoEOptions,
    "lora": LoraOptions,
    "optimizer": OptimizerConfig,
    "trainer": TrainerConfig,
    "launch": LaunchConfig,
}

# NeMo's or Megatron's name, in any section -> (our section, our name). Options of ``parallel``, ``memory`` and
# ``moe`` are accepted in any section too, because NeMo has them in its model section.
ALIASES = {
    "sequence_parallel": ("parallel", "sequence_parallel_enabled"),
    "activations_checkpoint_granularity": ("memory", "recompute_granularity"),
    "activations_checkpoint_method": ("memory", "recompute_method"),
    "activations_checkpoint_num_layers": ("memory", "recompute_num_layers"),
    "encoder_seq_length": ("data", "seq_length"),
    "micro_batch_size": ("data", "micro_batch_size"),
    "global_batch_size": ("data", "global_batch_size"),
    "gradient_clip_val": ("optimizer", "clip_grad"),
    "do_layer_norm_weight_decay": ("optimizer", "do_layer_norm_weight_decay"),
    "native_amp_init_scale": ("optimizer", "initial_loss_scale"),
    "native_amp_growth_interval": ("optimizer", "loss_scale_window"),
    "hysteresis": ("optimizer", "hysteresis"),
    "precision": ("trainer", "precision"),
    "data_parallel_sharding_strategy": ("data_parallel", "sharding"),
    "num_distributed_optimizer_instances": ("data_parallel", "num_distributed_optimizer_instances"),
    "grad_reduce_in_fp32": ("data_parallel", "grad_reduce_in_fp32"),
    "use_distributed_optimizer": ("optimizer", "zero1"),
    "optimizer_cpu_offload": ("optimizer", "optimizer_cpu_offload"),
    "optimizer_offload_fraction": ("optimizer", "optimizer_offload_fraction"),
} | {
    field.name: (section, field.name)
    for section in ("parallel", "memory", "moe")
    for field in dataclasses.fields(SECTIONS[section])
}

# How a value of a type is written in YAML.
REMEDIES: dict[Any, str] = {
    int: "a whole number without quotes",
    float: "a number such as 1e-4",
    bool: "true or false without quotes",
    str: "a text, in quotes if it looks like a number",
    tuple: "a list in brackets, such as [a, b]",
    dict: "a mapping, such as {name: value}",
}

# Options that are paths, in which a leading ~ is the home directory.
PATHS = {
    "model": ("pretrained", "tokenizer", "warm_start"),
    "data": ("dataset", "validation_dataset", "chat_template"),
    "trainer": ("output_dir", "resume_from"),
}

# NeMo's options for what is not supported, with the only accepted value. Micro-batches per step follow from
# data.global_batch_size.
NEUTRAL = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "accumulate_grad_batches": 1,
}
# Options of NeMo's trainer that say how many processes run, which the launcher decides, or repeat what the program
# does anyway.
NEUTRAL_TRAINER = frozenset(
    [
        "devices",
        "num_nodes",
        "accelerator",
        "logger",
        "enable_checkpointing",
        "use_distributed_sampler",
        "replace_sampler_ddp",
        "limit_test_batches",
        "benchmark",
        "enable_model_summary",
        "num_sanity_val_steps",
    ]
)

# Section, option, and the option that replaces it: only one of the two may be given.
REPLACED = (("data", "dataset", "mixture"), ("trainer", "max_steps", "max_epochs"))
NOT_GIVEN: tuple[Any, ...] = (None, {}, -1)


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_config(arguments: Sequence[str], *, program: str = "nxd-memopt train") -> TrainConfig:
    """Return the configuration of a file or recipe, overridden by command-line options.

    Args:
        arguments: command-line arguments, without the program's name.
        program: program name shown by ``--help``.

    Raises:
        ValueError: for a missing or malformed file, an unknown recipe or key, or an invalid
            value.
        SystemExit: with code 0 after ``--help``.
    """
    # argparse takes --config and --recipe only. tyro parses everything else, --help included,
    # with the file's values as defaults.
    parser = _Parser(add_help=False, allow_abbrev=False)
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
    if overrides:
        base = override(base, overrides, program)
        _require_one_of_two(overrides, base)
    return _checked(base)


def recipe_path(name: str) -> Path:
    """Return the file of a recipe that is installed with the package, such as ``"llama3_8b"``, in any spelling.

    Raises:
        ValueError: the recipe does not exist; the message lists the existing recipes.
    """
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    found = spelled(name, names)
    if found is None:
        raise ValueError(f"there is no recipe {name!r}: the recipes are {', '.join(names)}; --config takes a file")
    return RECIPES / f"{found}.yaml"


def config_from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """Return the validated configuration of nested mappings, as a YAML parser returns them."""
    return _checked(_unchecked_config(values))


def read_yaml(path: Path) -> TrainConfig:
    """Read a configuration file. Only option names and types are checked here, not values."""
    values = read_yaml_file(path)
    try:
        return _unchecked_config(values)
    except ValueError as error:
        raise ValueError(f"configuration file {path}: {error}") from error


def _unchecked_config(values: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of ``values`` without validation of values.

    A section may lack a required option or contradict another section: command-line options are
    applied later, and the result is validated by ``_checked``.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"the configuration must be a mapping of sections such as trainer:, got {type(values).__name__}: write "
            "SECTION: and below it, indented, OPTION: VALUE"
        )
    problems: list[str] = []
    values = translate(values, problems)
    with _collected(problems):
        _require_known(TrainConfig, values, "the configuration")
    values = {name: section for name, section in values.items() if name in SECTIONS}
    # A section without options is None in YAML. Every section exists in the result, with
    # defaults.
    options = {name: {} if section is None else section for name, section in values.items()}
    # The one section that may be a word. Another place for the choice lets options of the section
    # that it does not choose stay, such as the attention's implementation.
    if options.get("memory") == "auto":
        if options.get("trainer", {}).get("auto_memory") is False:
            problems.append("memory: auto and trainer.auto_memory: false contradict each other: leave one out")
        options["memory"] = {}
        options["trainer"] = {**options.get("trainer", {}), "auto_memory": True}
    sections = _resolve_aliases(options, problems)
    for section, replaced, option in REPLACED:
        given = sections.get(section, {})
        if replaced not in given or given.get(option) in NOT_GIVEN:
            continue
        # Lightning's max_steps: -1 next to max_epochs.
        if given[replaced] in NOT_GIVEN:
            del given[replaced]
        else:
            problems.append(_both_given(section, replaced, option))
    built = {name: _build(name, sections.get(name, {}), problems) for name in SECTIONS}
    if problems:
        raise ValueError(problems[0] if len(problems) == 1 else _listed(problems))
    return _unchecked(TrainConfig, built)


def _require_one_of_two(overrides: Sequence[str], config: TrainConfig) -> None:
    """Raise ``ValueError`` for an option of the command line that another one replaces."""
    names = {argument.partition("=")[0].replace("-", "_").lstrip("_") for argument in overrides}
    for section, replaced, option in REPLACED:
        if f"{section}.{replaced}" in names and getattr(getattr(config, section), option) not in NOT_GIVEN:
            raise ValueError(_both_given(section, replaced, option))


def _both_given(section: str, replaced: str, option: str) -> str:
    return (
        f"{section}.{replaced} and {section}.{option} are both given, and the second replaces the first: leave one out"
    )


@contextlib.contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Append the message of a ``ValueError`` inside the block to ``problems``: all are reported together."""
    try:
        yield
    except ValueError as error:
        problems.append(str(error))


def _listed(problems: list[str]) -> str:
    """Return several problems in one line."""
    return f"{len(problems)} problems: " + "; ".join(f"({i}) {text}" for i, text in enumerate(problems, start=1))


def _build(name: str, values: Mapping[str, Any], problems: list[str]) -> Any:
    """Return the unvalidated dataclass of section ``name``, with values of the fields' types."""
    with _collected(problems):
        _require_known(SECTIONS[name], values, name)
    hints = typing.get_type_hints(SECTIONS[name])
    fitted = {}
    for key, value in values.items():
        if key in hints:
            with _collected(problems):
                fitted[key] = _fit(value, hints[key], f"{name}.{key}")
    return _unchecked(SECTIONS[name], fitted)


def _require_known(cls: type, values: Mapping[str, Any], section: str) -> None:
    """Raise ``ValueError`` for the keys of ``values`` that are not fields of the dataclass ``cls``."""
    # from_mapping has the error message. It constructs its class, so it gets a class with the
    # same fields, no __post_init__ and a default for every field.
    fields = [(field.name, Any, None) for field in dataclasses.fields(cls)]
    plain = dataclasses.make_dataclass(cls.__name__, fields)
    found: list[str] = []
    for key in values:
        with _collected(found):
            from_mapping(plain, {key: values[key]}, section=section)
    if len(found) > 1:
        # The list of all names, once.
        found = [text.partition(": known are ")[0] for text in found]
        found.append(f"known in {section} are {[field.name for field in dataclasses.fields(cls)]}")
    if found:
        raise ValueError("; ".join(found))


def _unchecked(cls: type, values: Mapping[str, Any]) -> Any:
    """Return an instance of the dataclass ``cls`` without a call of ``__post_init__``."""
    instance = object.__new__(cls)
    for field in dataclasses.fields(cls):
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING and field.name not in values:
            default = field.default_factory()
        object.__setattr__(instance, field.name, values.get(field.name, default))
    return instance


def _checked(config: TrainConfig) -> TrainConfig:
    """Return a validated copy: constructing the dataclasses again calls every ``__post_init__``."""
    sections = {}
    for name in SECTIONS:
        section = getattr(config, name)
        # A shell expands ~ on the command line; nothing has expanded it in a file.
        paths = {option: getattr(section, option) for option in PATHS.get(name, ())}
        expanded: dict[str, Any] = {
            option: _expanded(f"{name}.{option}", path) for option, path in paths.items() if path is not None
        }
        if isinstance(section, DataConfig):
            expanded["mixture"] = {_expanded("data.mixture", path): weight for path, weight in section.mixture.items()}
        sections[name] = dataclasses.replace(section, **expanded)
    return TrainConfig(**sections)


def _expanded(option: str, path: str) -> str:
    """Return ``path`` with the home directory for a leading ``~``.

    Raises:
        ValueError: the home directory is unknown, or the path has an environment variable.
    """
    # It would name a directory "$HOME" in the working directory.
    if re.search(r"\$\{?[A-Za-z_]", path):
        raise ValueError(f"{option} {path!r} has an environment variable, which is not replaced: write its value")
    if not path.startswith("~"):
        return path
    # Path() would also normalize other names, such as patterns and names on the hub.
    try:
        return str(Path(path).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{option} {path!r} names the home directory of an unknown user: write the path") from error


def _resolve_aliases(values: Mapping[str, Any], problems: list[str]) -> dict[str, dict[str, Any]]:
    """Return ``values`` with every option moved to its own section and renamed to its own name."""
    resolved: dict[str, dict[str, Any]] = {}
    for section, options in values.items():
        if not isinstance(options, Mapping):
            problems.append(f"{section} must be a mapping of option names to values, got {type(options).__name__}")
            continue
        for name, value in options.items():
            with _collected(problems):
                _resolve_alias(resolved, section, str(name), value)
    return resolved


def _resolve_alias(resolved: dict[str, dict[str, Any]], section: str, name: str, value: Any) -> None:
    """Store option ``section.name`` in ``resolved`` under its own section and name."""
    # An option of the section itself takes precedence over an alias of the same name. Options of
    # unsupported dimensions are accepted and dropped if they have their neutral value.
    is_own = name in {field.name for field in dataclasses.fields(SECTIONS[section])}
    if not is_own and section == "trainer" and name in NEUTRAL_TRAINER:
        return
    if not is_own and name in NEUTRAL and name not in ALIASES:
        if value != NEUTRAL[name]:
            raise ValueError(f"{section}.{name} {value} is not supported: only {NEUTRAL[name]} is")
        return
    # A name that nobody knows stays in its section, where _build rejects it with a suggestion.
    target, target_name = section, name
    if not is_own:
        target, target_name = ALIASES.get(name, (section, name))
    options = resolved.setdefault(target, {})
    # An alias and the name it stands for would otherwise overwrite each other in file order.
    if target_name in options:
        names = [target_name, *(alias for alias, known in ALIASES.items() if known == (target, target_name))]
        raise ValueError(
            f"{section}.{name} sets {target}.{target_name} a second time: remove one of "
            f"{', '.join(dict.fromkeys(names))}"
        )
    options[target_name] = value


def _fit(value: Any, hint: Any, name: str) -> Any:
    """Return ``value`` converted to the type ``hint``.

    YAML 1.1 reads ``1e-4`` as a string, because it has no decimal point, and tuples as lists.
    """
    # For a union the first type that fits is taken, in the order in which the union lists them.
    alternatives = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        alternatives = list(typing.get_args(hint))
    kinds = [typing.get_origin(alternative) or alternative for alternative in alternatives]
    # Of other unions the dataclasses check the words. tyro, which reads the command line before, has an error without
    # the option's name for a default that is none of these.
    is_null = value is None and types.NoneType in kinds
    if set(kinds) <= {typing.Literal, types.NoneType} and not is_null:
        require_one_of(name, value, tuple(choice for each in alternatives for choice in typing.get_args(each)))
    for alternative in alternatives:
        with contextlib.suppress(TypeError):
            return _fit_one(value, alternative, name)
    remedies = [REMEDIES[kind] for kind in kinds if kind in REMEDIES]
    remedy = f": write {' or '.join(remedies)}" if remedies else ""
    raise ValueError(f"{name} must be {_type_name(hint)}, got {value!r} of type {type(value).__name__}{remedy}")


def _fit_one(value: Any, hint: Any, name: str) -> Any:
    """Return ``value`` converted to ``hint``, or raise ``TypeError``. ``hint`` is not a union."""
    origin = typing.get_origin(hint) or hint
    if origin is typing.Literal:
        return value
    # bool is a subclass of int: True for a float is an error, not 1.0.
    if origin is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_fit(item, typing.get_args(hint)[0], name) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return dict(value)
    # Exact types: an int option does not take True, and a str option does not take 3.
    if origin in (str, int, bool, types.NoneType) and type(value) is origin:
        return value
    raise TypeError


def _type_name(hint: Any) -> str:
    """Return a type hint as an error message shows it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(each) for each in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    if isinstance(hint, type):
        return "null" if hint is types.NoneType else hint.__name__
    return str(hint).replace("typing.", "")
