"""Experts with float8 operands from their definition, in float64: each expert is a layer of its own rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.reference_fp8 import Rounding


def experts_in_float8(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    upstream: Tensor,
    rounding: Rounding,
    *,
    sends_rows: bool = False,
) -> list[Tensor]:
    """Return output and gradients of ``x``, ``weights``, ``gate_up`` and ``down``.

    Args:
        x: ``[N, H]``.
        weights: ``[N, k]``.
        chosen: ``[N, k]``, the experts of each token; experts that are not here add nothing.
        gate_up: ``[E, 2 F, H]``.
        down: ``[E, H, F]``.
        upstream: ``[N, H]``, gradient of the output.
        rounding: the recipe.
        sends_rows: outputs are weighted where the token is, after the experts.
    """
    x, weights, gate_up, down, upstream = (each.double() for each in (x, weights, gate_up, down, upstream))
    output, *grads = results = [torch.zeros_like(each) for each in (x, x, weights, gate_up, down)]
    dx, dweights, dgate_up, ddown = grads
    for expert in range(gate_up.size(0)):
        token, slot = torch.nonzero(chosen == expert, as_tuple=True)
        if token.numel() == 0:
            continue
        own = weights[token, slot].unsqueeze(1)
        rows, first, second = x[token], gate_up[expert], down[expert]
        projected = (rounding.over_features(rows) @ rounding.over_features(first).t()).requires_grad_()
        gate, up = projected.chunk(2, 1)
        activated = F.silu(gate) * up
        value = activated.detach()
        results_of_rows = rounding.over_features(value) @ rounding.over_features(second).t()
        output.index_add_(0, token, own * results_of_rows)
        # Backward
        gradient = own * upstream[token] if sends_rows else upstream[token]
        of_experts = torch.ones_like(own) if sends_rows else own
        inner = rounding.over_features(gradient, rounding.gradient) @ rounding.over_tokens(second)
        dweights[token, slot] = ((results_of_rows * upstream[token]) if sends_rows else (inner * value)).sum(1)
        ddown[expert] = rounding.over_tokens(gradient, rounding.gradient).t() @ rounding.over_tokens(of_experts * value)
        (dprojected,) = torch.autograd.grad(activated, projected, inner * of_experts)
        dx.index_add_(0, token, rounding.over_features(dprojected, rounding.gradient) @ rounding.over_tokens(first))
        dgate_up[expert] = rounding.over_tokens(dprojected, rounding.gradient).t() @ rounding.over_tokens(rows)
    return results
