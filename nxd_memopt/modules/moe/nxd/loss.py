"""Load-balancing loss with neuronx-distributed's name and definition."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_memopt.modules.moe.capacity import tokens_per_expert


def load_balancing_loss_func(router_logits: Tensor, num_experts: int, top_k: int) -> Tensor:
    """Return ``E / k * sum_e f_e P_e`` over all rows, a scalar in fp32 (arXiv:2101.03961).

    f_e is the number of choices of expert e divided by the number of rows, and P_e its mean
    probability, both from the softmax in fp64. transformers' loss is k times this one: a coefficient
    from its configs acts 1/k as strongly here.

    Args:
        router_logits: ``[T, E]``, of all layers one after the other.
        num_experts: E.
        top_k: k.
    """
    probabilities = router_logits.softmax(dim=1, dtype=torch.float64)
    chosen = torch.topk(probabilities, top_k).indices
    fractions = tokens_per_expert(chosen, num_experts) / router_logits.size(0)
    loss = num_experts / top_k * (fractions * probabilities.mean(0)).sum()
    return loss.to(torch.float32)
