"""Experts whose matmuls have float8 operands: the autograd functions of ``ops.cuda.experts``, on every device.

Saved for backward are the tokens, the weights of the choices, and the output of the first matmul, in the dtype of
the run, and magnitudes. Weights are rounded where they are used, as in ``parallel_layers.functional.fp8_linear``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from nxd_memopt.ops.autograd import (
    SavedInputs,
    first_derivative_only,
    link_saved_inputs,
    require_first_backward,
    save_inputs_first,
    saved_inputs,
)
from nxd_memopt.ops.cuda.experts import positions_of
from nxd_memopt.ops.cuda.grouped_matmul import ExpertRows
from nxd_memopt.ops.expert_rows import gated_of_rows, gated_of_rows_gradient, sum_of_rows
from nxd_memopt.ops.fp8 import FORWARD_DTYPE, Fp8Recipe, Operand
from nxd_memopt.ops.fp8_grouped import (
    as_both,
    as_columns,
    as_rows,
    magnitudes,
    product_of_rows,
    product_over_rows,
    weight_columns,
    weight_rows,
)


class _GateUp(torch.autograd.Function):
    """``G_r = x_(token of r) W_e^t``; saves the tokens, not their rows."""

    @staticmethod
    def forward(ctx: Any, rows: ExpertRows, positions: Tensor, recipe: Fp8Recipe, x: Tensor, weight: Tensor) -> Tensor:
        ctx.rows, ctx.recipe = rows, recipe
        ctx.save_for_backward(positions, x, weight)
        ctx.sizes = magnitudes(x, rows, recipe, gathers=True)
        ctx.weight_sizes = magnitudes(weight, None, recipe)
        operand = as_rows(x, rows, ctx.sizes, FORWARD_DTYPE, gathers=True)
        return product_of_rows(operand, weight_rows(weight, ctx.weight_sizes), rows, x.dtype, fast=True)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positions, x, weight = ctx.saved_tensors
        *_, needs_x, needs_weight = ctx.needs_input_grad
        rows: ExpertRows = ctx.rows
        gradient, columns = _gradient(grad, rows, ctx.recipe, gathers=False, needs_columns=needs_weight)
        dx = None
        if needs_x:
            # Rows, transposed weight and product are freed before the gradient of the weight is allocated.
            operand = weight_columns(weight, ctx.weight_sizes)
            dx = sum_of_rows(product_of_rows(gradient, operand, rows, grad.dtype), positions, rows)
            del operand
        del gradient
        dweight = None
        if columns is not None:
            columns_of_x = as_columns(x, rows, ctx.sizes, FORWARD_DTYPE, gathers=True)
            dweight = product_over_rows(columns, columns_of_x, rows, grad.dtype)
        return None, None, None, dx, dweight


class _WeightedDown(torch.autograd.Function):
    """``y_n = sum_j w_nj (act(G) U)_r W_e^t`` over the rows r of token n; see ``ops.cuda.experts``.

    Saves G and U, which their gradients overwrite. dW_e multiplies the weighted activation, which has magnitudes of its
    own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: ExpertRows,
        positions: Tensor,
        recipe: Fp8Recipe,
        hidden_act: str,
        handle: SavedInputs | None,
        gate_up: Tensor,
        weights: Tensor,
        down: Tensor,
    ) -> Tensor:
        ctx.rows, ctx.recipe, ctx.hidden_act = rows, recipe, hidden_act
        link_saved_inputs(ctx, handle, gate_up, weights, down)
        activated = gated_of_rows(gate_up, hidden_act)
        operand = as_rows(activated, rows, magnitudes(activated, rows, recipe), FORWARD_DTYPE)
        del activated
        ctx.weight_sizes = magnitudes(down, None, recipe)
        outputs = product_of_rows(operand, weight_rows(down, ctx.weight_sizes), rows, gate_up.dtype, fast=True)
        return sum_of_rows(outputs, positions, rows, weights)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first_backward(ctx)
        rows: ExpertRows = ctx.rows
        (gate_up, weights, down), (_, _, needs_down) = saved_inputs(ctx)
        gradient, columns = _gradient(grad, rows, ctx.recipe, gathers=True, needs_columns=needs_down)
        # [R, F/T], gradient of the weighted activation; the next kernel overwrites it with the activation itself.
        inner = product_of_rows(gradient, weight_columns(down, ctx.weight_sizes), rows, gate_up.dtype)
        del gradient
        dweights = gated_of_rows_gradient(gate_up, inner, weights, rows, ctx.hidden_act)
        torch.autograd.graph.increment_version(gate_up)
        ddown = None
        if columns is not None:
            columns_of_inner = as_columns(inner, rows, magnitudes(inner, rows, ctx.recipe), FORWARD_DTYPE)
            # before the gradient of the weight is allocated
            del inner
            ddown = product_over_rows(columns, columns_of_inner, rows, gate_up.dtype)
        return None, None, None, None, None, gate_up, dweights, ddown


def _gradient(
    grad: Tensor, rows: ExpertRows, recipe: Fp8Recipe, *, gathers: bool, needs_columns: bool
) -> tuple[Operand, Operand | None]:
    """Return the rows of a gradient in float8, and its columns or None."""
    sizes = magnitudes(grad, rows, recipe, gathers=gathers)
    if needs_columns:
        return as_both(grad, rows, sizes, recipe.gradient_dtype, gathers=gathers)
    return as_rows(grad, rows, sizes, recipe.gradient_dtype, gathers=gathers), None


def fp8_routed_experts(
    x: Tensor,
    weights: Tensor,
    choices: Tensor,
    offsets: Tensor,
    gate_up: Tensor,
    down: Tensor,
    hidden_act: str,
    recipe: Fp8Recipe,
) -> Tensor:
    """Return ``ops.cuda.experts.routed_experts`` with float8 operands, rounded as ``recipe`` says, for each expert."""
    positions = positions_of(choices, weights.numel())
    rows = ExpertRows.of(choices.to(torch.int32), offsets.to(torch.int32), weights.size(1))
    with torch.autocast(x.device.type, enabled=False):
        projected = cast(Tensor, _GateUp.apply(rows, positions, recipe, x, gate_up))
        handle, saved = save_inputs_first(projected, weights, down)
        return cast(Tensor, _WeightedDown.apply(rows, positions, recipe, hidden_act, handle, *saved))
