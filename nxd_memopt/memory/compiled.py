"""Compiles each decoder layer of a model with torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.memory.forwards import Forward, is_wrapped, unwrap_forward, wrap_forward
from nxd_memopt.memory.recompute import is_passed_over
from nxd_memopt.modules.attention import CoreAttention
from nxd_memopt.modules.dropout import ParallelDropout


def apply_compile(layers: Sequence[nn.Module]) -> None:
    """Let each of ``layers`` run as one compiled graph; parameters and their names stay as they are.

    torch.compile keeps graphs by the code that they were made from, and guards on what the code read. Layers of one
    shape read equal values, so the first layer is compiled and the others run its graph.

    Layers that a recomputed chunk runs (``recompute_method="uniform"``) are part of the graph of its first layer.

    Raises:
        ValueError: the device compiles no layers, or the layers draw dropout from a rank's own random stream.
    """
    refusal = backend.compile_refusal()
    if refusal is not None:
        raise ValueError(f"compile 'layer' {refusal}; or set compile to null")
    for layer in layers:
        _require_traceable_dropout(layer)
    for layer in layers:
        if not is_passed_over(layer):
            wrap_forward(layer, "compile", CompiledForward)


def remove_compile(layers: Sequence[nn.Module]) -> None:
    """Undo ``apply_compile``."""
    for layer in layers:
        unwrap_forward(layer, "compile")


def is_compiled(layer: nn.Module) -> bool:
    """Whether ``apply_compile`` compiled ``layer``; not for a layer that is part of another one's graph."""
    return is_wrapped(layer, "compile")


class CompiledForward:
    """A layer's forward, compiled at its first call.

    An object and no closure: ``copy.deepcopy`` of a model, or pickle, makes one that runs the copy's parameters.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._compiled = backend.compile(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            return self._compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise RuntimeError(
                f"a decoder layer cannot be compiled as one graph: {error}\nSet compile to null to run it eagerly, or "
                "change what torch.compile names above: a hook or replaced module inside the layer, inputs of ever new "
                "shapes, or a compiler that is missing"
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(copy.deepcopy(self._forward, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledForward, (self._forward,)


def _require_traceable_dropout(layer: nn.Module) -> None:
    """Each rank's own random stream is a state that is put into the generator, which no graph can hold."""
    for name, module in layer.named_modules():
        if isinstance(module, CoreAttention):
            probability = module.dropout
        elif isinstance(module, ParallelDropout):
            probability = module.p
        else:
            continue
        if probability > 0 and module.sharded:
            raise ValueError(
                f"compile 'layer' and dropout {probability} in {name!r}, of which each tensor-parallel rank draws its "
                "own: a graph has no random stream of one rank; set the model's dropout to 0, or compile to null"
            )
