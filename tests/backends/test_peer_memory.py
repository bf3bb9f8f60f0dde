"""Peer memory without GPUs: its arithmetic, and its order of work in every order in which streams may run."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends.cuda import backend as cuda
from nxd_memopt.backends.cuda import peer_memory
from nxd_memopt.backends.cuda.peer_memory import (
    _OPERATIONS_PER_BYTE,
    PeerAllGather,
    PeerMemory,
    PeerReduction,
    arrivals,
    sum_over_ranks,
)
from tests.simulated_streams import Slot, World

ROWS, TURNS, SCHEDULES = 2, 7, 40


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sum_takes_this_ranks_own_part(size):
    for rank in range(size):
        whole = torch.randn(size, 5, 3, dtype=torch.float64)
        parts, own = whole.clone(), whole[rank].clone()
        parts[rank] = torch.nan
        torch.testing.assert_close(sum_over_ranks(own, parts, rank), whole.sum(0))


@pytest.mark.parametrize(
    ("sources", "pace", "blocks"),
    [
        ([0], 0.0, [[0]]),
        ([2, 1, 0], 0.0, [[2], [1], [0]]),  # each as it arrives
        ([2, 1, 0], 0.9, [[2], [1], [0]]),
        ([2, 1, 0], 1.9, [[2], [1, 0]]),  # two have come while the first was worked on
        ([2, 1, 0], 3.0, [[2, 1, 0]]),
        ([0, 3, 2], 1.9, [[0], [3, 2]]),
        ([0, 3, 2], 5.0, [[0], [3, 2]]),  # rank 3's rows do not lie beside rank 0's
        ([], 1.0, []),
    ],
)
def test_rows_come_when_they_should_have_arrived(sources, pace, blocks):
    assert arrivals(sources, pace) == blocks


def played(monkeypatch, program, size: int, seed: int) -> tuple[int, int, int]:
    """Wrong reads, lost signals and stuck work of one run."""
    world = World(size)

    def summed(own, parts, rank):
        turn = own.label
        for other in range(size):
            if other != rank:
                world.check(parts[other * ROWS :][:ROWS], [("sum", turn, other, rank)] * ROWS)

    with monkeypatch.context() as patch:
        patch.setattr(peer_memory, "torch", world.torch())
        patch.setattr(peer_memory, "_Slot", lambda size_bytes, group, device: Slot(world, size_bytes))
        patch.setattr(peer_memory, "sum_over_ranks", summed)
        patch.setattr(peer_memory, "_GRANULARITY_BYTES", 1)
        world.run(lambda *arguments: program(world, *arguments), lambda group: PeerMemory(group, None))
        stuck = world.play(seed)
    return len(world.wrong), world.lost_signals, stuck


def gathering(world: World, memory, rank: int, turn: int, *, materialize: bool = True) -> PeerAllGather:
    return PeerAllGather(memory, world.made([("row", turn, rank)] * ROWS), materialize=materialize)


def read(world: World, found: PeerAllGather, turn: int, size: int, *, in_pieces: bool) -> None:
    pace = (0.0, 0.6, 1.4, 9.0)[turn % 4]
    parts = found.chunks(pace * _OPERATIONS_PER_BYTE) if in_pieces else [(0, found.wait())]
    for start, rows in parts:
        world.check(rows, [("row", turn, (start + i) // ROWS) for i in range(rows.size(0))])
    if in_pieces and found._is_materialized:
        world.check(found.wait(), [("row", turn, i // ROWS) for i in range(size * ROWS)])


def reduction(world: World, memory, rank: int, turn: int, size: int, pieces: int | None = None) -> PeerReduction:
    """Hands over the first ``pieces`` pieces, or all."""
    found = PeerReduction(memory, size * ROWS)
    for start, _ in found.chunks[:pieces]:
        rows = world.made([("sum", turn, rank, start // ROWS)] * ROWS)
        rows.label = turn
        found.put(start, rows)
    return found


def as_layers_do(world, rank, size, memory) -> None:
    for turn in range(TURNS):
        found = gathering(world, memory, rank, turn, materialize=False)  # column-parallel forward
        read(world, found, turn, size, in_pieces=True)
        reduction(world, memory, rank, turn, size).wait()  # row-parallel forward
        found = gathering(world, memory, rank, -turn)  # column-parallel backward
        sums = reduction(world, memory, rank, -turn, size)
        read(world, found, -turn, size, in_pieces=False)
        sums.wait()


def as_the_head_does(world, rank, size, memory) -> None:
    """The next chunk's gather begins before this one's rows are used."""
    upcoming, sums = gathering(world, memory, rank, 0), None
    for turn in range(TURNS):
        rows = upcoming.wait(copy=True)
        upcoming = gathering(world, memory, rank, turn + 1)
        world.check(rows, [("row", turn, i // ROWS) for i in range(size * ROWS)])
        if sums is not None:
            sums.wait()
        sums = reduction(world, memory, rank, turn, size)
    sums.wait()


def with_failures(world, rank, size, memory) -> None:
    for turn in range(TURNS):
        gathering(world, memory, rank, -turn)  # nobody reads it
        if turn % 2:
            reduction(world, memory, rank, -turn, size, pieces=1).abandon()
        read(world, gathering(world, memory, rank, turn), turn, size, in_pieces=turn % 3 > 0)
        reduction(world, memory, rank, turn, size).wait()


def on_another_stream_each_turn(world, rank, size, memory) -> None:
    for turn in range(TURNS):
        with world.on(world.new_stream()):
            read(world, gathering(world, memory, rank, turn), turn, size, in_pieces=turn % 2 > 0)
            reduction(world, memory, rank, turn, size).wait()


def unread_on_another_stream(world, rank, size, memory) -> None:
    first = world.stream
    for turn in range(TURNS):
        with world.on(world.new_stream()):
            gathering(world, memory, rank, -turn)  # nobody reads it
        with world.on(first):
            reduction(world, memory, rank, turn, size).wait()
            read(world, gathering(world, memory, rank, turn), turn, size, in_pieces=turn % 2 > 0)


def as_replays_do(world, rank, size, memory) -> None:
    """A graph of one gather, which has the same slot in each replay."""
    for turn in range(TURNS):
        memory.barrier()
        read(world, gathering(world, memory, rank, turn), turn, size, in_pieces=turn % 2 > 0)
        memory.barrier()


def replays_beside_another_stream(world, rank, size, memory) -> None:
    """The host takes no turns for what a replay runs."""
    other = world.new_stream()
    for turn in range(TURNS):
        memory.drain()
        started, used_on = dict(memory._started), memory._used_on
        memory.barrier()
        read(world, gathering(world, memory, rank, turn), turn, size, in_pieces=turn % 2 > 0)
        memory.barrier()
        memory._started, memory._used_on = started, used_on
        with world.on(other):
            for eager in range(-2 * turn - 2, -2 * turn):
                read(world, gathering(world, memory, rank, eager), eager, size, in_pieces=turn % 3 > 0)


def after_captures_that_fail(world, rank, size, memory) -> None:
    """At their very end: what they queued never runs."""
    for turn in range(TURNS):
        read(world, gathering(world, memory, rank, turn), turn, size, in_pieces=turn % 2 > 0)
        memory.drain()
        queued, barriers = {stream: len(stream.work) for stream in world.streams[rank]}, world.barriers[rank]
        with pytest.raises(MemoryError), memory.restored_on_failure():
            with world.on(world.new_stream()), memory.captured():
                gathering(world, memory, rank, -turn).wait()
                gathering(world, memory, rank, -turn)  # nobody reads it
            raise MemoryError("the graph")
        for stream in world.streams[rank]:
            while len(stream.work) > queued.get(stream, 0):
                stream.work.pop()
        world.barriers[rank] = barriers


PROGRAMS = (
    after_captures_that_fail,
    as_layers_do,
    as_the_head_does,
    with_failures,
    on_another_stream_each_turn,
    unread_on_another_stream,
    as_replays_do,
    replays_beside_another_stream,
)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_order_of_streams_is_wrong(monkeypatch, program, size):
    for seed in range(SCHEDULES):
        assert played(monkeypatch, program, size, seed) == (0, 0, 0), f"schedule {seed}"


@pytest.mark.parametrize("size", [2, 4])
def test_signals_are_in_line_with_the_rows(monkeypatch, size):
    """In any other stream's place they would be right too, and late."""
    signalling = []
    monkeypatch.setattr(Slot, "signal", lambda slot, rank: signalling.append(slot._world.stream))

    def program(world, rank, size, memory) -> None:
        gathering(world, memory, rank, 0)
        reduction(world, memory, rank, 0, size, pieces=1).abandon()
        assert signalling == [memory.send_stream] * (2 * (size - 1))
        signalling.clear()

    played(monkeypatch, program, size, 0)


