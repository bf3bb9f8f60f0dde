"""Which rows experts process: the choices of a micro-batch sorted by expert, and the way there and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nxd_memopt.modules.moe.capacity import ranks_in_expert, tokens_per_expert
from nxd_memopt.planner.moe_sizes import most_blocks

_MOST_16_BIT = 2**15


@dataclass(frozen=True)
class Assignment:
    """The rows that experts process, sorted by expert.

    Attributes:
        choices: ``[R]``, which of the ``N * k`` choices each row is: token ``choice // k``.
        is_token: ``[R]``, False for rows of padding, whose choice is 0; None without padding.
        offsets: ``[E]`` integers, end of each expert's rows; None if all experts have the same number, and for blocks.
        block_experts: ``[blocks]``, the expert of each of equally long blocks of rows, or None.
        has_rest: after the rows of the last expert there are rows of no expert here: of other ranks' experts, and
            dropped ones.
    """

    choices: Tensor
    is_token: Tensor | None
    offsets: Tensor | None
    block_experts: Tensor | None = None
    has_rest: bool = False

    @property
    def counts(self) -> Tensor | None:
        """``[E]``, rows of each expert; None as ``offsets``."""
        if self.offsets is None:
            return None
        return self.offsets.diff(prepend=self.offsets.new_zeros(1))

    def without_rest(self) -> Assignment:
        """Return the rows of the experts alone; the host waits for their number."""
        if not self.has_rest:
            return self
        assert self.offsets is not None
        return replace(self, choices=self.choices[: int(self.offsets[-1])], has_rest=False)


def assign(
    experts: Tensor,
    positions: Tensor | None,
    num_experts: int,
    capacity: int | None,
    *,
    first_expert: int = 0,
    own_experts: int | None = None,
) -> Assignment:
    """Return the rows of this rank's choices that are not dropped, without padding; all other choices are the rest.

    Args:
        experts: ``[N, k]``, the chosen experts.
        positions: ``[N, k]``, position of each choice in the queue of its expert; None if no choice
            is dropped.
        num_experts: E, experts of all ranks.
        capacity: choices that an expert takes; the positions from it on are dropped.
        first_expert: index of this rank's first expert.
        own_experts: experts of this rank; None for E.
    """
    own_experts = num_experts if own_experts is None else own_experts
    # Radix sort takes a pass for every 8 bits of the key: 16 bits are enough for E.
    key = experts.reshape(-1)
    if num_experts < _MOST_16_BIT:
        key = key.to(torch.int16)
    if own_experts < num_experts:
        # This rank's experts are the first ones, so that their rows begin at 0 on every rank.
        key = (key - first_expert) % num_experts
    if positions is not None:
        assert capacity is not None, "positions are compared with a capacity"
        # Dropped choices are sorted after all experts.
        key = torch.where(positions.reshape(-1) < capacity, key, num_experts)
    sorted_key, choices = key.sort(stable=True)
    # The end of each expert's rows, by bisection: additions to E counters would wait for each other.
    numbers = torch.arange(own_experts, dtype=key.dtype, device=key.device)
    offsets = torch.searchsorted(sorted_key, numbers, right=True, out_int32=True)
    return Assignment(choices, None, offsets, has_rest=positions is not None or own_experts < num_experts)


def assign_padded(experts: Tensor, positions: Tensor, num_experts: int, capacity: int) -> Assignment:
    """Return ``capacity`` rows for each expert: its choices by position, then padding.

    Shapes do not depend on the routing. The arguments are those of ``assign``.
    """
    positions = positions.reshape(-1)
    # One more slot than the experts have: dropped choices overwrite each other there.
    slots = torch.where(positions < capacity, experts.reshape(-1) * capacity + positions, num_experts * capacity)
    empty = torch.full((num_experts * capacity + 1,), -1, dtype=torch.int64, device=slots.device)
    choices = empty.scatter_(0, slots, torch.arange(slots.numel(), device=slots.device))[:-1]
    return Assignment(choices.clamp(min=0), choices >= 0, None)


def assign_blocks(experts: Tensor, first_expert: int | Tensor, num_experts: int, block_size: int) -> Assignment:
    """Return the rows of the choices of this rank's experts in ``most_blocks`` blocks: none is dropped.

    Each expert has the blocks that its choices fill, and its last one is padded. What is left over are blocks of
    padding. Shapes do not depend on the routing, nor the graph on the rank.

    Args:
        experts: ``[N, k]``, the chosen experts, also those of other ranks.
        first_expert: index of this rank's first expert, a number or a 0-dim tensor.
        num_experts: E, the experts of this rank.
        block_size: B, rows of a block.
    """
    tokens, top_k = experts.shape
    key = (experts - first_expert).reshape(-1)
    is_own = (key >= 0) & (key < num_experts)
    # Choices of other ranks' experts are one more expert, whose rows are cut off.
    key = torch.where(is_own, key, num_experts)
    positions = ranks_in_expert(key, key, num_experts + 1, "position")
    blocks = (tokens_per_expert(key, num_experts + 1)[:-1] + block_size - 1) // block_size
    ends = blocks.cumsum(0)
    starts = torch.cat([(ends - blocks) * block_size, ends.new_zeros(1)])
    num_blocks = most_blocks(tokens, top_k, num_experts, block_size)
    rows = num_blocks * block_size
    slots = torch.where(is_own, starts.index_select(0, key) + positions, rows)
    empty = torch.full((rows + 1,), -1, dtype=torch.int64, device=slots.device)
    choices = empty.scatter_(0, slots, torch.arange(slots.numel(), device=slots.device))[:-1]
    # A block belongs to the expert after as many experts as end before it.
    numbers = torch.arange(num_blocks, device=slots.device).unsqueeze(1)
    block_experts = (numbers >= ends).sum(1).clamp(max=num_experts - 1)
    return Assignment(choices.clamp(min=0), choices >= 0, None, block_experts)


def take_rows(x: Tensor, assignment: Assignment, top_k: int) -> Tensor:
    """Return the input ``[R, H]`` of each row; zeros for padding."""
    rows = x.index_select(0, assignment.choices // top_k)
    if assignment.is_token is None:
        return rows
    return rows * assignment.is_token.unsqueeze(1).to(rows.dtype)


def add_rows(
    outputs: Tensor, weights: Tensor, assignment: Assignment, tokens: int, *, masks_padding: bool = False
) -> Tensor:
    """Return the sum ``[N, H]`` of each token's outputs times their weights.

    Args:
        outputs: ``[R, H]``, outputs of the rows.
        weights: ``[N, k]``, weights of the choices.
        assignment: the rows.
        tokens: N.
        masks_padding: leave out rows of padding, whose outputs are zeros from experts without biases.
    """
    # Rows of padding have the weight of choice 0. Times zeros it adds nothing and gets no gradient.
    row_weights = weights.reshape(-1).index_select(0, assignment.choices)
    if masks_padding and assignment.is_token is not None:
        row_weights = row_weights * assignment.is_token.to(row_weights.dtype)
    weighted = (outputs * row_weights.unsqueeze(1)).to(outputs.dtype)
    total = outputs.new_zeros(tokens, outputs.size(1))
    return total.index_add(0, assignment.choices // weights.size(1), weighted)
