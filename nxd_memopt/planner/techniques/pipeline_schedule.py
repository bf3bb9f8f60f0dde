"""In which order the stages of a pipeline run forwards and backwards, as lists.

P ranks have V chunks of consecutive layers each (``virtual_pipeline_model_parallel_size``): chunk c of rank r is stage
``c * P + r`` of ``P * V``. A step has M micro-batches. V = 1 is the schedule 1F1B (arXiv:2104.04473, section 2.2.1),
V above 1 the interleaved one (section 2.2.2).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nxd_memopt.config import require_divisible


class Compute(NamedTuple):
    """The forward or the backward of one micro-batch by one chunk of a rank."""

    is_forward: bool
    micro_batch: int
    chunk: int


class InFlight(NamedTuple):
    """What else a rank has while it computes.

    Args:
        counts: for each chunk the micro-batches whose forward has run and whose backward has not, without the one that
            is computed.
        with_gradients: chunks of which a backward has ended, so that their gradients exist.
    """

    counts: tuple[int, ...]
    with_gradients: frozenset[int]


class Neighbor(NamedTuple):
    """What another rank computes before or after a ``Compute``."""

    rank: int
    compute: Compute


_BACKWARD = 2  # duration of a backward in forwards
Unit = tuple[Compute, ...]
"""Computations between two exchanges of a rank with its neighbors."""


def training_units(stages: int, chunks: int, micro_batches: int, rank: int) -> list[Unit]:
    """Return the computations of a training step in the order in which ``rank`` runs them.

    Before a unit the rank receives all inputs of the unit and sends the results of the unit before it, in one
    exchange. In the steady state of V above 1 a unit is a forward and a backward: with an exchange between the two,
    the first and the last rank of the ring would wait for each other.

    Args:
        stages: P, the ranks of the pipeline.
        chunks: V, the chunks of layers of each rank.
        micro_batches: M.
        rank: position of the rank in the pipeline.

    Raises:
        ValueError: P does not divide M, and V is above 1.
    """
    forwards = [unit[0] for unit in forward_units(stages, chunks, micro_batches)]
    backwards = [Compute(False, each.micro_batch, chunks - 1 - each.chunk) for each in forwards]
    warmup = stages - rank - 1
    if chunks > 1:
        require_divisible("micro-batches of a step", micro_batches, "pipeline_model_parallel_size", stages)
        # Chunk 0 of the last rank must have run P micro-batches, and each later chunk too, before the first
        # backward. The factor of 2: a gradient comes back as many ranks later as the activation needed.
        warmup = 2 * warmup + (chunks - 1) * stages
        # With P micro-batches there is one group: all of its forwards come first.
        if micro_batches == stages:
            warmup = len(forwards)
    warmup = min(warmup, len(forwards))
    units: list[Unit] = [(forward,) for forward in forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        if chunks > 1:
            units.append((forward, backward))
        else:
            units += [(forward,), (backward,)]
    units += [(backward,) for backward in backwards[len(forwards) - warmup :]]
    return units


def forward_units(stages: int, chunks: int, micro_batches: int) -> list[Unit]:
    """Return the forwards of every rank in their order; M is any number.

    Groups of P micro-batches run through all chunks one after the other, so that a rank has work while the other
    ranks have the group.
    """
    order: list[Unit] = []
    for start in range(0, micro_batches, stages):
        group = range(start, min(start + stages, micro_batches))
        order += [(Compute(True, each, chunk),) for chunk in range(chunks) for each in group]
    return order


def source(compute: Compute, stages: int, chunks: int, rank: int) -> Neighbor | None:
    """Return whose result ``compute`` of ``rank`` receives; None for the first forward and the first backward."""
    step = -1 if compute.is_forward else 1
    return _neighbor(compute, stages, chunks, rank, step)


def target(compute: Compute, stages: int, chunks: int, rank: int) -> Neighbor | None:
    """Return who receives the result of ``compute`` of ``rank``; None for the last forward and the last backward."""
    step = 1 if compute.is_forward else -1
    return _neighbor(compute, stages, chunks, rank, step)


def _neighbor(compute: Compute, stages: int, chunks: int, rank: int, step: int) -> Neighbor | None:
    """Return the same pass of a micro-batch ``step`` stages further."""
    stage = compute.chunk * stages + rank + step
    if not 0 <= stage < stages * chunks:
        return None
    return Neighbor(stage % stages, compute._replace(chunk=stage // stages))


@lru_cache(maxsize=512)
def in_flight(stages: int, chunks: int, micro_batches: int, rank: int) -> tuple[tuple[InFlight, ...], ...]:
    """Return for each chunk of ``rank`` what else exists while it computes, each case once.

    Arguments and errors as ``training_units``.
    """
    # Warm-up, one group of P micro-batches in the steady state, and the end: further groups repeat the second.
    micro_batches = min(micro_batches, 3 * stages)
    counts = [0] * chunks
    ended: set[int] = set()
    found: list[set[InFlight]] = [set() for _ in range(chunks)]
    for unit in training_units(stages, chunks, micro_batches, rank):
        for compute in unit:
            if not compute.is_forward:
                counts[compute.chunk] -= 1
            found[compute.chunk].add(InFlight(tuple(counts), frozenset(ended)))
            if compute.is_forward:
                counts[compute.chunk] += 1
            else:
                ended.add(compute.chunk)
    return tuple(tuple(each) for each in found)


def bubble(stages: int, chunks: int, micro_batches: int) -> float:
    """Return the share of a training step in which a rank waits, with equal stages and free communication.

    Arguments as ``training_units``.
    """
    remaining = [training_units(stages, chunks, micro_batches, rank) for rank in range(stages)]
    clock = [0.0] * stages
    arrival: dict[Neighbor, float] = {}
    while any(remaining):
        # The rank whose next inputs are all there; the schedules are free of cycles, so there is one.
        rank = next(rank for rank in range(stages) if _is_ready(remaining[rank], stages, chunks, rank, arrival))
        unit = remaining[rank].pop(0)
        inputs = [needed for each in unit if (needed := source(each, stages, chunks, rank)) is not None]
        clock[rank] = max([clock[rank], *(arrival[needed] for needed in inputs)])
        clock[rank] += sum(1 if each.is_forward else _BACKWARD for each in unit)
        for each in unit:
            arrival[Neighbor(rank, each)] = clock[rank]
    work = (1 + _BACKWARD) * micro_batches * chunks
    return 1 - work / max(clock)


def _is_ready(units: list[Unit], stages: int, chunks: int, rank: int, arrival: dict[Neighbor, float]) -> bool:
    """Return whether all inputs of the first of ``units`` have been computed; False without units."""
    if not units:
        return False
    return all((needed := source(each, stages, chunks, rank)) is None or needed in arrival for each in units[0])
