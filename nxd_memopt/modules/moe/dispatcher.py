"""Brings tokens to the ranks that have their experts and adds up what comes back.

All functions work on the tokens of one data-parallel rank's micro-batch, ``[N, H]``, which all of
its tensor-parallel ranks have. Expert-parallel ranks are data-parallel ranks with other tokens and
other experts. The experts' outputs are partial sums over the tensor-parallel ranks, and so is what
is returned here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.modules.moe.assignment import Assignment, add_rows, assign, assign_blocks, assign_padded, take_rows
from nxd_memopt.parallel_layers import mappings, parallel_state


class LocalExperts(Protocol):
    """The experts of this rank, as ``modules.moe.Experts``."""

    has_biases: bool  # outputs of rows of padding are not zeros

    def __call__(self, rows: Tensor, counts: Tensor | None, /) -> Any: ...

    def routed(self, x: Tensor, weights: Tensor, assignment: Assignment) -> Tensor: ...


@dataclass(frozen=True)
class Dispatcher:
    """Exchange of tokens between expert-parallel ranks; the identity for one rank.

    Args:
        num_experts: E, experts of all ranks.
        kind: ``"allgather"`` sends every token to every rank, which processes the tokens of its experts;
            all ranks must have equal numbers of tokens. ``"alltoall"`` sends each token to the ranks
            of its experts; without padding the host reads the numbers of rows.
        capacity: choices of a micro-batch that an expert takes; None takes all.
        is_padded: each expert gets exactly ``capacity`` rows of each micro-batch.
        block_size: rows of the blocks of the static form without dropping, which needs ``"allgather"`` between
            expert-parallel ranks; None for exact numbers of rows.
    """

    num_experts: int
    kind: str
    capacity: int | None
    is_padded: bool
    block_size: int | None = None

    def run(self, x: Tensor, weights: Tensor, experts: Tensor, positions: Tensor | None, local: LocalExperts) -> Tensor:
        """Return the experts' weighted outputs for ``x``, ``[N, H]``.

        Args:
            x: ``[N, H]``.
            weights: ``[N, k]``.
            experts: ``[N, k]``.
            positions: ``[N, k]``, position of each choice in the queue of its expert, or None.
            local: the experts of this rank.
        """
        group = parallel_state.get_expert_model_parallel_group()
        if backend.group_size(group) > 1 and self.kind == "allgather":
            return self._all_gather(x, weights, experts, positions, local)
        assignment = self._assign(experts, positions)
        if backend.group_size(group) == 1:
            return local.routed(x, weights, assignment)
        assignment = assignment.without_rest()
        rows = take_rows(x, assignment, experts.size(1))
        if self.is_padded:
            outputs = self._exchange_padded(rows, local)
        else:
            counts = assignment.counts
            assert counts is not None
            outputs = self._exchange(rows, counts, local)
        return add_rows(outputs, weights, assignment, x.size(0), masks_padding=local.has_biases)

    def _assign(self, experts: Tensor, positions: Tensor | None) -> Assignment:
        if self.block_size is not None:
            return assign_blocks(experts, 0, self.num_experts, self.block_size)
        if not self.is_padded:
            return assign(experts, positions, self.num_experts, self.capacity)
        assert positions is not None and self.capacity is not None
        return assign_padded(experts, positions, self.num_experts, self.capacity)

    def _all_gather(
        self, x: Tensor, weights: Tensor, experts: Tensor, positions: Tensor | None, local: LocalExperts
    ) -> Tensor:
        """Process the choices of all ranks' tokens that go to this rank's experts."""
        group = parallel_state.get_expert_model_parallel_group()
        ranks = backend.group_size(group)
        # Forward all-gather, backward reduce-scatter: each rank adds the gradient of its experts.
        # Every rank receives all ranks' tokens, whether its experts take them or not, and no rank waits for numbers of
        # rows.
        gather = mappings.gather_from_sequence_parallel_region
        all_x = gather(x, process_group=group)
        all_weights = gather(weights, process_group=group)
        all_experts = backend.all_gather(experts, group)
        all_positions = None if positions is None else backend.all_gather(positions, group)
        per_rank = self.num_experts // ranks
        if self.block_size is not None:
            first = backend.group_rank_in_graph(group) * per_rank
            mine = assign_blocks(all_experts, first, per_rank, self.block_size)
        elif self.is_padded:
            mine = self._own_padded(all_experts, all_positions, ranks)
        else:
            first = backend.group_rank(group) * per_rank
            mine = assign(
                all_experts, all_positions, self.num_experts, self.capacity, first_expert=first, own_experts=per_rank
            )
        partial = local.routed(all_x, all_weights, mine)
        return mappings.reduce_scatter_to_sequence_parallel_region(partial, process_group=group)

    def _own_padded(self, experts: Tensor, positions: Tensor | None, ranks: int) -> Assignment:
        """Return ``capacity`` rows for each expert of this rank and each source of tokens."""
        assert positions is not None and self.capacity is not None
        group = parallel_state.get_expert_model_parallel_group()
        parts: list[Assignment] = []
        for source_experts, source_positions in zip(experts.chunk(ranks), positions.chunk(ranks), strict=True):
            parts.append(assign_padded(source_experts, source_positions, self.num_experts, self.capacity))
        choices_per_rank = experts.numel() // ranks
        # [source, expert, capacity] -> [expert, source, capacity]; choices count over all sources.
        offsets = torch.arange(ranks, dtype=torch.int32, device=experts.device).unsqueeze(1) * choices_per_rank
        choices = torch.stack([backend.shard(part.choices, 0, group) for part in parts]) + offsets
        is_token = torch.stack([backend.shard(part.is_token, 0, group) for part in parts if part.is_token is not None])
        by_expert = (ranks, self.num_experts // ranks, self.capacity)
        return Assignment(
            choices.view(by_expert).transpose(0, 1).reshape(-1),
            is_token.view(by_expert).transpose(0, 1).reshape(-1),
            None,
        )

    def _exchange(self, rows: Tensor, counts: Tensor, local: LocalExperts) -> Tensor:
        """Send rows to the ranks of their experts, compute, and send the outputs back."""
        group = parallel_state.get_expert_model_parallel_group()
        ranks = backend.group_size(group)
        # [E] rows for each expert -> [source, E/EP] rows from each source for each expert here.
        received = backend.all_to_all(counts, group).view(ranks, -1)
        # The host waits for the device twice here: collectives take the numbers of rows as Python integers.
        sent_rows = counts.view(ranks, -1).sum(1).tolist()
        received_rows = received.sum(1).tolist()
        exchange = mappings.all_to_all_rows_in_expert_parallel_region
        arrived = exchange(rows, sent_rows, received_rows)
        # Rows arrive by source and then by expert: sort by expert, and undo it for the way back.
        expert_of_row = torch.arange(received.numel(), device=rows.device) % received.size(1)
        expert_of_row = expert_of_row.repeat_interleave(received.reshape(-1), output_size=arrived.size(0))
        order = expert_of_row.argsort(stable=True)
        # Each row is a token with one choice of weight 1; the router's weights are applied at the
        # source.
        ones = torch.ones(arrived.size(0), 1, dtype=arrived.dtype, device=arrived.device)
        outputs = local.routed(arrived, ones, Assignment(order, None, received.sum(0).cumsum(0)))
        return exchange(outputs, received_rows, sent_rows)

    def _exchange_padded(self, rows: Tensor, local: LocalExperts) -> Tensor:
        """Exchange ``capacity`` rows per expert and source: all shapes are static."""
        ranks = backend.group_size(parallel_state.get_expert_model_parallel_group())
        exchange = mappings.all_to_all_in_expert_parallel_region
        shape = (ranks, self.num_experts // ranks, -1, rows.size(1))
        # [source, expert, capacity, H] -> [expert, source, capacity, H]
        arrived = exchange(rows).view(shape).transpose(0, 1).reshape(rows.shape)
        outputs = local(arrived, None)
        by_expert = (shape[1], ranks, -1, rows.size(1))
        return exchange(outputs.view(by_expert).transpose(0, 1).reshape(rows.shape))
