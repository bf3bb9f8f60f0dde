"""Writes plain Python objects and descriptions of tensors as JSON, for messages between stages.

Nothing is unpickled: a message can only contain the types below, and a named tuple's class is looked up among the
modules that the receiver has imported.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class TensorMeta(NamedTuple):
    """Description of a tensor, in its place in an object that is sent.

    Attributes:
        tensor_index: position in the list of the object's tensors.
        dtype, shape, requires_grad, device: of the tensor.
    """

    tensor_index: int
    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool
    device: torch.device | None


_SCALARS = (bool, int, float, str, type(None))
# Containers that are rebuilt from the list of their items.
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {"dict": dict, "OrderedDict": OrderedDict}


def is_named_tuple(obj: Any) -> bool:
    """Return whether ``obj`` is an instance of a named tuple's class."""
    return isinstance(obj, tuple) and hasattr(obj, "_fields")


def to_text(obj: Any) -> str:
    """Return ``obj`` as JSON.

    Raises:
        TypeError: it contains an object of another type; the message names it.
    """
    return json.dumps(_encode(obj))


def from_text(text: str) -> Any:
    """Return the object that ``to_text`` has written."""
    return _decode(json.loads(text))


def _encode(obj: Any) -> Any:
    """Return scalars as they are, and everything else as ``[kind, content]``."""
    kind = type(obj)
    if kind in _SCALARS:
        return obj
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(obj)]
    if is_named_tuple(obj):
        return ["named", [kind.__module__, kind.__qualname__, *map(_encode, obj)]]
    if kind in _SEQUENCES.values():
        return [kind.__name__, [_encode(item) for item in obj]]
    if kind in _MAPPINGS.values():
        return [kind.__name__, [[_encode(key), _encode(value)] for key, value in obj.items()]]
    raise TypeError(
        f"an object of class {kind.__module__}.{kind.__qualname__} cannot be sent to another stage: send tensors, "
        f"numbers, text, dtypes, devices, and {', '.join((*_SEQUENCES, *_MAPPINGS))} or named tuples of them"
    )


def _decode(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    kind, value = content
    if kind == "dtype":
        return _torch_dtype(value)
    if kind == "device":
        return torch.device(value)
    if kind == "named":
        module, name, *items = value
        return _named_tuple_class(module, name)(*map(_decode, items))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([_decode(item) for item in value])
    return _MAPPINGS[kind]([(_decode(key), _decode(item)) for key, item in value])


def _torch_dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is not a dtype of torch {torch.__version__}: use the same version on all ranks")
    return dtype


def _named_tuple_class(module: str, name: str) -> Callable[..., Any]:
    """Return a named tuple's class of a module that is imported; nothing is imported, and no other class returned."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ValueError(
            f"{module}.{name} is no named tuple here: define it at the top of a module that all ranks import"
        )
    return found
