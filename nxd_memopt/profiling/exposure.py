"""Splits the time of a device into computation, communication that nothing hides, and idle time."""

from __future__ import annotations

from collections.abc import Iterable

COMMUNICATION = (
    "nccl",
    "gloo:",
    "wait_signal",
    "wait_for_signals",  # a kernel of ours, for peer memory
    "barrier_kernel",
    "put_signal",
    "memcpy ptop",
    "multimem",
)
# Copies between host and device run on copy engines: neither computation nor communication.
_WITH_HOST = ("memcpy htod", "memcpy dtoh")
# Copies within the device, such as copies of a rank's own rows in an all-gather. They do not count
# as computation that hides communication.
_COPIES = ("memcpy dtod", "memcpy128")
Interval = tuple[float, float]


def _is(name: str, kinds: tuple[str, ...]) -> bool:
    """Return whether a kernel's name contains one of ``kinds``."""
    return any(kind in name.lower() for kind in kinds)


def is_communication(name: str) -> bool:
    """Return whether a kernel communicates with other ranks."""
    return _is(name, COMMUNICATION)


def exposure(events: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Split the time of a step into computation, exposed communication and idle time.

    Args:
        events: (name, start, end) of the device's kernels and copies, in one unit of time.

    Returns:
        ``compute``: time with computation. ``exposed_communication``: time with communication
        between ranks and without computation. ``idle``: time with neither; copies within the
        device are neither.
    """
    # busy is the union of computation and communication: busy minus compute is the communication
    # that no computation overlaps.
    # Unions, not sums: kernels of several streams overlap, and their sum may exceed the step.
    named = [event for event in events if not _is(event[0], _WITH_HOST)]
    no_compute = COMMUNICATION + _COPIES
    compute = _union((start, end) for name, start, end in named if not _is(name, no_compute))
    busy = _union((start, end) for name, start, end in named if not _is(name, _COPIES))
    # The step's length is from the first event to the end of the last one, copies included: what
    # is not busy in it is idle.
    every = _union((start, end) for _, start, end in named)
    length = 0.0
    if every:
        length = every[-1][1] - every[0][0]
    return {
        "compute": _total(compute),
        "exposed_communication": _total(busy) - _total(compute),
        "idle": length - _total(busy),
    }


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return sorted disjoint intervals that cover the same times."""
    # In order of their starts, an interval either overlaps the last merged one or is disjoint
    # from all of them. max: the last merged one may end after an interval that it contains.
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _total(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)
