"""Reads the options of the command line: ``--SECTION.OPTION VALUE``, with values as YAML has them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

from nxd_memopt.options import alternatives, collected, field_types, fit, listed
from nxd_memopt.training.config.other_tools import meant
from nxd_memopt.training.config.train_config import SECTIONS
from nxd_memopt.training.config.yaml_file import parse_yaml


def read_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options that ``arguments`` set, by section, and ``auto_memory``.

    Raises:
        ValueError: an option is unknown, or a value is not of the option's type.
    """
    given: dict[str, Any] = {}
    problems: list[str] = []
    remaining = list(arguments)
    while remaining:
        name, separator, text = remaining.pop(0).partition("=")
        words = []
        if separator:
            words.append(text)
        # The entries of a list are words of their own.
        while not separator and remaining and not remaining[0].startswith("--"):
            words.append(remaining.pop(0))
        with collected(problems):
            _read_override(name, words, given)
    if problems:
        raise ValueError(listed(problems))
    return given


def _read_override(name: str, words: list[str], given: dict[str, Any]) -> None:
    """Add the option of ``name``, with the value of ``words``, to ``given``."""
    if name == "--memory" and words == ["auto"]:
        given["auto_memory"] = True
        return
    section, option, key = _option_named(name)
    if option.startswith("no_") and option not in field_types(SECTIONS[section]):
        option, words = option.removeprefix("no_"), ["false"]
    options = given.setdefault(section, {})
    if key:
        options.setdefault(option, {})[key] = _entry(name, words)
    else:
        options[option] = _value(name, words, field_types(SECTIONS[section])[option])


def _option_named(name: str) -> tuple[str, str, str]:
    """Return the section, the option and the key (of an option that is a mapping) of ``--SECTION.OPTION.KEY``."""
    section, _, rest = name.removeprefix("--").partition(".")
    option, _, key = rest.partition(".")
    section, option = section.replace("-", "_"), option.replace("-", "_")
    hints: dict[str, Any] = {}
    if section in SECTIONS:
        hints = field_types(SECTIONS[section])
    hint = hints.get(option, hints.get(option.removeprefix("no_")))
    is_mapping = typing.get_origin(hint) is dict
    if not name.startswith("--") or hint is None or (key and not is_mapping):
        known = [
            f"--{section}.{field.name}".replace("_", "-")
            for section, cls in SECTIONS.items()
            for field in dataclasses.fields(cls)
        ]
        remedy = meant(name.replace("_", "-"), known).replace("'", "") or ": write --SECTION.OPTION VALUE"
        if name.endswith((".yaml", ".yml")):
            remedy = f": write --config {name}"
        raise ValueError(f"unknown option {name}{remedy}")
    # The names of a model's configuration have underscores, paths of a mixture what they have.
    if option == "config_overrides":
        key = key.replace("-", "_")
    return section, option, key


def _entry(name: str, words: list[str]) -> Any:
    """Return the value of an entry of a mapping, of any type."""
    if not words:
        raise ValueError(f"{name} has no value: write {name} VALUE")
    values = [parse_yaml(word) for word in words]
    return values[0] if len(values) == 1 else values


def _value(name: str, words: list[str], hint: Any) -> Any:
    """Return the value of an option of type ``hint``."""
    kinds = alternatives(hint)
    entries = [typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple]
    # None is Python's word for null, which runs of earlier versions may have in their scripts.
    if words in (["null"], ["None"]) and types.NoneType in kinds:
        return None
    if entries:
        # Also with commas: --optimizer.betas 0.9,0.95
        parts = " ".join(word.replace(",", " ") for word in words).split()
        return tuple(_value(name, [part], entries[0]) for part in parts)
    if not words and bool in kinds:
        return True
    if len(words) != 1:
        quoted = ", with quotes around a pattern such as '*.jsonl' and around spaces" if words and str in kinds else ""
        raise ValueError(f"{name} has the values {words}: write {name} VALUE{quoted}")
    text = words[0]
    # Of texts, a word of YAML is what it says, but for the numbers that the option takes too.
    if str in kinds and int not in kinds:
        return text
    try:
        return fit(name, parse_yaml(text), hint)
    except ValueError:
        if str in kinds:
            return text
        raise
