"""Declares options as fields of dataclasses, and checks their values; imports the standard library only."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

NEW_RUN = "start a new run in another trainer.output_dir"
ITEM = "\n- "  # begins each problem of a message with several
WARM_START = f"{NEW_RUN}, with these weights: --model.warm-start DIR"


class Resume(Enum):
    """What happens if an option of a resumed run differs from the checkpoint's."""

    NOT_COMPARED = "not recorded: it says where files are, or how this process runs"
    REPORTED = "may change: neither the losses nor the trained sequences depend on it; one line says so"
    SAME_CONTENT = "a name or a path that may change if it leads to equal content; one line says so"
    SAME_CONFIG = "a model's directory that may change if its configuration is equal; one line says so"
    WHEN_ASKED = "changes the results: allowed if named in trainer.allow_changes"
    REFUSED = "changes what the stored state means"
    SPECIAL = "compared by a function of its own, in training/resume/"


@dataclass(frozen=True)
class Declaration:
    """What a field's type and default do not say about an option.

    Args:
        resume: what happens if a resumed run changes the option.
        remedy: what to do instead, for ``Resume.REFUSED``.
        minimum: smallest number.
        above: number that the option must exceed.
        maximum: largest number.
        is_path: whether the option is a path or a name, in which a leading ``~`` is the home directory.
        nemo: names that NeMo, Megatron or neuronx-distributed have for the option, each with the
            option's values by theirs, or None for equal values.
    """

    resume: Resume
    remedy: str = WARM_START
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    is_path: bool = False
    nemo: Mapping[str, Mapping[Any, Any] | None] = dataclasses.field(default_factory=dict)


