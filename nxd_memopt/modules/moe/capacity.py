"""The queues of the experts: which choices each expert takes if it takes only so many, and their places.

Nothing is sorted and no integers are added up, because Neuron's compiler refuses both or replaces them by
operations on fp32. Choices are counted by sums of zeros and ones in fp32, which are exact below 2^24.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.autograd import without_autocast

MOST_EXACT = 2**24
"""Integers below this number are exact in fp32."""
# Sums of a block are at most its length, which bf16 represents: compilers may round the operands of
# fp32 matmuls to bf16 (neuronx-cc's --auto-cast=matmult) or to TF32.
_BLOCK = 256


def chosen_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """Return 1 where a token has chosen an expert, otherwise 0, ``[E, N]`` fp32.

    Args:
        experts: ``[N, k]``, the chosen experts.
        num_experts: E.
    """
    zeros = torch.zeros(num_experts, experts.size(0), device=experts.device)
    return zeros.scatter_(0, experts.t(), 1.0)


def tokens_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """Return how many tokens have chosen each expert, ``[E]`` fp32; arguments as ``chosen_tokens``."""
    return chosen_tokens(experts, num_experts).sum(1)


def counts_before(chosen: Tensor) -> Tensor:
    """Return the number of ones before each element of its row, ``[E, N]``; ``chosen`` has zeros and ones."""
    num_experts, tokens = chosen.shape
    assert tokens < MOST_EXACT, f"{tokens} tokens are more than fp32 counts"
    # Cumulative sums as matmuls with triangular matrices: within blocks, and over the blocks' sums.
    blocks = F.pad(chosen, (0, -tokens % _BLOCK)).view(num_experts, -1, _BLOCK)
    with without_autocast(chosen):
        counts = blocks @ _ones_above_diagonal(_BLOCK, chosen.device)
        # A single block has nothing before it. Compilers would fold that matmul with a zero, so that a recomputed
        # layer would execute fewer matmuls than were traced, which certify takes for a lost recomputation.
        if blocks.size(1) > 1:
            before = blocks.sum(2) @ _ones_above_diagonal(blocks.size(1), chosen.device)  # [E, blocks]
            counts = counts + before.unsqueeze(2)
    return counts.view(num_experts, -1).narrow(1, 0, tokens)


def _ones_above_diagonal(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, device=device).triu(1)


@torch.no_grad()
def queue_positions(weights: Tensor, experts: Tensor, num_experts: int, policy: str, capacity: int) -> Tensor:
    """Return the position of each choice among those that its expert takes, ``[N, k]`` int32.

    They are counted from 0 in the order of the tokens. Dropped choices have positions of at least ``capacity``.

    Args:
        weights: ``[N, k]``, the weights of the chosen experts.
        experts: ``[N, k]``, the chosen experts, each at most once per token.
        num_experts: E.
        policy: ``"probs"`` takes the highest weights, of equal ones the earlier tokens;
            ``"position"`` takes earlier tokens.
        capacity: choices that an expert takes.

    Raises:
        ValueError: the device cannot find so many highest weights.
    """
    taken = chosen_tokens(experts, num_experts)
    if policy == "probs" and capacity < experts.size(0):
        taken = _highest(weights, experts, taken, capacity)
    positions = torch.where(taken > 0, counts_before(taken), capacity)
    return positions.gather(0, experts.t()).t().to(torch.int32)


def _highest(weights: Tensor, experts: Tensor, chosen: Tensor, capacity: int) -> Tensor:
    """Return 1 for the ``capacity`` highest weights of each expert, otherwise 0, ``[E, N]`` fp32."""
    most = backend.most_of_top_k
    if most is not None and capacity > most:
        raise ValueError(
            f"moe_token_drop_policy 'probs' takes the {capacity:,} highest weights of each expert's tokens, and the "
            f"compiler of the backend {backend.name} finds at most {most:,}: set it to 'position', or use a smaller "
            "micro-batch or moe_expert_capacity_factor"
        )
    lowest = torch.full(chosen.shape, -torch.inf, dtype=weights.dtype, device=weights.device)
    by_expert = lowest.scatter_(0, experts.t(), weights.t())  # [E, N]
    # The lowest weight that is taken; -inf if there are fewer choices than room.
    threshold = torch.topk(by_expert, capacity, dim=1).values.narrow(1, capacity - 1, 1)
    # Not ">": NaN, which topk takes for the highest number, must reach the output.
    above = (~(by_expert <= threshold)).to(chosen.dtype) * chosen
    equal = (by_expert == threshold).to(chosen.dtype) * chosen
    room = capacity - above.sum(1, keepdim=True)
    return above + equal * (counts_before(equal) < room)
