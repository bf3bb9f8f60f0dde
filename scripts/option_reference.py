"""Writes docs/options.md: the options of the training program, from its configuration's dataclasses.

python -m scripts.option_reference           # exit status 1 when it is out of date
python -m scripts.option_reference --write
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_memopt.options import declaration
from nxd_memopt.training.config.nemo.switches import OF_THE_MODEL, REPLACED, SWITCHES
from nxd_memopt.training.config.parsing import NEUTRAL
from nxd_memopt.training.config.train_config import SECTIONS

FILE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
_ARGUMENT = re.compile(r"^    (\w+): (.*)$")


def option_reference() -> str:
    """Return the full document, with a table per section."""
    lines = [
        "# Options of the training program",
        "",
        "Written by `scripts/option_reference.py --write` from the dataclasses of the configuration. A YAML file has a",
        "section for each heading; on the command line an option is `--SECTION.OPTION VALUE`, with `-` for `_`",
        "(`true`, `false` and `null` as in YAML; a boolean's `true` may be left out if the option has no other type).",
        "[The training program](training.md) says how they work together.",
    ]
    for section, cls in SECTIONS.items():
        lines += ["", f"## {section}", "", _summary(cls), ""]
        lines += ["| option | type | default | meaning |", "|---|---|---|---|"]
        texts = descriptions(cls)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            cells = (f"`{field.name}`", _type(hints[field.name]), _default(field), texts[field.name])
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, "", *_other_names(), ""])


def descriptions(cls: type) -> dict[str, str]:
    """Return the text of each argument in the docstring of a dataclass.

    Raises:
        SystemExit: a field has no text, or a text no field.
    """
    found: dict[str, list[str]] = {}
    name = ""
    _, _, arguments = inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:\n")
    for line in arguments.partition("\n\n")[0].splitlines():
        match = _ARGUMENT.match(line)
        if match is not None:
            name = match[1]
        found.setdefault(name, []).append(match[2] if match is not None else line.strip())
    fields = {field.name for field in dataclasses.fields(cls)}
    if fields != set(found):
        raise SystemExit(f"the docstring of {cls.__name__} describes other options: {sorted(fields ^ set(found))}")
    joined = {name: " ".join(texts).replace("``", "`") for name, texts in found.items()}
    return {name: text.replace("`None`", "`null`") for name, text in joined.items()}


def _summary(cls: type) -> str:
    """Return the docstring's text before the arguments, in one line."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:")[0].split()).replace("``", "`")


def _type(hint: Any) -> str:
    """Return a type as YAML's users know it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{'null' if each is None else each}`" for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(each) for each in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    names = {str: "text", int: "integer", float: "number", bool: "boolean", types.NoneType: "`null`"}
    return names.get(hint, "mapping")


def _default(field: Any) -> str:
    """Return the default of a field in YAML."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    return _yaml(list(value) if isinstance(value, tuple) else value)


def _other_names() -> list[str]:
    """Return the table of NeMo's and Megatron's names."""
    lines = ["## Other names", "", "NeMo's and Megatron's names, in any section of a YAML file:", ""]
    lines += ["| name | option |", "|---|---|"]
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            for name, values in declaration(field).nemo.items():
                if name != field.name:
                    lines.append(f"| `{name}` | `{section}.{field.name}`{_translated(values)} |")
    for name, (section, option, value) in SWITCHES.items():
        meaning = "which must be given" if value is None else f"{_yaml(value)} if it is not given"
        lines.append(f"| `{name}` | `true`: `{section}.{option}`, {meaning}; `false`: its default |")
    lines += [f"| `{name}` | `{remedy}` |" for name, remedy in REPLACED.items()]
    lines += [f"| `{name}` | none: `config.json` has it |" for name in OF_THE_MODEL]
    lines += [f"| `{name}` | none: must be {_yaml(value)} |" for name, value in NEUTRAL.items()]
    return lines


def _translated(values: Mapping[Any, Any] | None) -> str:
    """Return an option's values by those that another name has, as the end of a line."""
    if values is None:
        return ""
    return ": " + ", ".join(f"{_yaml(theirs)} is {_yaml(ours)}" for theirs, ours in values.items())


def _yaml(value: Any) -> str:
    """Return a value as YAML has it."""
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return f"`{value}`"


def main() -> int:
    """Write the document, or compare it with the file; return the exit code."""
    expected = option_reference()
    if "--write" in sys.argv[1:]:
        FILE.write_text(expected, encoding="utf-8")
    elif not FILE.exists() or FILE.read_text(encoding="utf-8") != expected:
        print("docs/options.md is out of date: run python -m scripts.option_reference --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
