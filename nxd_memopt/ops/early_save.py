"""Owns saving a Function's tensors before it computes: a recomputation that only needs them then stops in time.

PyTorch's checkpoint ends a recomputation as soon as every tensor that backward needs has been saved again. A
``torch.autograd.Function`` saves after its forward, so the one that ends a region would compute, and communicate, in
vain. ``hold`` is a Function of its own that saves and does nothing else; the one behind it reads what it saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Held:
    """Handle of the tensors that ``hold`` saved."""

    _ctx: Any = None

    def tensors(self) -> tuple[Tensor, ...]:
        """To be called once, in the backward of the Function that uses them."""
        return self._ctx.saved_tensors

    def needs_grad(self) -> tuple[bool, ...]:
        """For each tensor whether its gradient is wanted."""
        return self._ctx.needs_input_grad[1:]


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Held, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        handle._ctx = ctx
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        del ctx
        return None, *grads


def hold(*tensors: Tensor) -> tuple[Held | None, tuple[Tensor, ...]]:
    """Save ``tensors`` for backward; the Function behind takes the returned handle and tensors.

    ``None`` in a graph that is compiled: there what backward does not need is not computed again anyway.
    """
    if torch.compiler.is_compiling():
        return None, tensors
    handle = Held()
    return handle, _Hold.apply(handle, *tensors)  # pyright: ignore[reportReturnType]


def bind(ctx: Any, handle: Held | None, *tensors: Tensor) -> None:
    """In the forward of the Function behind: where ``saved`` finds ``tensors``, its last inputs."""
    ctx.handle = handle
    if handle is None:
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> tuple[tuple[Tensor, ...], tuple[bool, ...]]:
    """In its backward: the tensors, and whether the gradient of each is wanted."""
    if ctx.handle is None:
        return ctx.saved_tensors, ctx.needs_input_grad[-ctx.count :]
    return ctx.handle.tensors(), ctx.handle.needs_grad()
