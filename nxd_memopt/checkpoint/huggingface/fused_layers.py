"""Converts layers between Hugging Face files, which have some as one weight, and models, which have them separate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.architectures.layers import FUSED_LAYERS, fused_name
from nxd_memopt.checkpoint.files import Sources
from nxd_memopt.modules.lora import model_type_of
from nxd_memopt.parallel_layers.resharding import LazySlice, full_shape, stored_shape


def fused_parameter(model: torch.nn.Module, name: str) -> str:
    """Return Hugging Face's name of the model's parameter ``name``, which may be a part of one of its parameters."""
    layer, dot, kind = name.rpartition(".")
    return f"{fused_name(model_type_of(model), layer)}{dot}{kind}"


def split_layers(model: torch.nn.Module, sources: Sources) -> Sources:
    """Return ``sources`` with the names of ``model``: of a fused weight a lazy range of rows for each part.

    Raises:
        ValueError: a fused weight has another number of rows than its parts.
    """
    if model_type_of(model) not in FUSED_LAYERS:
        return sources
    parts: dict[str, dict[str, int]] = {}
    for name, tensor in model.named_parameters():
        parts.setdefault(fused_parameter(model, name), {})[name] = full_shape(tensor)[0]
    found: Sources = {}
    for name, source in sources.items():
        rows = parts.get(name, {})
        if name in rows or not rows:
            found[name] = source
            continue
        stored = stored_shape(source)
        if stored[0] != sum(rows.values()):
            raise ValueError(
                f"{name} has {stored[0]} rows, and its parts {list(rows)} have {list(rows.values())}: build the model "
                "from the checkpoint's own config"
            )
        first = 0
        for part, count in rows.items():
            found[part] = Rows(source, first, count)
            first += count
    return found


def fuse_layers(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors as files have them: the parts of a fused weight one below the other, in the model's order."""
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(fused_parameter(model, name), []).append(tensor)
    found: dict[str, Tensor] = {}
    for name, each in parts.items():
        found[name] = each[0]
        if len(each) > 1:
            found[name] = torch.cat(each)
    return found


class Rows:
    """A range of rows of a lazy matrix.

    Args:
        source: the matrix.
        first: first row.
        count: number of rows.
    """

    def __init__(self, source: Tensor | LazySlice, first: int, count: int) -> None:
        self._source = source
        self._first = first
        self._count = count

    def get_shape(self) -> list[int]:
        """Return ``[rows, ...]``."""
        return [self._count, *stored_shape(self._source)[1:]]

    def __getitem__(self, index: Any) -> Tensor:
        """Read a box; ``index`` is ``...``, a slice, or a tuple of slices with step 1."""
        if index is Ellipsis:
            index = ()
        elif isinstance(index, slice):
            index = (index,)
        start, stop, _ = (index[0] if index else slice(None)).indices(self._count)
        return self._source[(slice(self._first + start, self._first + stop), *index[1:])]
