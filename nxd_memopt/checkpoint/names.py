"""Maps a model's tensors to the names under which checkpoints store them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.modules.lora import is_adapter, whole_model
from nxd_memopt.modules.staged_model import is_staged
from nxd_memopt.parallel_layers.output_projection import describe_output_projections

OUTPUT_HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of the output head: ``embed_out`` in GPT-NeoX files of transformers before version 5,
else ``lm_head``.
"""

_COMPUTED_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)$")
_SHOWN = 5


def is_computed_buffer(name: str) -> bool:
    """Return whether ``name`` is a buffer that older files contain and models compute."""
    return bool(_COMPUTED_BUFFERS.search(name))


def is_vocabulary_table(name: str) -> bool:
    """Return whether ``name`` is of the embedding or the head, which have a row for each token."""
    return name in OUTPUT_HEADS or name.endswith((".embed_tokens.weight", ".embed_in.weight"))


@dataclass(frozen=True)
class NamedTensor:
    """A parameter or persistent buffer with all of its names (tied tensors have several), the
    model's first name first.
    """

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def is_frozen(self) -> bool:
        """Whether it is a parameter that is not trained, as all are but the adapters where there are any."""
        return isinstance(self.tensor, torch.nn.Parameter) and not self.tensor.requires_grad

    @property
    def is_adapter(self) -> bool:
        """Whether it is of an adapter (LoRA)."""
        return is_adapter(self.names[0])


def named_tensors(model: torch.nn.Module) -> list[NamedTensor]:
    """Return the tensors that a checkpoint of ``model`` holds, each tensor once."""
    # The columns of attention output projections follow the query heads, whose order depends on
    # the KV replicas: describe this sharding before it is read.
    describe_output_projections(model)
    # By id: the values of tied names are one object, and ``keep_vars`` keeps them so.
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors[id(tensor)] = tensor
        names.setdefault(id(tensor), []).append(name)
    return [NamedTensor(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def with_backbone_prefix(model: torch.nn.Module, sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``sources`` under the names of ``model`` if they are a backbone that was saved by itself.

    transformers' base models, such as ``LlamaModel``, have no ``model.`` before their names.
    """
    known = model.state_dict(keep_vars=True)
    prefix = next(iter(known), "").partition(".")[0] + "."
    if any(name.startswith(prefix) for name in sources) or not any(prefix + name in known for name in sources):
        return dict(sources)
    return {name if name in OUTPUT_HEADS else prefix + name: source for name, source in sources.items()}


def match_names(
    model: torch.nn.Module, stored: Collection[str], *, without: Callable[[NamedTensor], bool] | None = None
) -> dict[str, Tensor]:
    """Return the model's tensors by the name under which each is stored.

    Tied tensors take their first stored name. Buffers in old checkpoints that the model computes
    are ignored.

    Args:
        model: the model.
        stored: names in the files.
        without: says which tensors of the model are left out.

    Raises:
        ValueError: a tensor is not stored, or a stored name is not the model's.
    """
    wanted = [entry for entry in named_tensors(model) if not (without and without(entry))]
    matched: dict[str, Tensor] = {}
    known: set[str] = set()
    missing: list[str] = []
    for entry in wanted:
        # All stored aliases are known, but the tensor is read from the first one.
        found = [name for name in _aliases(entry.names) if name in stored]
        known.update(found)
        if found:
            matched[found[0]] = entry.tensor
        else:
            missing.append(entry.names[0])
    # What other stages of a pipeline read.
    if is_staged(model):
        known.update(name for entry in named_tensors(whole_model(model)) for name in _aliases(entry.names))
    # With tied embeddings a stored output head is redundant: neither required nor unexpected.
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        known.update(OUTPUT_HEADS)
    unexpected = [name for name in stored if name not in known and not is_computed_buffer(name)]
    _raise_on_difference(missing, unexpected)
    return matched


def stored_copies(model: torch.nn.Module, stored: Collection[str]) -> list[list[str]]:
    """Return the stored names of each tensor of ``model`` that is stored several times."""
    copies: list[list[str]] = []
    for entry in named_tensors(model):
        names = [name for name in dict.fromkeys(_aliases(entry.names)) if name in stored]
        if len(names) > 1:
            copies.append(names)
    return copies


def _aliases(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return all names under which a tensor may be stored."""
    if any(name in OUTPUT_HEADS for name in names):
        return names + OUTPUT_HEADS
    return names


def _raise_on_difference(missing: list[str], unexpected: list[str]) -> None:
    """Raise ``ValueError`` if there are missing or unexpected names."""
    if not missing and not unexpected:
        return
    remedy = "build the model from the checkpoint's own config"
    if any(name in OUTPUT_HEADS for name in missing):
        remedy += " (a checkpoint without an output head has tie_word_embeddings=true)"
    raise ValueError(
        f"parameter names differ: the checkpoint lacks {len(missing)} that the model has, {missing[:_SHOWN]}, and has "
        f"{len(unexpected)} that the model lacks, {unexpected[:_SHOWN]}: {remedy}"
    )