_wait = PeerAllGather.wait
FAULTS = [
    (as_replays_do, Slot, "barrier", lambda slot: None),  # replays that do not meet
    (as_the_head_does, PeerAllGather, "wait", lambda gathering, copy=False: _wait(gathering)),  # rows are used late
    (as_layers_do, peer_memory, "_SLOTS", 1),  # a slot is used again at once
]


@pytest.mark.parametrize(("program", "owner", "name", "fault"), FAULTS)
def test_the_simulation_notices_faults(monkeypatch, program, owner, name, fault):
    monkeypatch.setattr(owner, name, fault)
    for size in (2, 4):
        assert any(played(monkeypatch, program, size, seed) != (0, 0, 0) for seed in range(SCHEDULES))


def test_graphs_that_others_capture_take_no_peer_memory(monkeypatch):
    found, memory = object.__new__(cuda.CudaBackend), object()
    group = type("Group", (), {"size": lambda self: 2})()
    found._is_recording, found._peer_memories = False, {group: memory}
    small, large = cuda._PEER_MEMORY_BYTES_AHEAD, cuda._PEER_MEMORY_BYTES
    for capturing in (False, True):
        monkeypatch.setattr(cuda, "_is_capturing", lambda capturing=capturing: capturing)
        assert found._peer_memory(group, large, False) is (None if capturing else memory)
        assert found._peer_memory(group, large - 1, False) is None
        assert found._peer_memory(group, small, True) is (None if capturing else memory)
        with found._recording():
            assert found._peer_memory(group, small, False) is memory
            assert found._peer_memory(group, small - 1, True) is None
