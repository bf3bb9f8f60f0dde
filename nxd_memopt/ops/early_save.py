"""Saves an autograd Function's inputs before it computes, so that recomputation stops before its matmul.

PyTorch's checkpoint ends a recomputation as soon as every tensor that backward needs has been
saved again. A ``torch.autograd.Function`` saves its tensors after its forward. The last Function of
a recomputed region would therefore compute and communicate in vain: one matmul and one reduction
per recomputed layer. ``save_inputs_first`` is a separate Function that only saves tensors; the
Function after it reads the saved tensors from there.
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
        # without the handle, which is the first input
        return self._ctx.needs_input_grad[1:]


class _SaveInputs(torch.autograd.Function):
    """Identity Function that saves its inputs and returns views of them."""

    @staticmethod
    def forward(ctx: Any, handle: SavedInputs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        # The handle reads the tensors from this node, so checkpoint's saved-tensor hooks apply to
        # them: offloading moves them, and a recomputation ends when the last one is saved again.
        handle._ctx = ctx
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        del ctx
        return None, *grads


def save_inputs_first(*tensors: Tensor) -> tuple[SavedInputs | None, tuple[Tensor, ...]]:
    """Save ``tensors`` for backward; pass the returned handle and tensors to the next Function.

    The handle is ``None`` under torch.compile, whose partitioner recomputes only what backward
    needs.
    """
    if torch.compiler.is_compiling():
        return None, tensors
    handle = SavedInputs()
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
