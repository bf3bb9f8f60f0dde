"""Converts nested plain values to JSON and back, with their tensors stored elsewhere; nothing is pickled."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

_PLAIN = (bool, int, float, str, bytes, type(None))


def require_plain(value: Any, where: str) -> None:
    """Require a value that JSON and ``torch.load(weights_only=True)`` can restore.

    Raises:
        ValueError: names the place in ``where`` and the type.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            require_plain(key, f"a key of {where}")
            require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            require_plain(item, f"{where}[{i}]")
    elif type(value) not in _PLAIN and not isinstance(value, Tensor):  # numpy.float64 is a float, but not plain
        raise ValueError(
            f"{where} has the type {type(value).__name__}: store tensors, numbers and strings in dicts and lists"
        )


def encode(value: Any, put: Callable[[Tensor], str]) -> Any:
    """Return ``value`` as JSON values.

    A type that JSON lacks becomes an object with one key that starts with ``$``.

    Args:
        value: a value that ``require_plain`` accepts.
        put: stores a tensor and returns the name under which ``decode`` finds it.
    """
    if isinstance(value, Tensor):
        return {"$tensor": put(value)}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, put) for key, item in value.items()}
        # Keys that are not strings (JSON would make strings of them), or that could be mistaken
        # for an encoded type: a list of pairs keeps both.
        return {"$items": [[encode(key, put), encode(item, put)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, put) for item in value]}
    if isinstance(value, list):
        return [encode(item, put) for item in value]
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    return value


def decode(value: Any, get: Callable[[str], Tensor]) -> Any:
    """Return the value that ``encode`` encoded; ``get`` returns the tensor of a name."""
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        # An object with one key may be an encoded type; ``encode`` never produces a plain ``$``
        # key.
        ((kind, content),) = value.items()
        if kind == "$tensor":
            return get(content)
        if kind == "$items":
            return {decode(key, get): decode(item, get) for key, item in content}
        if kind == "$tuple":
            return tuple(decode(item, get) for item in content)
        if kind == "$bytes":
            return base64.b64decode(content)
        if kind == "$float":
            return float(content)
    return {key: decode(item, get) for key, item in value.items()}
