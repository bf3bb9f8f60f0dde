"""Packs the weights of column-parallel layers with one input, so that one matmul computes all.

Packed weights are adjacent in memory. The parameters stay separate, with their own names; only
their storage is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nxd_memopt.ops.cuda.support import has_triton
from nxd_memopt.ops.parts import packed_view, split_sizes
from nxd_memopt.parallel_layers.data_shards import is_data_sharded
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, SharedInput


class PackedWeights(SharedInput):
    """``SharedInput`` whose weights are packed on GPUs.

    On other devices no operator reads and writes packed activations, and a slice saved for backward
    would keep the full packed tensor alive.
    """

    def share_input(self) -> None:
        """Pack the weights, and let ``project`` compute all layers at once."""
        self.pack_weights()
        super().share_input()

    def pack_weights(self) -> None:
        """Copy the weights into one storage, and A of their adapters into another; peak memory one extra copy."""
        layers: list[Any] = [self.get_submodule(name) for name in self.shared_input_layers]
        # A module that replaces a layer, such as an adapter, may have no weight, or another one.
        if not all(isinstance(layer, ColumnParallelLinear) for layer in layers):
            return
        _pack([layer.weight for layer in layers])
        # The parts of a fused layer have one A.
        downs = dict.fromkeys(layer.lora_A.weight for layer in layers if hasattr(layer, "lora_A"))
        if len(downs) > 1:
            _pack(list(downs))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # ``Module.to`` and similar calls replace the values of each parameter separately.
        super()._apply(fn, recurse)
        self.pack_weights()
        return self


def _pack(weights: Sequence[nn.Parameter]) -> None:
    """Copy the weights into one storage, unless they are packed or cannot be."""
    first = weights[0]
    # Rows that are sharded over data-parallel ranks are gathered elsewhere: nothing to pack.
    if any(is_data_sharded(weight) for weight in weights):
        return
    alike = all(
        weight.dtype == first.dtype and weight.device == first.device and weight.is_contiguous() for weight in weights
    )
    if not (first.is_cuda and alike and has_triton()) or packed_view(weights, 0) is not None:
        return
    # float8 as bytes, because torch.cat does not take it on all devices
    copied = [weight.detach() for weight in weights]
    packed = torch.cat([each.view(torch.uint8) if each.itemsize == 1 else each for each in copied]).view(first.dtype)
    slices = split_sizes(packed, [weight.size(0) for weight in weights])
    # Each parameter becomes a slice of the copy. Setting ``data`` keeps the Parameter
    # objects, so optimizers, ties and shard attributes stay valid.
    for weight, values in zip(weights, slices, strict=True):
        weight.data = values


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of each ``PackedWeights`` in ``model``; call after values were replaced."""
    for module in model.modules():
        if isinstance(module, PackedWeights):
            module.pack_weights()
