"""Helpers for hand-written backward passes: no second derivatives, no copies that are none, contexts that repeat."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class ReusableContext:
    """Enters a new context of ``factory`` each time: a graph that is retained recomputes its regions again."""

    def __init__(self, factory: Callable[[], AbstractContextManager[None]]) -> None:
        self._factory = factory
        self._active: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._factory()
        context.__enter__()
        self._active.append(context)

    def __exit__(self, *exception: Any) -> bool | None:
        return self._active.pop().__exit__(*exception)


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the ``backward`` of a ``torch.autograd.Function``: under ``create_graph=True`` it raises.

    torch's ``once_differentiable`` raises only when the incoming gradient itself requires one: the gradient of a norm
    of ``d sum(y) / dx`` would lack its terms.

    Raises:
        RuntimeError: second derivatives were asked for.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("second derivatives of parallel layers are not supported: leave create_graph out")
        return backward(ctx, *grads)

    return once


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)`` of what a Function returns, left out where it would do nothing.

    torch 2.11's dynamo traces a Function whose forward returns such a copy that is none as one without gradients. No
    error says so.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def as_contiguous(tensor: Tensor) -> Tensor:
    """``tensor.contiguous()``, likewise."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()
