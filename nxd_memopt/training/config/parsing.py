"""Reads a TrainConfig from YAML sections, NeMo's option names and command-line overrides."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nxd_memopt.architectures.published import spelled
from nxd_memopt.config import from_mapping
from nxd_memopt.options import declaration, default_of, field_types, fit, require_one_of
from nxd_memopt.training.config.command_line import override
from nxd_memopt.training.config.nemo.model import translate
from nxd_memopt.training.config.nemo.switches import knows, take_switches
from nxd_memopt.training.config.train_config import RECIPES, SECTIONS, DataConfig, TrainConfig
from nxd_memopt.training.config.yaml_file import read_yaml_file


def _other_names() -> dict[str, tuple[str, str]]:
    """Return the section and name of each option by the names that NeMo, Megatron and neuronx-distributed have."""
    names: dict[str, tuple[str, str]] = {}
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            # NeMo has the options of these three in its model section.
            if section in ("parallel", "memory", "moe"):
                names[field.name] = (section, field.name)
            for name in declaration(field).nemo:
                names[name] = (section, field.name)
    return names


ALIASES = _other_names()
"""Names that are accepted in any section -> section and name of the option."""

# NeMo's options for what is not supported, with the only accepted value. Micro-batches per step follow from
# data.global_batch_size.
NEUTRAL = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "accumulate_grad_batches": 1,
    "native_amp_growth_interval": 1000,
    "hysteresis": 2,
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
    # The one section that may be a word.
    auto_memory = options.get("memory") == "auto"
    if auto_memory:
        options["memory"] = {}
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
    built: dict[str, Any] = {name: _build(name, sections.get(name, {}), problems) for name in SECTIONS}
    if problems:
        raise ValueError(problems[0] if len(problems) == 1 else _listed(problems))
    return _unchecked(TrainConfig, {**built, "auto_memory": auto_memory})


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
    hints = field_types(SECTIONS[name])
    fitted = {}
    for key, value in values.items():
        if key in hints:
            with _collected(problems):
                fitted[key] = fit(f"{name}.{key}", value, hints[key])
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
        value = values[field.name] if field.name in values else default_of(field)
        object.__setattr__(instance, field.name, value)
    return instance


def _checked(config: TrainConfig) -> TrainConfig:
    """Return a validated copy: constructing the dataclasses again calls every ``__post_init__``."""
    sections = {}
    for name in SECTIONS:
        section = getattr(config, name)
        # A shell expands ~ on the command line; nothing has expanded it in a file.
        expanded: dict[str, Any] = {}
        for field in dataclasses.fields(section):
            path = getattr(section, field.name)
            if declaration(field).is_path and path is not None:
                expanded[field.name] = _expanded(f"{name}.{field.name}", path)
        if isinstance(section, DataConfig):
            expanded["mixture"] = {_expanded("data.mixture", path): weight for path, weight in section.mixture.items()}
        sections[name] = dataclasses.replace(section, **expanded)
    return TrainConfig(**sections, auto_memory=config.auto_memory)


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
    switches: dict[str, Any] = {}
    for section, options in values.items():
        if not isinstance(options, Mapping):
            problems.append(f"{section} must be a mapping of option names to values, got {type(options).__name__}")
            continue
        for name, value in options.items():
            if knows(name):
                switches[name] = value
                continue
            with _collected(problems):
                _resolve_alias(resolved, section, str(name), value)
    take_switches(resolved, switches, problems)
    return resolved


def _resolve_alias(resolved: dict[str, dict[str, Any]], section: str, name: str, value: Any) -> None:
    """Store option ``section.name`` in ``resolved`` under its own section and name."""
    fields = {field.name: field for field in dataclasses.fields(SECTIONS[section])}
    target, target_name = section, name
    # An option of the section itself takes precedence over an alias of the same name. Options of
    # unsupported dimensions are accepted and dropped if they have their neutral value.
    if name not in fields:
        if section == "trainer" and name in NEUTRAL_TRAINER:
            return
        if name in NEUTRAL:
            if value != NEUTRAL[name]:
                raise ValueError(f"{section}.{name} {value} is not supported: only {NEUTRAL[name]} is")
            return
        # A name that nobody knows stays in its section, where _build rejects it with a suggestion.
        target, target_name = ALIASES.get(name, (section, name))
        values = _translations(target, target_name).get(name)
        if values is not None:
            if value is None:  # not given
                return
            require_one_of(f"{section}.{name}", value, tuple(values))
            value = values[value]
    options = resolved.setdefault(target, {})
    # An alias and the name it stands for would otherwise overwrite each other in file order. Megatron has
    # two options for ZeRO-1, which agree.
    if target_name in options and options[target_name] != value:
        names = [target_name, *(alias for alias, known in ALIASES.items() if known == (target, target_name))]
        raise ValueError(
            f"{section}.{name} sets {target}.{target_name} a second time: remove one of "
            f"{', '.join(dict.fromkeys(names))}"
        )
    options[target_name] = value


def _translations(section: str, name: str) -> Mapping[str, Mapping[Any, Any] | None]:
    """Return the other names of an option, each with the option's values by its own if these differ."""
    for field in dataclasses.fields(SECTIONS[section]):
        if field.name == name:
            return declaration(field).nemo
    return {}
