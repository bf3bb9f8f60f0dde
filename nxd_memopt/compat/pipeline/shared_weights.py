"""Keeps weights equal that several stages have: their first values, and the sums of their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers.summed_gradients import gradient_of

SharedWeight = tuple[nn.Parameter, ProcessGroup | None]
"""A parameter of this rank, and the group of the stages that have it; ``shared`` is False on the first of them."""


def copy_from_first_stage(weights: Sequence[SharedWeight]) -> None:
    """Give every stage the values of the first one that has the weight. Every rank of the groups calls."""
    for param, group in weights:
        values = param.detach()
        is_copy: bool = param.shared  # pyright: ignore[reportAttributeAccessIssue]
        # A sum with zeros: on devices that record graphs all ranks then have the same one.
        total = backend.all_reduce(torch.zeros_like(values) if is_copy else values, group)
        values.copy_(total)


@contextmanager
def summed_gradients(weights: Sequence[SharedWeight]) -> Iterator[None]:
    """Sum, at the end of the block, what the block adds to gradients over the stages that have the weight.

    What was there before is a sum already: another one would count it once per stage.
    """
    trained = [weight for weight in weights if weight[0].requires_grad]
    before = [_take_gradient(param) for param, _ in trained]
    yield
    for (param, group), sum_before in zip(trained, before, strict=True):
        grad = gradient_of(param)
        # A stage may have the weight without a gradient, such as an adapter that is off: the others wait for it.
        if grad is None:
            grad = param.grad = torch.zeros_like(param)
        grad.copy_(backend.all_reduce(grad, group))
        if sum_before is not None:
            grad.add_(sum_before)


def _take_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient so far, and let the next one begin from zero."""
    grad = gradient_of(param)
    if grad is None:
        return None
    if grad is param.grad:
        param.grad = None
        return grad
    before = grad.clone()
    grad.zero_()
    return before
