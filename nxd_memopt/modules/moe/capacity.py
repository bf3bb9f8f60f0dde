"""The queues of the experts: which tokens each keeps if it takes only so many."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks_in_expert(weights: Tensor, experts: Tensor, num_experts: int, policy: str) -> Tensor:
    """Return the position of each choice in the queue of its expert, ``[N, k]``, from 0.

    A choice is dropped if its position reaches the capacity.

    Args:
        weights: ``[N, k]``, the weights of the chosen experts.
        experts: ``[N, k]``, the chosen experts, each at most once per token.
        num_experts: E.
        policy: ``"probs"`` puts the highest weights first, and of equal ones the earlier token;
            ``"position"`` puts earlier tokens first.
    """
    flat = experts.reshape(-1)
    if policy == "probs":
        priority = weights.detach().reshape(-1).argsort(descending=True, stable=True)
    else:
        priority = torch.arange(flat.numel(), device=flat.device)
    # Sort by expert; within an expert the stable sort keeps the order of priority.
    queue = priority[flat[priority].argsort(stable=True)]
    counts = tokens_per_expert(experts, num_experts)
    starts = counts.cumsum(0) - counts
    positions = torch.arange(flat.numel(), device=flat.device) - starts[flat[queue]]
    return torch.empty_like(flat).scatter_(0, queue, positions).view_as(experts)


def tokens_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert was chosen, ``[E]`` int64, without reading the device."""
    flat = experts.reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
