"""Helpers for hand-written backward passes: no second derivatives, no copies that are none, contexts that repeat."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class ReusableContext:
    """Context manager that enters a new context of ``factory`` each time.

    A retained graph recomputes its regions in every backward pass, and enters the context each
    time.
    """

    def __init__(self, factory: Callable[[], AbstractContextManager[None]]) -> None:
        self._factory = factory
        # a stack, for entries that nest
        self._active: list[AbstractContextManager[None]] = []

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
