"""Gradients that accumulate in a wider dtype than their parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from nxd_memopt.parallel_layers.summed_gradients import is_sequence_parallel, note_accumulation, was_summed


def accumulate_in(
    dtype: torch.dtype, parameters: Iterable[Tensor], owner: object | None = None
) -> list[RemovableHandle]:
    """Accumulate each parameter's gradient in ``param.main_grad`` in ``dtype`` and free
    ``param.grad``.

    A bf16 sum of 256 micro-batches would lose the late ones, because each is about as small as the
    rounding step of the sum. Parameters that already have ``dtype`` keep ``grad``.
    ``parallel_layers.grads`` reads ``main_grad`` instead of ``grad``.

    Args:
        dtype: dtype of the sums.
        parameters: the parameters; those of ``dtype`` are left out.
        owner: the optimizer that reads the sums: when it is gone, gradients stay in ``grad``, for another one.

    Returns:
        Handles that remove the hooks.
    """
    owner_alive = None if owner is None else weakref.ref(owner)
    hook = functools.partial(_add_to_main_grad, dtype, owner_alive)
    handles = []
    for parameter in parameters:
        if parameter.dtype != dtype and parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
    return handles


def _add_to_main_grad(dtype: torch.dtype, owner: weakref.ref[Any] | None, parameter: Any) -> None:
    """Add ``parameter.grad`` to ``parameter.main_grad`` and free it, unless ``owner`` is gone."""
    # Without a gradient the hook of another optimizer has moved it.
    if (owner is not None and owner() is None) or parameter.grad is None:
        return
    # The first micro-batch casts, which allocates the accumulator; later micro-batches add in
    # place. ``grad`` is freed immediately in both cases.
    accumulated = getattr(parameter, "main_grad", None)
    if was_summed(parameter.grad):
        raise ValueError(
            f"a hook has summed the gradient of a parameter of shape {list(parameter.shape)} over the tensor-parallel "
            "ranks before it is added to main_grad: sum main_grad, after the last backward pass of a step"
        )
    if accumulated is None:
        parameter.main_grad = parameter.grad.to(dtype)
    else:
        accumulated.add_(parameter.grad)
    parameter.grad = None
    if is_sequence_parallel(parameter):
        note_accumulation(parameter)


def clear_main_grad(parameters: Iterable[Any], *, set_to_none: bool) -> None:
    """Drop (``set_to_none``) or zero every ``main_grad``."""
    for parameter in parameters:
        if getattr(parameter, "main_grad", None) is None:
            continue
        if set_to_none:
            parameter.main_grad = None
        else:
            parameter.main_grad.zero_()
