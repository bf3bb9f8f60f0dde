"""Column-parallel layers with one input: one all-gather for all of them, and on GPUs one matmul.

On GPUs the weights are adjacent in memory. The parameters stay separate, with their own names; only
their storage is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxd_memopt.ops.cuda.support import has_triton
from nxd_memopt.ops.parts import packed_view, split_sizes
from nxd_memopt.parallel_layers.fusion import FusedPath, FusibleModule
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, column_parallel_linears


class PackedWeights(FusibleModule):
    """Base of a module with column-parallel layers ``packed_layers`` that share one input.

    A subclass builds the layers, and then calls ``share_input``. Weights are packed on GPUs only. On
    other devices no operator reads and writes packed activations, and a slice saved for backward
    would keep the full packed tensor alive.
    """

    packed_layers: tuple[str, ...] = ()
    shared_input: FusedPath

    def share_input(self) -> None:
        """Pack the weights, and let ``project`` compute all layers at once."""
        self.pack_weights()
        self.shared_input = FusedPath(
            self,
            f"projection of {', '.join(self.packed_layers)}",
            dict.fromkeys(self.packed_layers, ColumnParallelLinear),
            cost="each layer gathers its input and multiplies by itself",
        )

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the output ``[..., output_size/T]`` of each layer, with one all-gather of ``hidden``."""
        layers = [cast(ColumnParallelLinear, getattr(self, name)) for name in self.packed_layers]
        # A hook or a replaced forward on one of the layers turns the path off; then every layer
        # is called, at the cost of an all-gather each.
        if self.shared_input.is_active:
            return column_parallel_linears(hidden, layers)
        return tuple(layer(hidden) for layer in layers)

    def pack_weights(self) -> None:
        """Copy the weights into one storage unless they are packed; peak memory one extra copy."""
        layers = [self.get_submodule(name) for name in self.packed_layers]
        # A module that replaces a layer, such as an adapter, may have no weight, or another one.
        if not all(isinstance(layer, ColumnParallelLinear) for layer in layers):
            return
        weights = [cast(nn.Parameter, layer.weight) for layer in layers]
        first = weights[0]
        alike = all(
            weight.dtype == first.dtype and weight.device == first.device and weight.is_contiguous()
            for weight in weights
        )
        if not (first.is_cuda and alike and has_triton()) or packed_view(weights, 0) is not None:
            return
        # Each parameter becomes a slice of the copy. Setting ``data`` keeps the Parameter
        # objects, so optimizers, ties and shard attributes stay valid.
        packed = torch.cat([weight.detach() for weight in weights])
        slices = split_sizes(packed, [weight.size(0) for weight in weights])
        for weight, values in zip(weights, slices, strict=True):
            weight.data = values

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # ``Module.to`` and similar calls replace the values of each parameter separately.
        super()._apply(fn, recurse)
        self.pack_weights()
        return self


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of each ``PackedWeights`` in ``model``; call after values were replaced."""
    for module in model.modules():
        if isinstance(module, PackedWeights):
            module.pack_weights()
