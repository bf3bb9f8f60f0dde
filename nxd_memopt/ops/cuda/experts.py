"""Experts on NVIDIA GPUs: two autograd functions of matmuls on the rows of tokens, sorted by expert.

Narrow matmuls gather the rows while they read them, wide ones read a copy, which is not saved.

Saved for backward are the tokens, the weights of the choices, and the output of the first matmul,
whose gradient overwrites it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from nxd_memopt.architectures.experts import MOST_EXPERTS, copied_columns, copies_rows
from nxd_memopt.ops.autograd import (
    SavedInputs,
    first_derivative_only,
    link_saved_inputs,
    require_first_backward,
    save_inputs_first,
    saved_inputs,
)
from nxd_memopt.ops.cuda.elementwise import KINDS
from nxd_memopt.ops.cuda.grouped_matmul import (
    ExpertRows,
    can_be_tiled,
    has_copy_engine,
    matmul_of_rows,
    matmul_over_rows,
)
from nxd_memopt.ops.cuda.support import can_use_triton, lazy_kernels

_kernels = lazy_kernels("experts_kernels")

_DTYPES = (torch.bfloat16, torch.float16)
_GATED = {"ROWS": 8, "BLOCK": 256, "num_warps": 4}
_GATED_BACKWARD = {"ROWS": 4, "BLOCK": 256, "num_warps": 4}
_SUM = {"BLOCK": 1024, "num_warps": 4}


def can_use_kernels(x: Tensor, gate_up: Tensor, down: Tensor, hidden_act: str) -> bool:
    """Return whether ``routed_experts`` supports these tensors and this activation."""
    if hidden_act not in KINDS or x.dtype not in _DTYPES or not can_use_triton(x, gate_up, down):
        return False
    # The rows of all other operands have the lengths of the weights' rows.
    if not (can_be_tiled(gate_up) and can_be_tiled(down)):
        return False
    return gate_up.size(0) <= MOST_EXPERTS and has_copy_engine(x.device)


class _GateUp(torch.autograd.Function):
    """``G_r = x_(token of r) W_e^t``; saves the tokens, not their rows."""

    @staticmethod
    def forward(ctx: Any, rows: ExpertRows, positions: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(positions, x, weight)
        operand, gathers = _operand(x, rows, weight.size(1))
        return matmul_of_rows(operand, weight, rows, gathers=gathers)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        positions, x, weight = ctx.saved_tensors
        _, _, needs_x, needs_weight = ctx.needs_input_grad
        dx = None
        if needs_x:
            # The gradient of the rows is freed before that of the weight is allocated.
            dx = sum_of_rows(
                matmul_of_rows(grad, weight, ctx.rows, gathers=False, transposes=True), positions, ctx.rows
            )
        dweight = None
        if needs_weight:
            dweight = _gate_up_gradient(grad, x, ctx.rows)
        return None, None, dx, dweight


class _WeightedDown(torch.autograd.Function):
    """``y_n = sum_j w_nj (act(G) U)_r W_e^t`` over the rows r of token n.

    Saves G and U, which their gradients overwrite: a graph supports a single backward. The gradient
    of a weight is ``dY . Y_r = (dY W_e) . (act(G) U)_r``, so Y_r is not needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: ExpertRows,
        positions: Tensor,
        kind: str,
        handle: SavedInputs | None,
        gate_up: Tensor,
        weights: Tensor,
        down: Tensor,
    ) -> Tensor:
        ctx.rows, ctx.kind = rows, kind
        link_saved_inputs(ctx, handle, gate_up, weights, down)
        activated = gated_of_rows(gate_up, kind)
        outputs = matmul_of_rows(activated, down, rows, gathers=False)
        return sum_of_rows(outputs, positions, rows, weights)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first_backward(ctx)
        (gate_up, weights, down), (_, _, needs_down) = saved_inputs(ctx)
        operand, gathers = _operand(grad, ctx.rows, down.size(2))
        # [R, F/T], the gradient of the weighted activation; the next kernel overwrites it with that.
        inner = matmul_of_rows(operand, down, ctx.rows, gathers=gathers, transposes=True)
        dweights = gated_of_rows_gradient(gate_up, inner, weights, ctx.rows, ctx.kind)
        torch.autograd.graph.increment_version(gate_up)
        ddown = None
        if needs_down:
            ddown = matmul_over_rows(operand, inner, ctx.rows, gathers_a=gathers)
        return None, None, None, None, gate_up, dweights, ddown


def _operand(x: Tensor, rows: ExpertRows, columns: int) -> tuple[Tensor, bool]:
    """Return the operand for a matmul of ``columns``, and whether the matmul has to gather its rows."""
    if copies_rows(columns):
        return x.index_select(0, rows.tokens), False
    return x, True


