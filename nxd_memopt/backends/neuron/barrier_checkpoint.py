"""Activation checkpointing for devices that compile a full step: a barrier keeps the recomputation.

A compiler that sees forward and backward in one graph merges equal work, and with it the recomputation into the forward
pass. A barrier on ``[*saved inputs, grad of the output]`` makes the recomputation depend on the gradient, so that it is
other work and cannot start before backward has come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nxd_memopt.backends.base import Backend, ContextPair


@dataclass
class _Region:
    """What is run twice; ``leaves`` holds ``None`` where a saved tensor goes."""

    backend: Backend
    function: Callable[..., Any]
    recompute_context: Any
    structure: pytree.TreeSpec
    leaves: list[Any]
    rng_states: tuple[Tensor, Tensor]
    autocast: dict[str, Any]
    output_structure: pytree.TreeSpec | None = None

    def run(self, tensors: list[Tensor]) -> list[Any]:
        waiting = iter(tensors)
        leaves = [next(waiting) if leaf is None else leaf.value for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        outputs, self.output_structure = pytree.tree_flatten(self.function(*args, **kwargs))
        return outputs


@dataclass(frozen=True)
class _Constant:
    value: Any


class _BarrierCheckpoint(torch.autograd.Function):
    """Keeps the tensors of a region's arguments; backward runs the region again behind a barrier."""

    @staticmethod
    def forward(ctx: Any, region: _Region, forward_context: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        del anchor  # requires a gradient, so that parameters inside the region get theirs whatever the arguments do
        ctx.region = region
        ctx.save_for_backward(*tensors)
        with torch.no_grad(), forward_context:
            return tuple(region.run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _require_plain_backward()
        region: _Region = ctx.region
        inputs, output_grads = _behind_barrier(region.backend, ctx.saved_tensors, grads)
        needed = ctx.needs_input_grad[3:]
        leaves = [tensor.detach().requires_grad_(needs) for tensor, needs in zip(inputs, needed, strict=True)]
        with _replayed(region):
            outputs = region.run(leaves)
        both = zip(outputs, output_grads, strict=True)
        pairs = [(output, grad) for output, grad in both if isinstance(output, Tensor) and output.requires_grad]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return None, None, None, *(leaf.grad for leaf in leaves)


def _require_plain_backward() -> None:
    """The nested backward pass has no second derivative, and adds to ``grad`` of every parameter inside."""
    if torch.is_grad_enabled():
        raise ValueError("recomputed regions have no second derivatives: create_graph=True needs a model without them")
    if not torch.autograd._is_checkpoint_valid():  # pyright: ignore[reportPrivateImportUsage]
        raise ValueError(
            "recomputed regions give gradients to backward() without inputs=: torch.autograd.grad and inputs= would "
            "miss parameters, or add to the others' grad; call backward() and read grad"
        )


def _behind_barrier(
    backend: Backend, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
) -> tuple[list[Tensor], list[Tensor | None]]:
    present = [grad for grad in grads if grad is not None]
    fresh = iter(backend.optimization_barrier([*saved, *present]))
    return [next(fresh) for _ in saved], [None if grad is None else next(fresh) for grad in grads]


@contextmanager
def _replayed(region: _Region) -> Iterator[None]:
    """The random states, the precision and the streams that the forward pass had."""
    now = _rng_states(region.backend)
    _set_rng_states(region.backend, region.rng_states)
    try:
        with region.recompute_context, torch.enable_grad(), torch.autocast(**region.autocast):
            yield
    finally:
        _set_rng_states(region.backend, now)


def _rng_states(backend: Backend) -> tuple[Tensor, Tensor]:
    return backend.get_rng_state(), torch.get_rng_state()


def _set_rng_states(backend: Backend, states: tuple[Tensor, Tensor]) -> None:
    backend.set_rng_state(states[0])
    torch.set_rng_state(states[1])


def barrier_checkpoint(
    backend: Backend,
    function: Callable[..., Any],
    *args: Any,
    context_fn: Callable[[], ContextPair] | None = None,
    **kwargs: Any,
) -> Any:
    """``Backend.checkpoint`` for a device whose compiler sees the whole step.

    Arguments and results may be nested lists, tuples and dicts of tensors and other values; tensors that ``function``
    computes with and that have a history must be among the arguments.

    Raises:
        ValueError: when no tensor is found in the result. In backward: for ``torch.autograd.grad``, ``inputs=`` and
            ``create_graph=True``, as parameters used inside get their gradients from a nested backward pass.
    """
    forward_context, recompute_context = context_fn() if context_fn else (nullcontext(), nullcontext())
    leaves, structure = pytree.tree_flatten((args, kwargs))
    device_type = backend.device.type
    region = _Region(
        backend,
        function,
        recompute_context,
        structure,
        [None if isinstance(leaf, Tensor) else _Constant(leaf) for leaf in leaves],
        _rng_states(backend),
        {
            "device_type": device_type,
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
        },
    )
    anchor = torch.empty((), device=backend.device, requires_grad=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    outputs = _BarrierCheckpoint.apply(region, forward_context, anchor, *tensors)
    assert region.output_structure is not None
    if not any(isinstance(output, Tensor) for output in outputs):
        raise ValueError(
            f"a recomputed function must return tensors, in lists, tuples and dicts, got "
            f"{[type(output).__name__ for output in outputs]}: gradients would end here"
        )
    return pytree.tree_unflatten(list(outputs), region.output_structure)
