"""Compiles each decoder layer of a model with torch.compile."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from nxd_memopt.backends import backend
from nxd_memopt.memory.recompute import is_passed_over
from nxd_memopt.memory.wrapping import Forward, is_wrapped, unwrap_forward, wrap_forward
from nxd_memopt.modules.attention import CoreAttention
from nxd_memopt.modules.dropout import ParallelDropout
from nxd_memopt.ops.packed import PackedDocuments

_BY_DOCUMENT = {"auto", "sdpa"}  # attention backends that call sdpa for each document, on CPUs


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
    chunks: list[list[nn.Module]] = []
    for layer in layers:
        if is_passed_over(layer):
            chunks[-1].append(layer)
        else:
            chunks.append([layer])
    for chunk in chunks:
        wrap_forward(chunk[0], "compile", functools.partial(CompiledForward, chunk))


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

    Args:
        layers: whose parameters the graph reads.
        forward: of the first of ``layers``.
    """

    def __init__(self, layers: Sequence[nn.Module], forward: Forward) -> None:
        self._layers, self._forward = layers, forward
        self._compiled = backend.compile(forward)
        self._gradients = _Gradients()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        _require_traceable_documents(self._layers, (*args, *kwargs.values()))
        if torch.is_grad_enabled():
            self._gradients.watch(self._layers)
        try:
            return self._compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise RuntimeError(
                f"a decoder layer cannot be compiled as one graph: {error}\nSet compile to null to run it eagerly, or "
                "change what torch.compile names above: a hook or replaced module inside the layer, inputs of ever new "
                "shapes, or a compiler that is missing"
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(copy.deepcopy(self._layers, memo), copy.deepcopy(self._forward, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledForward, (self._layers, self._forward)


class _Gradients:
    """Gives each parameter a gradient of its own memory.

    Where two parameters have equal gradients, as the biases of GPT-NeoX's two parallel branches do, Inductor computes
    one and returns two views of it (seen with torch 2.13). Autograd takes both over as ``.grad``, since it looks at
    references to the tensors only. What is then added in place to one, by the next micro-batch, by clipping or by a
    reduction over ranks, is added to the other too.

    A hook on each parameter sees the gradient before autograd takes it over, and copies one that overlaps another.
    """

    def __init__(self) -> None:
        self._watched = WeakIdKeyDictionary()  # of parameters, whose == is no identity
        self._indices = itertools.count()
        self._spans: dict[int, tuple[int, int]] = {}

    def watch(self, layers: Sequence[nn.Module]) -> None:
        """Put the hook on each parameter that does not have it yet: a loaded state may have replaced some."""
        for layer in layers:
            for param in layer.parameters():
                if param.requires_grad and param not in self._watched:
                    index = self._watched[param] = next(self._indices)
                    param.register_hook(functools.partial(_arrived, self._spans, index))


def _arrived(spans: dict[int, tuple[int, int]], index: int, grad: Tensor) -> Tensor | None:
    """A copy of ``grad`` if it shares memory with one in ``spans``.

    All gradients of a graph are there before the first is taken over, so none has been freed and its memory used again.
    The hook refers to ``spans`` alone: with a reference to the parameter it would never be collected.
    """
    if index in spans:  # the first gradient of another backward pass
        spans.clear()
    first = grad.data_ptr()
    last = first + grad.element_size() * (
        1 + sum((n - 1) * stride for n, stride in zip(grad.shape, grad.stride(), strict=True))
    )
    is_shared = any(first < other_last and other_first < last for other_first, other_last in spans.values())
    spans[index] = (first, last)
    return grad.clone() if is_shared else None


class _Product(torch.autograd.Function):
    """A matmul as this library's layers make it: inside an autograd Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.t() @ grads[0]


@functools.cache
def graphs_recompute() -> bool:
    """Whether this torch recomputes, inside a compiled graph, what an autograd Function computed; found by trying.

    torch 2.11 traces the Function's operations without the tags that ask for their recomputation, and keeps the results
    of matmuls: no error, no memory saved. torch 2.9 and 2.13 do what is asked.
    """

    def square(x: Tensor, weight: Tensor) -> Tensor:
        return _Product.apply(x, weight).sin()

    def recomputed(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(square, x, weight, use_reentrant=False)

    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    x = torch.ones(4, 2, requires_grad=True)
    weight = torch.ones(2, 64, requires_grad=True)  # x @ weight, of 256 elements, is larger than both
    compiled = torch.compile(recomputed, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(x, weight)
    return max(kept) < 4 * 64


def require_recompute_in_graphs() -> None:
    """Raise ``ValueError`` where torch drops the recomputation of parts of a compiled layer."""
    if not graphs_recompute():
        raise ValueError(
            f"compile 'layer' and recompute of parts of a layer (selective, or recompute_keep_core_attn): torch "
            f"{torch.__version__} keeps in a compiled graph what it was to recompute: use recompute_granularity 'full' "
            "without recompute_keep_core_attn, torch 2.13, or set compile to null"
        )


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


def _require_traceable_documents(layers: Sequence[nn.Module], inputs: Iterable[Any]) -> None:
    """PyTorch's attention is called for each document by itself, and no graph holds calls of unknown number."""
    packed = any(isinstance(each, PackedDocuments) and each.ids.device.type == "cpu" for each in inputs)
    if not packed:
        return
    backends = {m.attention_backend for layer in layers for m in layer.modules() if isinstance(m, CoreAttention)}
    if backends & _BY_DOCUMENT:
        raise ValueError(
            f"compile 'layer' and cu_seqlens with attention_backend {sorted(backends)} on a CPU: attention then runs "
            "for each document by itself, as many calls as the batch has documents, which one graph cannot hold; set "
            "attention_backend to 'math', or compile to null"
        )
