"""Owns the refusal of second derivatives, which a backward pass written by hand would drop without a word."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


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
