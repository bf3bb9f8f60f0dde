"""Compiles each decoder layer of a model with torch.compile."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from nxd_memopt.backends import backend
from nxd_memopt.memory.recompute import layer_units
from nxd_memopt.modules.attention import CoreAttention
from nxd_memopt.modules.dropout import ParallelDropout
from nxd_memopt.ops.packed import PackedDocuments
from nxd_memopt.parallel_layers.wrapping import Forward, is_wrapped, unwrap_forward, wrap_forward

# Attention backend that, on CPUs, calls sdpa once for each packed document; "auto" takes another
# one while a layer is compiled.
_PER_DOCUMENT = {"sdpa"}


def apply_compile(layers: Sequence[nn.Module]) -> None:
    """Compile each of ``layers`` as one graph. Parameters and parameter names do not change.

    torch.compile caches graphs by code object and guards on the values that the code read. Layers
    of equal shapes read equal values, so the first layer is compiled and the other layers reuse the
    graph.

    Layers that a recomputed chunk runs (``recompute_method="uniform"``) become part of the graph of
    the first layer of the chunk.
    """
    # A layer that is passed over runs inside the graph of the chunk's first layer. It gets no
    # wrapper, but the first layer's wrapper needs its parameters for the gradient hooks.
    for chunk in layer_units(layers):
        wrap_forward(chunk[0], "compile", functools.partial(CompiledForward, chunk))


def require_compile(layers: Sequence[nn.Module]) -> None:
    """Raise ``ValueError`` if the device compiles no layers, or a layer draws dropout from a per-rank random stream."""
    refusal = backend.compile_refusal()
    if refusal is not None:
        raise ValueError(f"compile 'layer' {refusal}; or set compile to null")
    for layer in layers:
        _require_traceable_dropout(layer)


def remove_compile(layers: Sequence[nn.Module]) -> None:
    """Undo ``apply_compile``."""
    for layer in layers:
        unwrap_forward(layer, "compile")


def is_compiled(layer: nn.Module) -> bool:
    """Return whether ``apply_compile`` wrapped ``layer``.

    False for a layer that runs inside another layer's graph.
    """
    return is_wrapped(layer, "compile")


class CompiledForward:
    """A layer's forward, compiled at the first call.

    It is an object rather than a closure: ``copy.deepcopy`` rebuilds it for the parameters of the
    copied model.

    Args:
        layers: the layers whose parameters the graph reads.
        forward: forward of the first of ``layers``.
    """

    def __init__(self, layers: Sequence[nn.Module], forward: Forward) -> None:
        self._layers = layers
        self._forward = forward
        # torch.compile is lazy: graph and kernels are built at the first call.
        self._compiled = backend.compile(forward)
        self._gradients = _Gradients()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Imported at the first call: torch._dynamo is not needed by models that are not compiled.
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        _require_traceable_documents(self._layers, (*args, *kwargs.values()))
        # Without gradients there is nothing to separate. Parameters are checked at every call,
        # because a parameter may be replaced after the first call.
        if torch.is_grad_enabled():
            self._gradients.watch(self._layers)
        try:
            return self._compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise RuntimeError(
                f"a decoder layer cannot be compiled as one graph: {error}\nSet compile to null to "
                "run it eagerly, or change what torch.compile names above: a hook or replaced "
                "module inside the layer, inputs of ever new shapes, or a compiler that is missing"
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        # Compiled code and hooks belong to the original's parameters: the copy compiles again.
        layers = copy.deepcopy(self._layers, memo)
        return CompiledForward(layers, copy.deepcopy(self._forward, memo))


class _Gradients:
    """Hooks that give each parameter a gradient with separate memory.

    If two parameters have equal gradients (the biases of GPT-NeoX's two parallel branches, for
    example), Inductor computes one gradient and returns two views of it (seen with torch 2.13).
    Autograd steals both views as ``.grad``, because it only checks the reference counts of the
    tensors. A later in-place write to one gradient, by the next micro-batch, by clipping or by an
    all-reduce, would then change the other gradient too.

    A hook on each parameter sees the gradient before autograd steals it and clones a gradient that
    overlaps another one.
    """

    def __init__(self) -> None:
        # keyed by identity: == of parameters is element-wise
        self._hooked = WeakIdKeyDictionary()
        self._indices = itertools.count()
        self._spans: dict[int, tuple[int, int]] = {}

    def watch(self, layers: Sequence[nn.Module]) -> None:
        """Register the hook on each parameter that lacks it.

        Loading a state dict may have replaced parameters.
        """
        for layer in layers:
            for param in layer.parameters():
                if param.requires_grad and param not in self._hooked:
                    index = next(self._indices)
                    self._hooked[param] = index
                    hook = functools.partial(_copy_if_shared, self._spans, index)
                    param.register_hook(hook)


def _copy_if_shared(spans: dict[int, tuple[int, int]], index: int, grad: Tensor) -> Tensor | None:
    """Return a copy of ``grad`` if it shares memory with a gradient in ``spans``, or None.

    The graph returns all gradients before autograd stores the first one. No gradient has been freed
    by then, so equal addresses mean shared memory. The hook refers to ``spans`` and not to the
    parameter: a reference to the parameter would form a cycle through autograd hooks, which is
    never garbage-collected.
    """
    if index in spans:  # the first gradient of another backward pass
        spans.clear()
    # Byte range [first, last) of the gradient: the last element is at sum((n_i - 1) * stride_i).
    last_element = 0
    for size, stride in zip(grad.shape, grad.stride(), strict=True):
        last_element += (size - 1) * stride
    first = grad.data_ptr()
    last = first + grad.element_size() * (last_element + 1)
    # Linear in the number of gradients so far; a layer has about ten parameters.
    is_shared = False
    for other_first, other_last in spans.values():
        is_shared = is_shared or (first < other_last and other_first < last)
    spans[index] = (first, last)
    return grad.clone() if is_shared else None


def graphs_recompute() -> bool:
    """Return whether torch recomputes the result of an autograd Function inside a compiled graph.

    torch 2.11 traces the operations of the Function without the tags that request recomputation and saves the results
    of matmuls: it raises no error and saves no memory. torch 2.9 and 2.13 recompute; 2.10 and 2.12 are not measured.
    """
    return Version(torch.__version__).release[:2] not in ((2, 10), (2, 11), (2, 12))


def require_recompute_in_graphs() -> None:
    """Raise ``ValueError`` if torch drops the recomputation of parts of a compiled layer."""
    if not graphs_recompute():
        raise ValueError(
            "compile 'layer' and recompute of parts of a layer (selective, or recompute_keep_core_attn): torch "
            f"{torch.__version__} may keep in a compiled graph what it was to recompute: use recompute_granularity "
            "'full' without recompute_keep_core_attn, torch 2.13, or set compile to null"
        )


def _require_traceable_dropout(layer: nn.Module) -> None:
    """Raise ``ValueError`` if ``layer`` draws dropout from a per-rank random stream.

    The stream is selected by setting the generator's state, which a graph cannot contain.
    """
    # Dropout draws per-rank numbers only on sharded activations, and only with a positive
    # probability.
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


def _require_traceable_documents(layers: Sequence[nn.Module], inputs: Iterable[Any]) -> None:
    """Raise ``ValueError`` if a CPU batch packs documents and attention runs sdpa once per
    document.

    The number of calls depends on the batch, so one static graph cannot contain the calls.
    """
    packed = any(isinstance(value, PackedDocuments) and value.ids.device.type == "cpu" for value in inputs)
    if not packed:
        return
    backends: set[str] = set()
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, CoreAttention):
                backends.add(module.attention_backend)
    if backends & _PER_DOCUMENT:
        raise ValueError(
            f"compile 'layer' and cu_seqlens with attention_backend {sorted(backends)} on a CPU: attention then runs "
            "for each document by itself, as many calls as the batch has documents, which one graph cannot hold; set "
            "attention_backend to 'auto', or compile to null"
        )
