"""Reads a TrainConfig from YAML sections, NeMo's option names and command-line overrides."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_memopt.architectures.published import spelled
from nxd_memopt.options import collected, declaration, field_types, fit, listed, nearest, require_one_of
from nxd_memopt.training.config.command_line import read_overrides
from nxd_memopt.training.config.help import options_help
from nxd_memopt.training.config.nemo.model import translate
from nxd_memopt.training.config.nemo.switches import knows, take_switches
from nxd_memopt.training.config.other_tools import meant
from nxd_memopt.training.config.train_config import RECIPES, SECTIONS, TrainConfig
from nxd_memopt.training.config.yaml_file import read_yaml_file


@dataclass(frozen=True)
class Alias:
    """Option that a name of NeMo, Megatron or neuronx-distributed stands for, in any section.

    Args:
        section: section of the option here.
        option: name of the option here.
        values: values of the option by the values of the other name; None for equal values.
    """

    section: str
    option: str
    values: Mapping[Any, Any] | None = None


def _aliases() -> dict[str, Alias]:
    """Return all aliases by name."""
    names: dict[str, Alias] = {}
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            # NeMo has the options of these three in its model section.
            if section in ("parallel", "memory", "moe"):
                names[field.name] = Alias(section, field.name)
            for name, values in declaration(field).nemo.items():
                names[name] = Alias(section, field.name, values)
    return names


ALIASES = _aliases()

# NeMo's options for what is not supported, with the only accepted value. Micro-batches per step follow from
# data.global_batch_size.
NEUTRAL = {
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
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--recipe")
    parser.add_argument("-h", "--help", action="store_true")
    try:
        known, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"{str(error).removeprefix('argument ')}: write --config FILE or --recipe NAME") from error
    if known.help:
        print(options_help(program))
        raise SystemExit(0)
    if known.config is not None and known.recipe is not None:
        raise ValueError(f"--config {known.config} and --recipe {known.recipe} both name a configuration: pass one")
    sections: dict[str, Any] = {}
    if known.recipe is not None:
        sections = read_yaml(recipe_path(known.recipe))
    elif known.config is not None:
        sections = read_yaml(Path(known.config))
    return _built(_overridden(sections, read_overrides(overrides)))


def recipe_path(name: str) -> Path:
    """Return the file of a recipe that is installed with the package, such as ``"llama3_8b"``, in any spelling.

    Raises:
        ValueError: the recipe does not exist; the message lists the existing recipes.
    """
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    found = spelled(name, names)
    if found is None:
        hint = nearest(name, names)
        raise ValueError(
            f"there is no recipe {name!r}: the recipes are {', '.join(names)}; --config takes a file{hint}"
        )
    return RECIPES / f"{found}.yaml"


def config_from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """Return the validated configuration of nested mappings, as a YAML parser returns them."""
    return _built(read_sections(values))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return ``read_sections`` of a configuration file; errors name the file."""
    values = read_yaml_file(path)
    try:
        return read_sections(values)
    except ValueError as error:
        raise ValueError(f"configuration file {path}: {error}") from error


def read_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``values`` by section, with this library's names and types.

    Ranges and combinations are checked later: command-line options are applied before. ``memory: auto`` is
    ``auto_memory``, next to the sections.

    Raises:
        ValueError: names or types are wrong; all of them are in the message.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"the configuration must be a mapping of sections such as trainer:, got {type(values).__name__}: write "
            "SECTION: and below it, indented, OPTION: VALUE"
        )
    problems: list[str] = []
    values = translate(values, problems)
    _check_names(values, SECTIONS, "the configuration", problems)
    # A section without options is None in YAML.
    given = {name: section for name, section in values.items() if name in SECTIONS and section is not None}
    is_auto = given.get("memory") == "auto"
    if is_auto:
        del given["memory"]
    sections = _resolve_aliases(given, problems)
    for name, options in sections.items():
        types = field_types(SECTIONS[name])
        _check_names(options, types, name, problems)
        for option, value in options.items():
            with collected(problems):
                options[option] = fit(f"{name}.{option}", value, types.get(option, Any))
    with collected(problems):
        _require_one_of_two(sections, sections)
    if problems:
        raise ValueError(listed(problems))
    return sections | {"auto_memory": is_auto}


