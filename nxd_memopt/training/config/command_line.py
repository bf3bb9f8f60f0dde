"""Overrides a TrainConfig with options of the command line, which tyro parses."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.config.yaml_file import parse_yaml

_WORDS = {"true": True, "false": False, "null": None}
_FLAGS = {"true": "", "false": "no-"}


def override(base: TrainConfig, overrides: Sequence[str], program: str) -> TrainConfig:
    """Return ``base`` with the command-line options of ``overrides``, parsed by tyro.

    Raises:
        ValueError: an unknown option or an invalid value, in one line.
        SystemExit: with code 0 after ``--help``.
    """
    base, overrides = _add_config_overrides(base, overrides)
    overrides = as_tyro_reads(overrides)

    # tyro prints a framed message and exits with a status above 0 on an invalid option. The
    # message is captured and raised as a ValueError of one line, like the errors of the YAML
    # file.
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(TrainConfig, prog=program, args=overrides, default=base)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        raise ValueError(_message_of_box(shown.getvalue())) from None


def as_tyro_reads(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with ``--memory auto``, YAML's ``true``, ``false`` and ``null``, and lists in tyro's form.

    tyro has ``--SECTION.OPTION`` and ``--SECTION.no-OPTION`` for booleans; where an option has other
    values too, it has Python's words. Entries of a list are arguments of their own, not a text with commas.
    """
    types_of = _option_types()
    result: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, separator, value = argument.partition("=")
        hint = types_of.get(name.removeprefix("--").replace("-", "_")) if name.startswith("--") else None
        if not separator:
            value = remaining[0] if remaining else ""
        if hint is bool and value.lower() in _FLAGS:
            section, _, option = name.rpartition(".")
            converted = [f"{section}.{_FLAGS[value.lower()]}{option}"]
        elif value in _WORDS and type(_WORDS[value]) in typing.get_args(hint):
            converted = [name, str(_WORDS[value])]
        elif bool in typing.get_args(hint) and not separator and (not value or value.startswith("--")):
            result += [name, "True"]
            continue
        elif (name, value) == ("--memory", "auto"):
            converted = ["--auto-memory"]
        elif _is_list(hint) and name.replace("_", "-") != "--launch.neuron-cc-flags":
            # Flags of the compiler have commas of their own.
            values = [value] if separator else []
            while remaining and not remaining[0].startswith("--"):
                values.append(remaining.pop(0))
            result += [name, *(part.strip() for each in values for part in each.split(",") if part.strip())]
            continue
        else:
            result.append(argument)
            continue
        result.extend(converted)
        if not separator:
            remaining.pop(0)
    return result


def _is_list(hint: Any) -> bool:
    """Return whether an option of a type takes several values."""
    return tuple in (typing.get_origin(hint), *map(typing.get_origin, typing.get_args(hint)))


def _option_types() -> dict[str, Any]:
    """Return the type of each option, by ``SECTION.OPTION``."""
    return {
        f"{section}.{option}": hint
        for section, cls in typing.get_type_hints(TrainConfig).items()
        if dataclasses.is_dataclass(cls)
        for option, hint in typing.get_type_hints(cls).items()
    }


def _add_config_overrides(base: TrainConfig, arguments: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """Set entries of ``model.config_overrides`` in ``base``.

    tyro takes the keys and types of a mapping from the mapping's default: it cannot add an entry, and gives
    an entry of the file no value of another type, such as 1e6 for 10000.

    Returns:
        ``base`` with the values that ``arguments`` give, and the remaining arguments.
    """
    prefix = "--model.config-overrides."
    added: dict[str, Any] = {}
    for_tyro: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        # Both forms of an option are accepted: --name=value and --name value.
        name, separator, value = argument.removeprefix(prefix).partition("=")
        key = name.replace("-", "_")
        known = base.model.config_overrides
        has_value = bool(separator) or (bool(remaining) and not remaining[0].startswith("--"))
        # Flags without a value, lists and mappings are tyro's, as are keys of mappings (with a dot).
        is_tyros = isinstance(known.get(key), (list, tuple, Mapping)) or (not has_value and key in known)
        is_tyros = is_tyros or (key.startswith("no_") and key.removeprefix("no_") in known) or "." in key
        if not argument.startswith(prefix) or is_tyros:
            for_tyro.append(argument)
            continue
        if not separator:
            if not remaining:
                raise ValueError(f"{argument} has no value: write {argument} VALUE")
            value = remaining.pop(0)
        added[key] = parse_yaml(value)
    if not added:
        return base, for_tyro

    # The dataclasses are frozen and ``base`` is not validated yet, so fields are set directly
    # instead of with dataclasses.replace, which would call __post_init__.
    model = copy.copy(base.model)
    object.__setattr__(model, "config_overrides", base.model.config_overrides | added)
    changed = copy.copy(base)
    object.__setattr__(changed, "model", model)
    return changed, for_tyro


def _message_of_box(box: str) -> str:
    """Return the first paragraph and the first suggestion of tyro's framed message in one line."""
    # The first line is the upper border of the frame, with the title. Horizontal rules separate
    # paragraphs.
    lines = [line.strip("│|╭╮╰╯+ ") for line in box.strip().splitlines()[1:]]
    groups = re.split("[─-]{4,}", " ".join(lines))
    paragraphs = [" ".join(group.split()) for group in groups if group.strip()]
    suggestion = re.search(r"Perhaps you meant: (--\S+)", " ".join(paragraphs[1:]))
    # Errors of checks between sections have this prefix here, and none when they come from a YAML file.
    message = paragraphs[0].removeprefix("Error parsing TrainConfig: ")
    if suggestion is None:
        return message
    return f"{message}: did you mean {suggestion[1]}?"
