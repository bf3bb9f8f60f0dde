"""Keeps the weights of layers with one input adjacent in memory: one matmul instead of several.

The parameters stay apart, under their names; only where their values lie changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from nxd_memopt.ops.cuda.support import has_triton
from nxd_memopt.ops.packed_view import packed_view
from nxd_memopt.ops.parts import split_sizes


class PackedWeights(nn.Module):
    """Base of a module that has column-parallel layers ``packed_layers`` of one input.

    On GPUs only: elsewhere no operator reads and writes joined activations, and a part that is saved for backward would
    keep the whole alive.
    """

    packed_layers: tuple[str, ...] = ()

    def pack_weights(self) -> None:
        """Move the weights side by side where they are not; costs one copy of them while it runs."""
        weights = [cast(nn.Parameter, self.get_submodule(name).weight) for name in self.packed_layers]
        first = weights[0]
        alike = all(w.dtype == first.dtype and w.device == first.device and w.is_contiguous() for w in weights)
        if not (first.is_cuda and alike and has_triton()) or packed_view(weights, 0) is not None:
            return
        sizes = [weight.size(0) for weight in weights]
        for weight, part in zip(weights, split_sizes(torch.cat([w.detach() for w in weights]), sizes), strict=True):
            weight.data = part

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.pack_weights()
        return self


def pack_weights(model: nn.Module) -> None:
    """Let every part of ``model`` that is a ``PackedWeights`` join its weights; after their values were replaced."""
    for module in model.modules():
        if isinstance(module, PackedWeights):
            module.pack_weights()
