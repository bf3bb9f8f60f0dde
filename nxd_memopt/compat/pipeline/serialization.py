"""neuronx-distributed's ``utils.serialization``: objects without their tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.compat.pipeline import plain_objects
from nxd_memopt.compat.pipeline.plain_objects import TensorMeta, is_named_tuple


def compress_to_string(obj: Any) -> str:
    """Return a plain object as JSON; see ``plain_objects.to_text``."""
    return plain_objects.to_text(obj)


def uncompress_from_string(serialized_data_string: str) -> Any:
    """Return the object of ``compress_to_string``."""
    return plain_objects.from_text(serialized_data_string)


class SerializationManager:
    """Separates tensors from the object that contains them.

    Tensors are found in tuples, named tuples, lists, sets and mappings; an object of another class stays as it is.
    """

    def serialize(self, obj: Any) -> tuple[Any, list[Tensor], list[TensorMeta]]:
        """Return ``obj`` with descriptions in place of tensors, the tensors, and the descriptions."""
        tensors: list[Tensor] = []
        metas: dict[int, TensorMeta] = {}

        # A tensor in two places is one tensor at the receiver too.
        def describe(tensor: Tensor) -> TensorMeta:
            if id(tensor) not in metas:
                metas[id(tensor)] = TensorMeta(
                    len(tensors), tensor.dtype, tensor.shape, tensor.requires_grad, tensor.device
                )
                tensors.append(tensor)
            return metas[id(tensor)]

        return _replace(obj, Tensor, describe), tensors, list(metas.values())

    def deserialize(self, stubbed_obj: Any, tensors: list[Tensor]) -> Any:
        """Return ``stubbed_obj`` with tensors in place of their descriptions."""
        return _replace(stubbed_obj, TensorMeta, lambda meta: tensors[meta.tensor_index])

    def extract_stubs(self, stubbed_obj: Any) -> list[TensorMeta]:
        """Return the descriptions in ``stubbed_obj``."""
        metas: list[TensorMeta] = []
        _replace(stubbed_obj, TensorMeta, metas.append)
        return metas


def _replace(obj: Any, kind: type, replacement: Callable[[Any], Any]) -> Any:
    """Return ``obj`` with ``replacement`` of each object of class ``kind`` in nested containers."""
    if isinstance(obj, kind):
        return replacement(obj)
    if isinstance(obj, torch.Size):
        return obj
    if isinstance(obj, list | tuple | set | frozenset):
        items = [_replace(item, kind, replacement) for item in obj]
        if is_named_tuple(obj):
            return type(obj)(*items)
        return type(obj)(items)  # pyright: ignore[reportCallIssue]
    if isinstance(obj, Mapping):
        # Filled item by item: such classes as transformers' outputs take no pairs.
        copy: Any = type(obj)()
        if isinstance(obj, defaultdict):
            copy = defaultdict(obj.default_factory)
        for key, value in obj.items():
            copy[key] = _replace(value, kind, replacement)
        return copy
    return obj
