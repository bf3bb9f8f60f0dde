"""Reads the full tensors of a training checkpoint one at a time, with its adapters merged, on a host without ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_memopt.checkpoint.files import Sources
from nxd_memopt.checkpoint.huggingface.importing import model_sources
from nxd_memopt.checkpoint.layout import parts_of
from nxd_memopt.checkpoint.names import match_names
from nxd_memopt.checkpoint.sharded.index import Index
from nxd_memopt.checkpoint.sharded.loading import base_dtype, require_alike
from nxd_memopt.modules.lora import adapted_layers
from nxd_memopt.modules.lora.layers import scaled_product
from nxd_memopt.parallel_layers.resharding import require_full_shape


class StoredWeights:
    """The weights that the model of a training checkpoint has, by the parameters of a model without memory.

    Args:
        index: the checkpoint, written with any T, D and ZeRO stage.
        model: model on the meta device, at T = 1, with the adapters of the checkpoint's run.
        base: full tensors of the checkpoint's base by name, as its files have them; empty if the checkpoint has
            all weights, or if only adapters are read.

    Raises:
        ValueError: names or shapes differ from the model's.
    """

    def __init__(self, index: Index, model: torch.nn.Module, base: Sources) -> None:
        self._index = index
        stored = list(index.names("model."))
        without = None if index.base is None else (lambda entry: entry.is_frozen)
        matched = match_names(model, stored, without=without)
        self._names = {id(tensor): name for name, tensor in matched.items()}
        for name, tensor in matched.items():
            require_alike(index, f"model.{name}", tuple(tensor.shape), tensor.dtype)
        self._base: Sources = {}
        self._base_names: dict[int, str] = {}
        if base:
            self._base = model_sources(model, base)
            of_base = match_names(model, self._base.keys(), without=lambda entry: entry.is_adapter)
            for name, tensor in of_base.items():
                require_full_shape(name, self._base[name], tensor)
            self._base_names = {id(tensor): name for name, tensor in of_base.items()}
        self._adapted = {id(layer.weight): layer for layer in adapted_layers(model).values()}

    def read(self, param: Tensor) -> Tensor:
        """Return the full tensor of a parameter of the model; a layer's weight has the layer's adapter merged."""
        weight = self._read(param)
        layer = self._adapted.get(id(param))
        if layer is None:
            return weight
        delta = scaled_product(self._read(layer.lora_B.weight), self._read(layer.lora_A.weight), layer.scale)
        return (weight.double() + delta).to(weight.dtype)

    def _read(self, param: Tensor) -> Tensor:
        name = self._names.get(id(param))
        if name is not None:
            return self._index.assemble(f"model.{name}", parts_of(param), tuple(param.shape))
        return self._base[self._base_names[id(param)]][...].to(base_dtype(self._index))
