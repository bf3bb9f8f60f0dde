"""Saves an autograd Function's inputs before it computes, so that recomputation stops before its matmul.

PyTorch's checkpoint ends a recomputation as soon as every tensor that backward needs has been saved again. A
``torch.autograd.Function`` saves after its forward, so the last Function of a recomputed region would compute, and
communicate, for nothing: one matmul and one reduction per recomputed layer. ``save_inputs_first`` is a Function that
saves and does nothing else; the Function after it reads the saved tensors from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SavedInputs:
    """Handle of the tensors that ``save_inputs_first`` saved."""

    _ctx: Any = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the saved tensors; call once, in the backward of the Function that uses them."""
        return self._ctx.saved_tensors

    def needs_grad(self) -> tuple[bool, ...]:
        """Return for each tensor whether its gradient is needed."""
        return self._ctx.needs_input_grad[1:]


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: SavedInputs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        handle._ctx = ctx
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        del ctx
        return None, *grads


def save_inputs_first(*tensors: Tensor) -> tuple[SavedInputs | None, tuple[Tensor, ...]]:
    """Save ``tensors`` for backward; pass the returned handle and tensors to the Function that follows.

    The handle is ``None`` under torch.compile, whose partitioner recomputes only what backward needs.
    """
    if torch.compiler.is_compiling():
        return None, tensors
    handle = SavedInputs()
    return handle, _Hold.apply(handle, *tensors)  # pyright: ignore[reportReturnType]


def link_saved_inputs(ctx: Any, handle: SavedInputs | None, *tensors: Tensor) -> None:
    """Call in the following Function's forward with its last inputs, so that ``saved_inputs`` finds them."""
    ctx.handle = handle
    if handle is None:
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors)


def saved_inputs(ctx: Any) -> tuple[tuple[Tensor, ...], tuple[bool, ...]]:
    """Return, in that Function's backward, the tensors and whether the gradient of each is needed."""
    if ctx.handle is None:
        return ctx.saved_tensors, ctx.needs_input_grad[-ctx.count :]
    return ctx.handle.tensors(), ctx.handle.needs_grad()
