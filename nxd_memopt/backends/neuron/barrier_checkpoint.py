"""Activation checkpointing for devices that compile a full step, by an optimization barrier.

A compiler that sees forward and backward in one graph merges equal operations, and so merges the
recomputation into the forward pass. A barrier on ``[*saved inputs, grad of the output]`` makes the
recomputation depend on the gradient. The operations then differ from the forward pass, and cannot
start before backward reaches the region.
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
    """Function that runs twice, with its arguments.

    ``leaves`` has ``None`` in place of each tensor.
    """

    backend: Backend
    function: Callable[..., Any]
    recompute_context: Any
    structure: pytree.TreeSpec
    leaves: list[Any]
    rng_states: tuple[Tensor, Tensor]
    autocast: dict[str, Any]
    output_structure: pytree.TreeSpec | None = None

    def run(self, tensors: list[Tensor]) -> list[Any]:
        # Restore the arguments' structure: the saved tensors replace None, in order.
        next_tensors = iter(tensors)
        leaves = []
        for leaf in self.leaves:
            if leaf is None:
                leaves.append(next(next_tensors))
            else:
                leaves.append(leaf.value)
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        outputs, self.output_structure = pytree.tree_flatten(self.function(*args, **kwargs))
        return outputs


@dataclass(frozen=True)
class _Constant:
    """An argument that is no tensor; the wrapper tells a value of None from a tensor's position."""

    value: Any


class _BarrierCheckpoint(torch.autograd.Function):
    """Save a region's tensor arguments, and recompute the region after a barrier in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        region: _Region,
        forward_context: Any,
        anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Any, ...]:
        # The anchor requires a gradient, so backward runs and the region's parameters get gradients
        # even if no argument requires one.
        del anchor
        ctx.region = region
        ctx.save_for_backward(*tensors)
        with torch.no_grad(), forward_context:
            return tuple(region.run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _require_plain_backward()
        region: _Region = ctx.region
        inputs, output_grads = _through_barrier(region.backend, ctx.saved_tensors, grads)
        needs_grad = ctx.needs_input_grad[3:]  # without region, forward_context and anchor
        # Detached leaves: the nested backward pass ends here and does not run into the history of
        # the arguments.
        leaves = [tensor.detach().requires_grad_(needs) for tensor, needs in zip(inputs, needs_grad, strict=True)]
        with _replayed(region):
            outputs = region.run(leaves)
        differentiable: list[Tensor] = []
        differentiable_grads: list[Tensor | None] = []
        for output, grad in zip(outputs, output_grads, strict=True):
            if isinstance(output, Tensor) and output.requires_grad:
                differentiable.append(output)
                differentiable_grads.append(grad)
        # Accumulates into .grad of the parameters directly, and of the leaves, whose gradients are
        # returned.
        if differentiable:
            torch.autograd.backward(differentiable, differentiable_grads)
        return None, None, None, *(leaf.grad for leaf in leaves)


def _require_plain_backward() -> None:
    """Raise ``ValueError`` unless backward is a plain ``backward()`` call.

    The nested backward pass has no second derivatives, and accumulates into ``grad`` of every
    parameter of the region.
    """
    if torch.is_grad_enabled():
        raise ValueError("recomputed regions have no second derivatives: create_graph=True needs a model without them")
    # torch's reentrant checkpoint reads the same flag: it is False inside torch.autograd.grad and
    # backward(inputs=...).
    if not torch.autograd._is_checkpoint_valid():  # pyright: ignore[reportPrivateImportUsage]
        raise ValueError(
            "recomputed regions give gradients to backward() without inputs=: torch.autograd.grad "
            "and inputs= would miss parameters, or add to the others' grad; call backward() and "
            "read grad"
        )


def _through_barrier(
    backend: Backend,
    saved: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the saved tensors and the output gradients, as results of one common barrier.

    A gradient of None stays None.
    """
    present = [grad for grad in grads if grad is not None]
    # one barrier over inputs and gradients ties the recomputation to the incoming gradient
    fresh = iter(backend.optimization_barrier([*saved, *present]))
    fresh_saved = [next(fresh) for _ in saved]
    fresh_grads: list[Tensor | None] = []
    for grad in grads:
        if grad is None:
            fresh_grads.append(None)
        else:
            fresh_grads.append(next(fresh))
    return fresh_saved, fresh_grads


@contextmanager
def _replayed(region: _Region) -> Iterator[None]:
    """Restore the random states, autocast settings and contexts of the forward pass."""
    # The host generator is saved too: the region may draw on either device.
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
    """Implement ``Backend.checkpoint`` for a device whose compiler sees the full step.

    Arguments and results may be nested lists, tuples and dicts of tensors and other values. Tensors
    with an autograd history that ``function`` uses must be among the arguments.

    Raises:
        ValueError: no tensor is found in the result. In backward: for ``torch.autograd.grad``,
            ``inputs=`` and ``create_graph=True``, because parameters of the region get their
            gradients from a nested backward pass.
    """
    forward_context: Any = nullcontext()
    recompute_context: Any = nullcontext()
    if context_fn:
        forward_context, recompute_context = context_fn()
    leaves, structure = pytree.tree_flatten((args, kwargs))
    # Only tensors pass through the autograd Function, which saves them. The region stores the other
    # arguments, and None for each tensor: a reference would keep the tensor alive even where a
    # saved-tensor hook has replaced it.
    tensors: list[Tensor] = []
    constants: list[_Constant | None] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            constants.append(None)
        else:
            constants.append(_Constant(leaf))
    # Backward restores the random states and the autocast settings of this call.
    device_type = backend.device.type
    autocast = {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
    }
    region = _Region(
        backend,
        function,
        recompute_context,
        structure,
        constants,
        _rng_states(backend),
        autocast,
    )
    anchor = torch.empty((), device=backend.device, requires_grad=True)
    outputs = _BarrierCheckpoint.apply(region, forward_context, anchor, *tensors)
    assert region.output_structure is not None
    if not any(isinstance(output, Tensor) for output in outputs):
        raise ValueError(
            f"a recomputed function must return tensors, in lists, tuples and dicts, got "
            f"{[type(output).__name__ for output in outputs]}: gradients would end here"
        )
    return pytree.tree_unflatten(list(outputs), region.output_structure)
