"""Which rows experts process: the choices of a micro-batch sorted by expert, and the way there and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.architectures.experts import most_blocks
from nxd_memopt.modules.moe.capacity import MOST_EXACT, chosen_tokens, counts_before

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

    Shapes do not depend on the routing. Arguments as in ``assign``.
    """
    rows = num_experts * capacity
    slots = torch.where(positions < capacity, experts * capacity + positions, rows)
    return Assignment(*_choices_of_slots(slots, rows), None)


def assign_blocks(experts: Tensor, first_expert: int | Tensor, num_experts: int, block_size: int) -> Assignment:
    """Return the rows of the choices of this rank's experts in ``most_blocks`` blocks: none is dropped.

    Each expert has the blocks that its choices fill, and its last one is padded. What is left over are blocks of
    padding. Shapes do not depend on the routing, nor the graph on the rank.

    Args:
        experts: ``[N, k]``, the chosen experts, also the experts of other ranks.
        first_expert: index of this rank's first expert, a number or a 0-dim tensor.
        num_experts: E, the experts of this rank.
        block_size: B, rows of a block.
    """
    tokens, top_k = experts.shape
    key = experts - first_expert
    # Choices of other ranks' experts are one more expert, whose rows are cut off.
    key = torch.where((key >= 0) & (key < num_experts), key, num_experts)
    chosen = chosen_tokens(key, num_experts + 1).narrow(0, 0, num_experts)  # [E, N]
    # A block of an expert exists if the expert has more choices than fit in the blocks before it.
    first_rows = torch.arange(0, tokens, block_size, device=key.device)
    blocks = (first_rows < chosen.sum(1, keepdim=True)).sum(1, dtype=torch.float32)  # [E]
    ends = (blocks * torch.ones(num_experts, num_experts, device=key.device).tril()).sum(1)
    num_blocks = most_blocks(tokens, top_k, num_experts, block_size)
    rows = num_blocks * block_size
    slots = counts_before(chosen) + ((ends - blocks) * block_size).unsqueeze(1)
    slots = F.pad(slots, (0, 0, 0, 1), value=rows).gather(0, key.t()).t()
    # A block belongs to the expert after as many experts as end before it.
    numbers = torch.arange(num_blocks, device=key.device).unsqueeze(1)
    block_experts = (numbers >= ends).sum(1, dtype=torch.float32).clamp(max=num_experts - 1).to(torch.int32)
    return Assignment(*_choices_of_slots(slots, rows), None, block_experts)


def _choices_of_slots(slots: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the choice of each row, 0 for padding, and which rows are not padding, both ``[rows]``.

    Args:
        slots: ``[N, k]``, the row of each choice; ``rows`` for choices without one.
        rows: number of rows.
    """
    assert max(rows, slots.numel()) < MOST_EXACT, f"{rows} rows of {slots.numel()} choices are more than fp32 counts"
    numbers = torch.arange(slots.numel(), dtype=torch.float32, device=slots.device)
    # One more row: choices without one overwrite each other there.
    empty = torch.full((rows + 1,), -1.0, device=slots.device)
    choices = empty.scatter_(0, slots.reshape(-1).to(torch.int64), numbers).narrow(0, 0, rows)
    return choices.clamp(min=0).to(torch.int32), choices >= 0


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
