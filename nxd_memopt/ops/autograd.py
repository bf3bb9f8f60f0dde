"""Helpers of hand-written autograd Functions: backward without second derivatives, inputs that are saved early.

PyTorch's checkpoint ends a recomputation as soon as every tensor that backward needs has been
saved again. A ``torch.autograd.Function`` saves its tensors after its forward. The last Function of
a recomputed region would therefore compute and communicate in vain: one matmul and one reduction
per recomputed layer. ``save_inputs_first`` is a separate Function that only saves tensors; the
Function after it reads the saved tensors from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class ReusableContext:
    """Context manager that enters a new context of ``factory`` each time.

    A retained graph recomputes its regions in every backward pass, and enters the context each
    time.
    """

    def __init__(self, factory: Callable[[], AbstractContextManager[Any]]) -> None:
        self._factory = factory
        # a stack, for entries that nest
        self._active: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        context = self._factory()
        context.__enter__()
        self._active.append(context)

    def __exit__(self, *exception: Any) -> bool | None:
        return self._active.pop().__exit__(*exception)


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the ``backward`` of a ``torch.autograd.Function`` raise under ``create_graph=True``.

    torch's ``once_differentiable`` raises only if the incoming gradient itself requires a gradient.
    With it, the gradient of a norm of ``d sum(y) / dx`` would silently lack terms.

    Raises:
        RuntimeError: second derivatives were requested.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        # grad mode is enabled in backward only under create_graph=True
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("second derivatives of parallel layers are not supported: leave create_graph out")
        return backward(ctx, *grads)

    return once


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``, or ``tensor`` itself if it already has ``dtype``.

    Use it for results of a Function's forward: if forward returns a no-op ``.to()``, torch 2.11's
    dynamo silently drops the Function's gradients.
    """
    if tensor.dtype == dtype:
        return tensor
    return tensor.to(dtype)


def as_contiguous(tensor: Tensor) -> Tensor:
    """Return ``tensor.contiguous()``, or ``tensor`` if it is contiguous; see ``as_dtype``."""
    if tensor.is_contiguous():
        return tensor
    return tensor.contiguous()


class SavedInputs:
    """Handle of the tensors that ``save_inputs_first`` saved.

    Args:
        is_read: for each tensor whether backward reads it; None for all.
        added: tensors without a gradient that are saved after them.
    """

    _ctx: Any = None

    def __init__(self, is_read: Sequence[bool] | None = None, added: Sequence[Tensor] = ()) -> None:
        self.is_read = is_read
        self.added = added

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the saved tensors, None for one that is not read, and then the added ones.

        Call once, in the backward of the Function that uses them.
        """
        return self._ctx.saved_tensors

    def needs_grad(self) -> tuple[bool, ...]:
        """Return for each tensor whether its gradient is needed."""
        # without the handle, which is the first input
        return self._ctx.needs_input_grad[1:]


class _SaveInputs(torch.autograd.Function):
    """Identity Function that saves its inputs and returns views of them."""

    @staticmethod
    def forward(ctx: Any, handle: SavedInputs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        is_read = handle.is_read or [True] * len(tensors)
        kept = (x if is_kept else None for x, is_kept in zip(tensors, is_read, strict=True))
        ctx.save_for_backward(*kept, *handle.added)
        handle.added = ()  # a reference would keep what a hook moves
        # The handle reads the tensors from this node, so checkpoint's saved-tensor hooks apply to
        # them: offloading moves them, and a recomputation ends when the last one is saved again.
        handle._ctx = ctx
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        del ctx
        return None, *grads


def save_inputs_first(
    *tensors: Tensor, is_read: Sequence[bool] | None = None, added: Sequence[Tensor] = ()
) -> tuple[SavedInputs | None, tuple[Tensor, ...]]:
    """Save ``tensors`` for backward; pass the returned handle and tensors to the next Function.

    The handle is ``None`` under torch.compile, whose partitioner recomputes only what backward
    needs.

    Args:
        tensors: tensors to save.
        is_read: for each tensor whether backward reads it; others are not kept. Default all.
        added: tensors to save without a gradient; none under torch.compile.
    """
    if torch.compiler.is_compiling():
        return None, tensors
    handle = SavedInputs(is_read, added)
    return handle, _SaveInputs.apply(handle, *tensors)  # pyright: ignore[reportReturnType]


def link_saved_inputs(ctx: Any, handle: SavedInputs | None, *tensors: Tensor) -> None:
    """Link the inputs saved by ``save_inputs_first`` to the Function that uses them.

    Call in that Function's forward, with its last inputs. Without a handle the inputs are saved
    here.
    """
    ctx.handle = handle
    if handle is None:
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors)


def saved_inputs(ctx: Any) -> tuple[tuple[Tensor, ...], tuple[bool, ...]]:
    """Return the linked tensors, and for each tensor whether its gradient is needed.

    Call in the backward of the Function that called ``link_saved_inputs``.
    """
    if ctx.handle is None:
        # the last inputs of the Function are the ones that link_saved_inputs saved
        return ctx.saved_tensors, ctx.needs_input_grad[-ctx.count :]
    return ctx.handle.tensors(), ctx.handle.needs_grad()


def require_first_backward(ctx: Any) -> None:
    """Raise ``RuntimeError`` in a second backward of a Function whose first one overwrites its saved tensors."""
    if getattr(ctx, "is_overwritten", False):
        raise RuntimeError("this graph allows one backward: compute the loss again, or drop retain_graph")
    ctx.is_overwritten = True


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which operations on the device of ``tensor`` keep its dtype."""
    # A meta tensor has no autocast; without autocast an own context would cost host time in each layer.
    if tensor.is_meta or not torch.is_autocast_enabled(tensor.device.type):
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def cast_if_autocast_enabled(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast floating-point tensors to the autocast dtype, as autocast does for a matmul: not float64.

    Needed by autograd Functions, because their backward runs without autocast.
    """
    # The device of the tensors, not of the backend: on Neuron the backend may query the runtime
    # for its device, which is not possible inside a compiled layer.
    device_type = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    results: list[Tensor | None] = []
    for tensor in tensors:
        # of one byte: weights that are stored in float8, whose scale is applied later
        if tensor is not None and tensor.is_floating_point() and 1 < tensor.itemsize < 8:
            results.append(tensor.to(dtype))
        else:
            results.append(tensor)
    return tuple(results)