def option(
    default: Any = dataclasses.MISSING,
    *,
    resume: Resume,
    factory: Callable[[], Any] | None = None,
    nemo: Sequence[str] | Mapping[str, Mapping[Any, Any] | None] = (),
    **declared: Any,
) -> Any:
    """Return a field of a dataclass that is an option.

    Args:
        default: default value.
        resume: see ``Declaration``, as are the options in ``declared``.
        factory: makes the default, instead of ``default``, where that is mutable.
        nemo: other names of the option; a mapping if their values differ.
    """
    names = nemo if isinstance(nemo, Mapping) else dict.fromkeys(nemo)
    metadata = {"option": Declaration(resume=resume, nemo=names, **declared)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declaration(field: dataclasses.Field[Any]) -> Declaration:
    """Return what ``option`` declared about a field."""
    return field.metadata["option"]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name."""
    return typing.get_type_hints(cls)


def check_options(options: Any, section: str = "") -> None:
    """Check the types and ranges of a dataclass's options, and store each value in its type: a list as a tuple.

    Args:
        options: instance of a dataclass with fields of ``option``, which may be frozen.
        section: section of the configuration, for messages.

    Raises:
        ValueError: a value has another type, is not one of the allowed values, or is out of range.
    """
    hints = field_types(type(options))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        # The planner makes many configurations, most of whose options have their defaults.
        if value is field.default:
            continue
        name = f"{section}.{field.name}".removeprefix(".")
        value = fit(name, value, hints[field.name])
        object.__setattr__(options, field.name, value)
        declared = declaration(field)
        if declared.is_path and value is not None:
            object.__setattr__(options, field.name, expanded(name, value))
        if isinstance(value, int | float) and not isinstance(value, bool):
            _require_in_range(name, value, declared)


def _require_in_range(name: str, value: float, declared: Declaration) -> None:
    if declared.minimum is not None:
        require_at_least(name, value, declared.minimum)
    if declared.above is not None and not declared.above < value < math.inf:
        raise ValueError(f"{name} must be above {declared.above:g} and finite, got {value}")
    if declared.maximum is not None and not value <= declared.maximum:
        raise ValueError(f"{name} must be at most {declared.maximum}, got {value}")


def fit(name: str, value: Any, hint: Any) -> Any:
    """Return ``value`` converted to the type ``hint``.

    YAML 1.1 reads ``1e-4`` as a text, because it has no decimal point, and tuples as lists.

    Args:
        name: name of the option, for messages.
        value: value as a YAML file or a program gives it.
        hint: type of a field: plain types, ``Literal``, tuples, mappings, and unions of these.

    Raises:
        ValueError: the value is of another type, or not one of the literals.
    """
    accepted = alternatives(hint)
    # Of words only, a wrong one gets the nearest as a suggestion.
    literals = [each for each in accepted if typing.get_origin(each) is typing.Literal]
    if literals and set(accepted) <= {*literals, types.NoneType}:
        choices = [choice for each in literals for choice in typing.get_args(each)]
        if types.NoneType in accepted:
            choices.insert(0, None)
        require_one_of(name, value, tuple(choices))
        return value
    # The first type that fits is taken, in the order in which the union lists them.
    for alternative in accepted:
        with contextlib.suppress(TypeError):
            return _fit_one(name, value, alternative)
    kinds = [typing.get_origin(alternative) or alternative for alternative in accepted]
    remedies = [_REMEDIES[kind] for kind in kinds if kind in _REMEDIES]
    remedy = f": write {' or '.join(remedies)}" if remedies else ""
    raise ValueError(f"{name} must be {_type_name(hint)}, got {value!r} of type {type(value).__name__}{remedy}")


# How a value of a type is written in YAML.
_REMEDIES: dict[Any, str] = {
    int: "a whole number without quotes",
    float: "a number such as 1e-4",
    bool: "true or false without quotes",
    str: "a text, in quotes if it looks like a number",
    tuple: "a list in brackets, such as [a, b]",
    dict: "a mapping, such as {name: value}",
}


def alternatives(hint: Any) -> list[Any]:
    """Return the types of a union, or the type alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return list(typing.get_args(hint))
    return [hint]


def _fit_one(name: str, value: Any, hint: Any) -> Any:
    """Return ``value`` converted to ``hint``, which is not a union, or raise ``TypeError``."""
    origin = typing.get_origin(hint) or hint
    if origin is Any or (origin is typing.Literal and value in typing.get_args(hint)):
        return value
    # bool is a subclass of int: True for a float is an error, not 1.0.
    if origin is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(fit(name, item, typing.get_args(hint)[0]) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return dict(value)
    # Exact types: an int option does not take True, and a str option does not take 3.
    if origin in (str, int, bool, types.NoneType) and type(value) is origin:
        return value
    raise TypeError


def _type_name(hint: Any) -> str:
    """Return a type as an error message shows it."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    accepted = alternatives(hint)
    if len(accepted) > 1:
        return " or ".join(_type_name(each) for each in accepted)
    if isinstance(hint, type):
        return "null" if hint is types.NoneType else hint.__name__
    return str(hint).replace("typing.", "")


def require_at_least(name: str, value: float, minimum: float) -> None:
    """Raise ``ValueError`` if ``value`` is less than ``minimum``, infinite or NaN."""
    # "not >=" instead of "<": every comparison with NaN is False.
    if not value >= minimum:
        raise ValueError(f"{name} must be at least {minimum:g}, got {value}")
    if value == math.inf:
        raise ValueError(f"{name} must be finite, got {value}: set a number")


def require_named(name: str, value: str | None) -> None:
    """Raise ``ValueError`` for an empty path, which would stand for the current directory, or a zero byte."""
    if value is not None and not value.strip():
        raise ValueError(f"{name} is empty: name a file or directory, or leave it out")
    if value is not None and "\0" in value:
        raise ValueError(f"{name} {value!r} has a zero byte, which no path can have: remove it")


def expanded(name: str, path: str) -> str:
    """Return ``path`` with the home directory for a leading ``~``, which no shell expands in a YAML file.

    Raises:
        ValueError: the path is empty, the home directory is unknown, or the path has an environment variable.
    """
    require_named(name, path)
    # It would name a directory "$HOME" in the working directory.
    if re.search(r"\$\{?[A-Za-z_]", path):
        raise ValueError(f"{name} {path!r} has an environment variable, which is not replaced: write its value")
    # expanduser leaves other names as they are, such as patterns, names on the hub and unknown users.
    result = os.path.expanduser(path)  # noqa: PTH111
    if result.startswith("~"):
        raise ValueError(f"{name} {path!r} names the home directory of an unknown user: write the path")
    return result


def require_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ``ValueError``, with the nearest allowed value, if ``value`` is not in ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} {value!r} is not one of {list(allowed)}{nearest(value, allowed)}")


def nearest(value: object, allowed: Sequence[object]) -> str:
    """Return the allowed value that is most like ``value`` as the end of an error message; nothing if none is."""
    # The cutoff of 0.5 is below difflib's default 0.6: a poor suggestion costs a user less than a
    # missing one.
    close = difflib.get_close_matches(str(value), [str(each) for each in allowed], n=1, cutoff=0.5)
    if not close:
        return ""
    return f": did you mean {close[0]!r}?"


@contextlib.contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Append the message of a ``ValueError`` inside the block to ``problems``: all are reported together."""
    try:
        yield
    except ValueError as error:
        problems.append(str(error))


def listed(problems: Sequence[str]) -> str:
    """Return one problem as it is; of several their number, and each on a line of its own."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems:" + "".join(f"{ITEM}{problem}" for problem in problems)
