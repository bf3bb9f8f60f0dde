"""Tests of the order of a pipeline's computations: written out by hand, without deadlocks, with the known bubble."""

from __future__ import annotations

import itertools

import pytest

from nxd_memopt.planner.techniques.pipeline_schedule import (
    Compute,
    Neighbor,
    Unit,
    bubble,
    forward_units,
    source,
    target,
    training_units,
)

SIZES = [(stages, chunks) for stages in (2, 3, 4, 8) for chunks in (1, 2, 3)]
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 24)


def spelled(units: list[Unit]) -> str:
    """Forwards as F, backwards as B, each with its micro-batch, and the chunk after a dot if it is not 0."""
    texts = []
    for compute in (each for unit in units for each in unit):
        chunk = f".{compute.chunk}" if compute.chunk else ""
        texts.append(f"{'F' if compute.is_forward else 'B'}{compute.micro_batch}{chunk}")
    return " ".join(texts)


def schedules(stages: int, chunks: int, micro_batches: int) -> list[list[list[Unit]]]:
    """The training schedule of all ranks, if there is one, and that of an evaluation."""
    found = [[forward_units(stages, chunks, micro_batches)] * stages]
    if chunks == 1 or micro_batches % stages == 0:
        found.append([training_units(stages, chunks, micro_batches, rank) for rank in range(stages)])
    return found


def test_one_forward_one_backward() -> None:
    """Two and four stages, four micro-batches (figure 4 of arXiv:2104.04473)."""
    assert spelled(training_units(2, 1, 4, 0)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert spelled(training_units(2, 1, 4, 1)) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert spelled(training_units(4, 1, 4, 0)) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert spelled(training_units(4, 1, 2, 3)) == "F0 B0 F1 B1"


def test_interleaved() -> None:
    """Two ranks with two chunks each, four micro-batches: groups of two micro-batches run through both chunks."""
    assert spelled(training_units(2, 2, 4, 0)) == ("F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3")
    assert spelled(training_units(2, 2, 4, 1)) == ("F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3")


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize(("stages", "chunks"), SIZES)
def test_every_computation_runs_once_and_ranks_never_wait_for_each_other(
    stages: int, chunks: int, micro_batches: int
) -> None:
    """Messages between two ranks are received in the order in which they are sent, and no exchange blocks another.

    The strictest transport: an exchange is over when all of its messages are, and a message needs both of its ranks
    to have reached the exchange with it.
    """
    for ranks in schedules(stages, chunks, micro_batches):
        for units in ranks:
            computed = [each for unit in units for each in unit]
            assert len(set(computed)) == len(computed)
            assert sum(each.is_forward for each in computed) == micro_batches * chunks
        exchanges = [exchanges_of(units, stages, chunks, rank) for rank, units in enumerate(ranks)]
        require_same_order(exchanges)
        require_progress(exchanges)


Message = tuple[Neighbor, Neighbor]


def exchanges_of(units: list[Unit], stages: int, chunks: int, rank: int) -> list[tuple[list[Message], list[Message]]]:
    """What a rank sends and receives before each unit, and after the last one."""
    found = []
    sends: list[Message] = []
    for unit in [*units, ()]:
        needed = [(source(each, stages, chunks, rank), Neighbor(rank, each)) for each in unit]
        found.append((sends, [(giver, own) for giver, own in needed if giver is not None]))
        results = [(Neighbor(rank, each), target(each, stages, chunks, rank)) for each in unit]
        sends = [(own, taker) for own, taker in results if taker is not None]
    return [exchange for exchange in found if any(exchange)]


def require_same_order(exchanges: list[list[tuple[list[Message], list[Message]]]]) -> None:
    for rank, own in enumerate(exchanges):
        for other, others in enumerate(exchanges):
            sent = [message for sends, _ in own for message in sends if message[1].rank == other]
            received = [message for _, receives in others for message in receives if message[0].rank == rank]
            if rank != other:
                assert sent == received


def require_progress(exchanges: list[list[tuple[list[Message], list[Message]]]]) -> None:
    position = [0] * len(exchanges)
    arrived: set[Message] = set()

    def current(rank: int) -> tuple[list[Message], list[Message]]:
        return exchanges[rank][position[rank]] if position[rank] < len(exchanges[rank]) else ([], [])

    while any(position[rank] < len(exchanges[rank]) for rank in range(len(exchanges))):
        before = (list(position), len(arrived))
        for rank in range(len(exchanges)):
            arrived |= {message for message in current(rank)[0] if message in current(message[1].rank)[1]}
        for rank in range(len(exchanges)):
            if any(current(rank)) and arrived.issuperset([*current(rank)[0], *current(rank)[1]]):
                position[rank] += 1
        assert (position, len(arrived)) != before, "all ranks wait"


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"), [(2, 1, 16), (2, 2, 16), (4, 1, 16), (4, 3, 8), (4, 2, 4)]
)
def test_bubble(stages: int, chunks: int, micro_batches: int) -> None:
    """(P - 1) / (V M + P - 1), of section 2.2 of the paper."""
    assert bubble(stages, chunks, micro_batches) == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1))


def most_in_flight(units: list[Unit]) -> int:
    """The largest number of forwards whose backward has not run."""
    signs = [1 if compute.is_forward else -1 for unit in units for compute in unit]
    return max(itertools.accumulate(signs))


def test_most_in_flight() -> None:
    """1F1B keeps P - rank micro-batches, however many a step has, and never more than there are."""
    assert [most_in_flight(training_units(4, 1, 32, rank)) for rank in range(4)] == [4, 3, 2, 1]
    assert most_in_flight(training_units(4, 1, 2, 0)) == 2
    # 2 (P - 1) + (V - 1) P in the warm-up, and one more in the steady state
    assert [most_in_flight(training_units(4, 2, 32, rank)) for rank in range(4)] == [11, 9, 7, 5]


def test_interleaving_needs_whole_groups() -> None:
    with pytest.raises(
        ValueError, match="micro-batches of a step 3 is not divisible by pipeline_model_parallel_size 2"
    ):
        training_units(2, 2, 3, 0)
    assert len(forward_units(2, 2, 3)) == 6


def test_neighbors_of_chunks() -> None:
    """The last rank's chunk 0 goes to the first rank's chunk 1, and its gradient back."""
    assert target(Compute(True, 5, 0), 2, 2, 1) == Neighbor(0, Compute(True, 5, 1))
    assert source(Compute(False, 5, 0), 2, 2, 1) == Neighbor(0, Compute(False, 5, 1))
    assert target(Compute(True, 5, 1), 2, 2, 1) is None
    assert source(Compute(False, 5, 1), 2, 2, 1) is None
    assert source(Compute(True, 5, 0), 2, 2, 0) is None
