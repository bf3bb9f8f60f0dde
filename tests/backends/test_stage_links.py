"""Tests of pipeline messages as all-gathers over pairs: both ends run them in one order, and every rank has a pair."""

from __future__ import annotations

import itertools

import pytest
import torch

from nxd_memopt.backends.neuron.stage_links import ordered_transfers, pairs_of_link
from nxd_memopt.planner.techniques.pipeline_schedule import Neighbor, forward_units, training_units
from tests.pipeline.test_schedule import exchanges_of

Step = tuple[frozenset[int], tuple[Neighbor, Neighbor]]


def steps_of(rank: int, stages: int, micro_batches: int, *, trains: bool) -> list[Step]:
    """The all-gathers of a rank in order: the two ranks of each, and its message."""
    units = forward_units(stages, 1, micro_batches)
    if trains:
        units = training_units(stages, 1, micro_batches, rank)
    found: list[Step] = []
    for sends, receives in exchanges_of(units, stages, 1, rank):
        tensor = torch.empty(0)
        sent = [(tensor, taker.rank) for _, taker in sends]
        received = [(tensor, giver.rank) for giver, _ in receives]
        for transfer in ordered_transfers(sent, received, rank):
            message = (sends if transfer.is_sent else receives)[transfer.index]
            found.append((frozenset((transfer.low, transfer.low + 1)), message))
    return found


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
def test_ranks_never_wait_for_each_other(stages: int) -> None:
    """A rank runs its all-gathers one after the other, and each waits until the other rank has come to it."""
    for micro_batches, trains in itertools.product((1, 2, 3, 4, 5, 8, 9, 17), (False, True)):
        remaining = [steps_of(rank, stages, micro_batches, trains=trains) for rank in range(stages)]
        assert sum(map(len, remaining)) == 2 * (stages - 1) * micro_batches * (1 + trains)
        while any(remaining):
            ready = [
                (low, low + 1)
                for low in range(stages - 1)
                if remaining[low] and remaining[low + 1] and remaining[low][0] == remaining[low + 1][0]
            ]
            assert ready, f"{stages} stages, {micro_batches} micro-batches: all wait"
            for pair in ready:
                for rank in pair:
                    del remaining[rank][0]


def test_pairs() -> None:
    """Two pipelines of four ranks, and two of three: every rank is in one pair."""
    pipelines = [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert pairs_of_link(pipelines, 0) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert pairs_of_link(pipelines, 2) == pairs_of_link(pipelines, 0)
    assert pairs_of_link(pipelines, 1) == [[2, 4], [3, 5], [0, 6], [1, 7]]
    assert pairs_of_link([[0, 2, 4], [1, 3, 5]], 0) == [[0, 2], [1, 3], [4, 5]]
    with pytest.raises(ValueError, match="1 pipelines of 3 stages leave a rank without a pair"):
        pairs_of_link([[0, 1, 2]], 0)
