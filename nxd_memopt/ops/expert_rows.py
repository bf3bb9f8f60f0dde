"""Operations on experts' rows other than matmuls: the gated activation, its gradients, and sums of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_memopt.ops.activation import gated_activation, gated_activation_gradient
from nxd_memopt.ops.cuda import experts as cuda
from nxd_memopt.ops.cuda.elementwise import KINDS
from nxd_memopt.ops.cuda.grouped_matmul import ExpertRows
from nxd_memopt.ops.cuda.support import can_use_triton


def gated_of_rows(gate_up: Tensor, hidden_act: str) -> Tensor:
    """Return ``act(gate) * up``, ``[R, F]``, of ``gate_up``, ``[R, 2 F]``."""
    if hidden_act in KINDS and can_use_triton(gate_up):
        return cuda.gated_of_rows(gate_up, KINDS[hidden_act])
    gate, up = gate_up.float().chunk(2, 1)
    return gated_activation(gate, up, hidden_act).to(gate_up.dtype)


def gated_of_rows_gradient(gate_up: Tensor, grad: Tensor, weights: Tensor, rows: ExpertRows, hidden_act: str) -> Tensor:
    """Return the gradient of ``weights``, ``[N, k]``; see ``ops.cuda.experts``.

    Args:
        gate_up: ``[R, 2 F]``, is overwritten with its gradient.
        grad: ``[R, F]``, gradient of the weighted activation, is overwritten with the weighted activation.
        weights: ``[N, k]``, weights of the choices.
        rows: the experts' rows.
        hidden_act: activation of the gate.
    """
    if hidden_act in KINDS and can_use_triton(gate_up, grad):
        return cuda.gated_of_rows_gradient(gate_up, grad, weights, rows, KINDS[hidden_act])
    end = int(rows.offsets[-1])
    choices = rows.choices[:end]
    gate, up = (half.clone() for half in gate_up[:end].float().chunk(2, 1))
    upstream = grad[:end].float()
    row_weights = weights.flatten()[choices].float().unsqueeze(1)
    activated = gated_activation_gradient(gate, up, upstream * row_weights, hidden_act)
    dweights = torch.zeros_like(weights).flatten()
    dweights[choices] = (upstream * activated).sum(1).to(weights.dtype)
    # last: in fp32 ``upstream`` is the memory of ``grad``
    gate_up[:end] = torch.cat([gate, up], 1)
    grad[:end] = activated * row_weights
    return dweights.view_as(weights)


def sum_of_rows(values: Tensor, positions: Tensor, rows: ExpertRows, weights: Tensor | None = None) -> Tensor:
    """Return the sum ``[N, H]`` of each token's rows ``[R, H]``, in fp32, times their weights ``[N, k]`` if given."""
    if can_use_triton(values):
        return cuda.sum_of_rows(values, positions, rows, weights)
    end = int(rows.offsets[-1])
    added = values[:end].float()
    if weights is not None:
        added = added * weights.flatten()[rows.choices[:end]].float().unsqueeze(1)
    total = added.new_zeros(positions.numel() // rows.top_k, values.size(1))
    return total.index_add(0, rows.tokens[:end], added).to(values.dtype)