def _gate_up_gradient(grad: Tensor, x: Tensor, rows: ExpertRows) -> Tensor:
    """Return the gradient of the first weight, ``[E, 2 F, H]``.

    Args:
        grad: ``[R, 2 F]``, gradient of the first matmul's output.
        x: ``[N, H]``, the tokens.
        rows: the experts' rows.
    """
    width = x.size(1)
    if not copies_rows(grad.size(1)):
        return matmul_over_rows(grad, x, rows, gathers_b=True)
    # The copy is made for a part of the columns at a time: backward's peak of memory is here.
    dweight = torch.empty(rows.offsets.numel(), grad.size(1), width, dtype=grad.dtype, device=grad.device)
    part = copied_columns(width)
    for start in range(0, width, part):
        stop = min(start + part, width)
        copied = x[:, start:stop].index_select(0, rows.tokens)
        matmul_over_rows(grad, copied, rows, out=dweight[:, :, start:stop])
        # Otherwise this copy would still exist while the next one is made.
        del copied
    return dweight


def gated_of_rows(gate_up: Tensor, kind: str) -> Tensor:
    """Return ``act(gate) * up``, ``[R, F]``, of ``gate_up``, ``[R, 2 F]``."""
    rows, width = gate_up.size(0), gate_up.size(1) // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (-(-rows // _GATED["ROWS"]), -(-width // _GATED["BLOCK"]))
    _kernels().gated_of_rows[grid](gate_up, out, rows, WIDTH=width, KIND=kind, **_GATED)
    return out


def gated_of_rows_gradient(gate_up: Tensor, grad: Tensor, weights: Tensor, rows: ExpertRows, kind: str) -> Tensor:
    """Overwrite ``gate_up`` with its gradient and ``grad`` with the weighted activation.

    Args:
        gate_up: ``[R, 2 F]``.
        grad: ``[R, F]``, gradient of the activation times the weight of its row.
        weights: ``[N, k]``, weights of the choices.
        rows: the experts' rows.
        kind: a value of ``KINDS``.

    Returns:
        Gradient of ``weights``, in their dtype; 0 for choices without a row.
    """
    count, width = grad.shape
    weights = weights.contiguous()
    dweights = torch.zeros_like(weights)
    grid = (-(-count // _GATED_BACKWARD["ROWS"]),)
    arguments = (gate_up, grad, weights, rows.choices, dweights, rows.offsets[-1:])
    _kernels().gated_of_rows_backward[grid](*arguments, count, WIDTH=width, KIND=kind, **_GATED_BACKWARD)
    return dweights


def sum_of_rows(values: Tensor, positions: Tensor, rows: ExpertRows, weights: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows, ``[N, H]``, in fp32, times their weights if given.

    Args:
        values: ``[R, H]``.
        positions: ``[N * k]`` int32, row of each choice; those from the last expert's end on add nothing.
        rows: the experts' rows.
        weights: ``[N, k]``.
    """
    width = values.size(1)
    tokens = positions.numel() // rows.top_k
    out = torch.empty(tokens, width, dtype=values.dtype, device=values.device)
    # without HAS_WEIGHTS the kernel does not read weights: pass any tensor
    given = values if weights is None else weights.contiguous()
    grid = (tokens, -(-width // _SUM["BLOCK"]))
    options = {"WIDTH": width, "TOP_K": rows.top_k, "HAS_WEIGHTS": weights is not None}
    _kernels().add_rows[grid](values, positions, given, out, rows.offsets[-1:], width, **options, **_SUM)
    return out


def positions_of(choices: Tensor, count: int) -> Tensor:
    """Return the row of each of ``count`` choices, int32; a number that no row has for a choice without one."""
    positions = torch.full((count,), choices.numel(), dtype=torch.int32, device=choices.device)
    numbers = torch.arange(choices.numel(), dtype=torch.int32, device=choices.device)
    return positions.scatter_(0, choices, numbers)


def routed_experts(
    x: Tensor,
    weights: Tensor,
    choices: Tensor,
    offsets: Tensor,
    gate_up: Tensor,
    down: Tensor,
    hidden_act: str,
) -> Tensor:
    """Return ``sum_j weights_nj down_e (act(gate_e x_n) * up_e x_n)`` over the choices of each token, ``[N, H]``.

    Sums are in fp32 and rounded once. The graph supports one backward. The kernels support what
    ``can_use_kernels`` says.

    Args:
        x: ``[N, H]``.
        weights: ``[N, k]``, weights of the choices, in any floating-point dtype.
        choices: ``[R]``, the choice of each row, sorted by expert: token ``choice // k``.
        offsets: ``[E]``, end of each expert's rows; rows after the last one are ignored.
        gate_up: ``[E, 2 F, H]``, the gate's rows before those of up.
        down: ``[E, H, F]``.
        hidden_act: a key of ``KINDS``.
    """
    positions = positions_of(choices, weights.numel())
    rows = ExpertRows.of(choices.to(torch.int32), offsets.to(torch.int32), weights.size(1))
    with torch.autocast(x.device.type, enabled=False):
        projected = cast(Tensor, _GateUp.apply(rows, positions, x, gate_up))
        handle, saved = save_inputs_first(projected, weights, down)
        return cast(Tensor, _WeightedDown.apply(rows, positions, KINDS[hidden_act], handle, *saved))
