"""Autograd function of a gated activation and its down projection in float8, which recomputes the activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nxd_memopt.ops.activation import gated_activation, gated_activation_gradient
from nxd_memopt.ops.autograd import (
    SavedInputs,
    as_dtype,
    first_derivative_only,
    link_saved_inputs,
    require_first_backward,
    saved_inputs,
)
from nxd_memopt.ops.fp8 import FORWARD_DTYPE, as_columns, as_rows, magnitudes, product
from nxd_memopt.parallel_layers.functional.fp8_linear import (
    RowGradient,
    recipe_of,
    reduced_products,
    weight_columns,
    weight_rows,
    weight_sizes_of,
)
from nxd_memopt.parallel_layers.functional.linear import ActivationSharding


class Fp8GatedRowParallel(torch.autograd.Function):
    """``Y = reduce((act(G) * U) W^t)`` on sequence-first rows; see ``functional.gated_mlp``.

    Saves G, U and W. The recomputed activation has the magnitudes of forward, so that it is rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        comm: ActivationSharding,
        hidden_act: str,
        handle: SavedInputs | None,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
    ) -> Tensor:
        ctx.comm, ctx.hidden_act = comm, hidden_act
        recipe = recipe_of(comm)
        link_saved_inputs(ctx, handle, gate, up, weight)
        activated = gated_activation(gate, up, hidden_act)
        ctx.sizes = magnitudes(activated, recipe)
        ctx.weight_sizes = weight_sizes_of(comm, weight)
        rows = as_rows(activated, ctx.sizes, FORWARD_DTYPE)
        del activated
        pair = (rows, weight_rows(comm, weight, ctx.weight_sizes))
        return as_dtype(reduced_products(comm, gate.shape, [pair], gate.dtype, fast=True).wait(), gate.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first_backward(ctx)
        (gate, up, weight), (_, _, needs_weight) = saved_inputs(ctx)
        gradient = RowGradient(ctx.comm, grad, needs_columns=needs_weight)
        operand = weight_columns(ctx.comm, weight, ctx.weight_sizes)
        (activated_grad,) = gradient.products([operand], gate.dtype)
        # One kernel recomputes the activation and overwrites gate and up with their gradients.
        activated = gated_activation_gradient(gate, up, activated_grad, ctx.hidden_act)
        weight_grad = None
        if needs_weight:
            columns = as_columns(activated, ctx.sizes, FORWARD_DTYPE)
            weight_grad = product(gradient.columns(), columns, weight.dtype)
        # gate and up are overwritten: with new versions autograd rejects a use of the old values.
        torch.autograd.graph.increment_version((gate, up))
        return None, None, None, gate, up, weight_grad
