"""Converts experts between Hugging Face files, one tensor per expert, and models, one for all experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.architectures.layers import LAYERS
from nxd_memopt.checkpoint.files import Sources
from nxd_memopt.parallel_layers.resharding import LazySlice, full_shape, stored_shape


@dataclass(frozen=True)
class ExpertNames:
    """Names of a MoE layer in files.

    Attributes:
        block: the module that the model calls ``mlp``.
        gate_up: names of an expert's gate and up projections.
        down: name of its down projection.
    """

    block: str
    gate_up: tuple[str, str]
    down: str

    def parts(self, parameter: str) -> tuple[str, ...]:
        """Return the names, in files, of the parts of the model's parameter."""
        return self.gate_up if parameter == "gate_up_proj" else (self.down,)


NAMES = {
    "mixtral": ExpertNames("block_sparse_moe", ("w1", "w3"), "w2"),
    "qwen2_moe": ExpertNames("mlp", ("gate_proj", "up_proj"), "down_proj"),
    "qwen3_moe": ExpertNames("mlp", ("gate_proj", "up_proj"), "down_proj"),
}
"""By ``model_type``, for every architecture with experts."""

_EXPERTS = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")


def names_of(model: torch.nn.Module) -> ExpertNames | None:
    """Return the names in files of a model's experts, or None for a dense model."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    is_moe = any(layer.only_in == "moe" for layer in LAYERS.get(str(model_type), ()))
    assert not is_moe or model_type in NAMES, f"no names of {model_type}'s experts in files"
    return NAMES.get(str(model_type))


def with_zero_biases(model: torch.nn.Module, sources: Sources) -> Sources:
    """Return ``sources`` with zeros for the biases of routers that they lack: Hugging Face's files have none."""
    biases: dict[str, Tensor] = {}
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias") and name not in sources:
            biases[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return {**sources, **biases}


class StackedExperts:
    """The experts of a layer as one lazy tensor ``[E, rows, columns]``.

    Args:
        name: name of the model's parameter, for messages.
        experts: for each expert its parts, ``[rows_i, columns]``, whose rows follow one another.

    Raises:
        ValueError: experts have different shapes.
    """

    def __init__(self, name: str, experts: Sequence[Sequence[Tensor | LazySlice]]) -> None:
        self._experts = experts
        shapes = {tuple(stored_shape(part) for part in parts) for parts in experts}
        if len(shapes) > 1:
            raise ValueError(f"the experts of {name} have different shapes, {sorted(shapes)[:2]}: copy the files again")
        (self._shapes,) = shapes

    def get_shape(self) -> list[int]:
        """Return ``[E, rows, columns]``."""
        return [len(self._experts), sum(shape[0] for shape in self._shapes), self._shapes[0][1]]

    def __getitem__(self, index: Any) -> Tensor:
        """Read a box; ``index`` is ``...``, a slice, or a tuple of up to three slices with step 1."""
        if index is Ellipsis:
            index = ()
        elif isinstance(index, slice):
            index = (index,)
        bounds = [
            (index[dim] if dim < len(index) else slice(None)).indices(size)[:2]
            for dim, size in enumerate(self.get_shape())
        ]
        experts, rows, columns = bounds
        if experts[0] >= experts[1]:
            empty = self._experts[0][0][:0, :0]
            return empty.new_empty(0, max(0, rows[1] - rows[0]), max(0, columns[1] - columns[0]))
        return torch.stack([self._read(parts, rows, columns) for parts in self._experts[experts[0] : experts[1]]])

    def _read(self, parts: Sequence[Tensor | LazySlice], rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        pieces: list[Tensor] = []
        first = 0
        for part, shape in zip(parts, self._shapes, strict=True):
            low = max(rows[0], first) - first
            high = min(rows[1], first + shape[0]) - first
            if low < high:
                pieces.append(part[low:high, columns[0] : columns[1]])
            first += shape[0]
        return torch.cat(pieces)


def stack_experts(model: torch.nn.Module, sources: Sources) -> Sources:
    """Return ``sources`` with the names of ``model``: one tensor for all experts of a layer.

    Experts that are stored stacked, and the tensors of dense models, are returned unchanged.

    Raises:
        ValueError: experts of a layer are missing.
    """
    names = names_of(model)
    return sources if names is None else stack_named_experts(names, sources)


def stack_named_experts(names: ExpertNames, sources: Sources) -> Sources:
    """Return ``sources`` with the experts under ``names`` stacked, see ``stack_experts``.

    Raises:
        ValueError: experts of a layer are missing.
    """
    block = re.escape(names.block)
    own = "|".join(re.escape(part) for part in (*names.gate_up, names.down))
    pattern = re.compile(rf"(.*\.){block}\.experts\.(\d+)\.({own})\.weight")
    stacked: Sources = {}
    # Parts of each layer's parameters, by prefix: (expert, part) -> tensor.
    layers: dict[str, dict[tuple[int, str], Tensor | LazySlice]] = {}
    for name, source in sources.items():
        match = pattern.fullmatch(name)
        if match is None:
            stacked[name.replace(f".{names.block}.", ".mlp.")] = source
            continue
        layers.setdefault(match[1], {})[int(match[2]), match[3]] = source
    for prefix, parts in layers.items():
        count = 1 + max(expert for expert, _ in parts)
        for parameter in ("gate_up_proj", "down_proj"):
            name = f"{prefix}mlp.experts.{parameter}"
            stacked[name] = StackedExperts(name, list(_experts(name, parts, names.parts(parameter), count)))
    return stacked


def _experts(
    name: str, parts: dict[tuple[int, str], Tensor | LazySlice], wanted: tuple[str, ...], count: int
) -> Iterator[list[Tensor | LazySlice]]:
    """Yield the parts of each expert of the parameter ``name``."""
    for expert in range(count):
        missing = [part for part in wanted if (expert, part) not in parts]
        if missing:
            raise ValueError(f"expert {expert} of {count} of {name} lacks {missing}: copy all files of the checkpoint")
        yield [parts[expert, part] for part in wanted]


def stored_names(model: torch.nn.Module, name: str, tensor: Tensor) -> list[str]:
    """Return the names in files of the model's tensor ``name``: one for each expert and part."""
    names = names_of(model)
    if names is None:
        return [name]
    match = _EXPERTS.fullmatch(name)
    if match is None:
        return [name.replace(".mlp.", f".{names.block}.") if ".mlp.gate." in name else name]
    count = full_shape(tensor)[0]
    prefix = f"{match[1]}{names.block}.experts"
    return [f"{prefix}.{i}.{part}.weight" for i in range(count) for part in names.parts(match[2])]


def split_experts(model: torch.nn.Module, name: str, full: Tensor) -> dict[str, Tensor]:
    """Return the full tensor ``name`` as files have it, by name."""
    stored = stored_names(model, name, full)
    if _EXPERTS.fullmatch(name) is None or names_of(model) is None:
        return dict(zip(stored, [full], strict=True))
    parts_per_expert = len(stored) // full.size(0)
    pieces: list[Tensor] = []
    for expert in full.unbind():
        pieces += [part.contiguous() for part in expert.chunk(parts_per_expert)]
    return dict(zip(stored, pieces, strict=True))