def _check_names(values: Mapping[str, Any], known: Collection[str], section: str, problems: list[str]) -> None:
    """Add a text to ``problems`` for the names of ``values`` that are not ``known``."""
    unknown = [name for name in values if name not in known]
    remedies = [meant(str(name), tuple(known)) for name in unknown]
    for name, remedy in zip(unknown, remedies, strict=True):
        problems.append(f"unknown key {name!r} in {section}{remedy}")
    # The list of all names, once.
    if "" in remedies:
        problems[-1] += f": known in {section} are {list(known)}"


def _overridden(sections: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return ``sections`` with the values of ``overrides``, which win; entries of a mapping are replaced one by one."""
    result = sections | overrides
    for name in SECTIONS.keys() & overrides.keys():
        before = sections.get(name, {})
        result[name] = before | overrides[name]
        for option, value in overrides[name].items():
            if isinstance(value, dict):
                result[name][option] = before.get(option, {}) | value
    _require_one_of_two(overrides, result)
    return result


def _require_one_of_two(given: Mapping[str, Any], sections: dict[str, Any]) -> None:
    """Raise ``ValueError`` for an option of ``given`` that another one of ``sections`` replaces."""
    for section, replaced, option in REPLACED:
        options = sections.get(section, {})
        if replaced not in given.get(section, {}) or options.get(option) in NOT_GIVEN:
            continue
        # Lightning's max_steps: -1 next to max_epochs.
        if options[replaced] in NOT_GIVEN:
            del options[replaced]
            continue
        raise ValueError(
            f"{section}.{replaced} and {section}.{option} are both given, and the second replaces the first: leave "
            "one out"
        )


def _built(sections: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of ``read_sections``; every dataclass checks its values when it is made."""
    problems: list[str] = []
    built: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        with collected(problems):
            built[name] = cls(**sections.get(name, {}))
    if problems:
        raise ValueError(listed(problems))
    return TrainConfig(**built, auto_memory=sections.get("auto_memory", False))


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
            with collected(problems):
                _resolve_alias(resolved, section, str(name), value)
    take_switches(resolved, switches, problems)
    return resolved


def _resolve_alias(resolved: dict[str, dict[str, Any]], section: str, name: str, value: Any) -> None:
    """Store option ``section.name`` in ``resolved`` under its own section and name."""
    # An option of the section itself takes precedence over an alias of the same name. A name that nobody
    # knows stays in its section, where read_sections rejects it with a suggestion.
    alias = Alias(section, name)
    if name not in field_types(SECTIONS[section]):
        if section == "trainer" and name in NEUTRAL_TRAINER:
            return
        # Options of unsupported dimensions are accepted and dropped if they have their neutral value.
        if name in NEUTRAL:
            if value != NEUTRAL[name]:
                raise ValueError(f"{section}.{name} {value} is not supported: only {NEUTRAL[name]} is")
            return
        alias = ALIASES.get(name, alias)
    if alias.values is not None:
        if value is None:  # not given
            return
        require_one_of(f"{section}.{name}", value, tuple(alias.values))
        value = alias.values[value]
    options = resolved.setdefault(alias.section, {})
    # An alias and the name it stands for would otherwise overwrite each other in file order. Megatron has
    # two options for ZeRO-1, which agree.
    if alias.option in options and options[alias.option] != value:
        raise ValueError(
            f"{section}.{name} sets {alias.section}.{alias.option} a second time, to {value!r} after "
            f"{options[alias.option]!r}: remove one of the two"
        )
    options[alias.option] = value
