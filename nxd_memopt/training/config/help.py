"""Writes the help of the training program: every option with its type, default, range and resume rule."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from typing import Any

from nxd_memopt.options import Declaration, Resume, alternatives, declaration, default_of, field_types
from nxd_memopt.training.config.nemo.switches import OF_THE_MODEL, REPLACED, SWITCHES
from nxd_memopt.training.config.train_config import SECTIONS

WIDTH = 112
HEAD = """\
usage: {program} [--config FILE.yaml | --recipe NAME] [--SECTION.OPTION VALUE ...]

A YAML file has a section for each heading below. Options of the command line win. Values are as in YAML (true, false,
null); a list is a b c or a,b,c; an entry of a mapping is --SECTION.OPTION.KEY VALUE; true may be left out, and
--SECTION.no-OPTION is false. --memory auto lets the planner choose the memory section.

If a resumed run changes an option:"""
TYPES = {str: "text", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
_ARGUMENT = re.compile(r"^    (\w+): (.*)$")


def options_help(program: str) -> str:
    """Return the help of all options.

    Raises:
        ValueError: an option has no text in the docstring of its section.
    """
    lines = [HEAD.format(program=program)]
    for resume in Resume:
        lines.append(f"  {_words(resume)}: {resume.value}")
    for section, cls in SECTIONS.items():
        summary = inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:")[0]
        lines += ["", section, *_indented(summary, 2)]
        texts = descriptions(cls)
        for field in dataclasses.fields(cls):
            declared = declaration(field)
            facts = [f"default {_shown(default_of(field))}", *_ranges(declared), _words(declared.resume)]
            flag = f"--{section}.{field.name}".replace("_", "-")
            kind = _type_name(field_types(cls)[field.name])
            lines += [f"  {flag}  {kind} ({'; '.join(facts)})"]
            names = [name for name in declared.nemo if name != field.name]
            if names:
                lines.append(f"      in NeMo, Megatron or neuronx-distributed: {', '.join(names)}")
            lines += _indented(texts[field.name], 6)
    lines += ["", "other names of NeMo and Megatron, in any section of a YAML file"]
    for name, (section, option, _) in SWITCHES.items():
        lines.append(f"  {name}: true needs or sets {section}.{option}, false resets it")
    for name, remedy in REPLACED.items():
        lines.append(f"  {name}: write {remedy}")
    lines.append(f"  {', '.join(OF_THE_MODEL)}: none, config.json has them")
    return "\n".join(lines)


def descriptions(cls: type) -> dict[str, str]:
    """Return the text of each argument in the docstring of a dataclass.

    Raises:
        ValueError: a field has no text, or a text no field.
    """
    found: dict[str, str] = {}
    name = ""
    _, _, arguments = inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:\n")
    for line in arguments.partition("\n\n")[0].splitlines():
        match = _ARGUMENT.match(line)
        text = line.strip()
        if match is not None:
            name, text = match.groups()
        found[name] = f"{found.get(name, '')} {text}".strip()
    fields = {field.name for field in dataclasses.fields(cls)}
    if fields != set(found):
        raise ValueError(f"the docstring of {cls.__name__} describes other options: {sorted(fields ^ set(found))}")
    return found


def _indented(text: str, columns: int) -> list[str]:
    """Return ``text`` in lines, without reStructuredText's marks."""
    plain = " ".join(text.split()).replace("``", "").replace("None", "null")
    return textwrap.wrap(plain, WIDTH, initial_indent=" " * columns, subsequent_indent=" " * columns)


def _ranges(declared: Declaration) -> list[str]:
    """Return the bounds of an option in words."""
    bounds = {"at least": declared.minimum, "above": declared.above, "at most": declared.maximum}
    return [f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None]


def _words(resume: Resume) -> str:
    """Return the name of a resume rule."""
    return f"resume: {resume.name.lower().replace('_', ' ')}"


def _type_name(hint: Any) -> str:
    """Return a type as YAML's users know it."""
    names: list[str] = []
    for kind in alternatives(hint):
        origin = typing.get_origin(kind)
        if origin is typing.Literal:
            names += [_shown(each) for each in typing.get_args(kind)]
        elif origin is tuple:
            names.append(f"list of {_type_name(typing.get_args(kind)[0])}")
        else:
            names.append(TYPES.get(kind, "mapping"))
    return " | ".join(names)


def _shown(value: Any) -> str:
    """Return a value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)
