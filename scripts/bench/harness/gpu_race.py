"""Times competitors on one device: they take turns in one process, each turn a few calls without a pause.

Before a turn a GPU is kept busy for longer than the host needs to launch the calls, so the
device's work is timed and not the launch latency of Python. The competitor itself can keep it busy:
after a pause a GPU multiplies for some time at a higher clock rate than its power allows all the time.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.profiler import profile

from nxd_memopt.backends import backend
from nxd_memopt.profiling.memory_summary import allocations, memory_summary
from nxd_memopt.profiling.operations import operations
from nxd_memopt.profiling.step_profiler import profiled_activities
from scripts.bench.harness.record import bench_parser

CALLS_A_TURN = 3
_HEAD_START_S = 0.05  # at least
# torch.cuda._sleep counts clock cycles. 2 GHz is above the boost clock of H100 and H200, so that a
# sleep lasts at least as long as it should.
_CYCLES_PER_S = 2_000_000_000
Call = Callable[[], object]


def race_parser(description: str | None, name: str, *, turns: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all races."""
    parser = bench_parser(description, name)
    parser.add_argument("--turns", type=int, default=turns)
    return parser


def parse_on_gpu(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the parsed arguments; exit with an error if the backend is not cuda."""
    args = parser.parse_args()
    if backend.name != "cuda":
        parser.error(f"needs an NVIDIA GPU, the backend is {backend.name}")
    return args


def race(calls: Mapping[str, Call], turns: int, *, busy_s: float = 0.0) -> dict[str, float]:
    """Return the median milliseconds of each competitor over all turns, on a GPU by the device's clock.

    Args:
        calls: competitors.
        turns: of each competitor.
        busy_s: seconds of a turn in which the competitor runs before it is timed, as in training.
    """
    # Competitors take turns so that a change of the GPU's clock rate affects all of them. The first
    # call of a turn is not measured; it gives the launch time of the host. The cache is emptied so
    # that no competitor profits from blocks that the previous one has allocated.
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            gc.collect()
            if backend.name != "cuda":
                times[name] += _host_milliseconds(call)
                continue
            torch.cuda.empty_cache()
            start = time.perf_counter()
            call()
            host_s = time.perf_counter() - start
            torch.cuda.synchronize()
            busy_calls = math.ceil(busy_s / (time.perf_counter() - start))
            times[name] += _milliseconds(call, host_s, busy_calls)
    return {name: statistics.median(measured) for name, measured in times.items()}


def _milliseconds(call: Call, host_s: float, busy_calls: int) -> list[float]:
    """Return the milliseconds of ``CALLS_A_TURN`` calls.

    Args:
        call: competitor.
        host_s: upper bound of the seconds that the host needs to launch one call.
        busy_calls: calls before them.
    """
    # While the device sleeps, the host queues all calls with an event between each two. The sleep
    # exceeds the launch time of the calls by half, so the device never waits for the host, and the
    # time between two events is the device's work alone.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS_A_TURN + 1)]
    head_start_s = max(_HEAD_START_S, 1.5 * CALLS_A_TURN * host_s)
    torch.cuda._sleep(int(head_start_s * _CYCLES_PER_S))
    for _ in range(busy_calls):
        call()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def _host_milliseconds(call: Call) -> list[float]:
    """Return the milliseconds of ``CALLS_A_TURN`` calls after one that is not measured, by the host's clock."""
    times: list[float] = []
    for _ in range(CALLS_A_TURN + 1):
        start = time.perf_counter()
        call()
        backend.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[1:]


def peak_gib(call: Call) -> float:
    """Return the peak of memory that ``call`` allocates, in GiB, without earlier allocations."""
    gc.collect()
    if backend.name != "cuda":
        return round(max(size for _, size in memory_over_time(call)) / 2**30, 3)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)


def memory_over_time(call: Call) -> list[tuple[float, int]]:
    """Return seconds and the bytes that ``call`` holds then, from torch's profiler."""
    backend.synchronize()
    with profile(activities=profiled_activities(), profile_memory=True) as recorded:
        call()
        backend.synchronize()
    memory = memory_summary(allocations(operations(recorded, backend.device.type), {}, {}, 0), None, "")
    timeline = memory["timeline"]
    totals = [sum(sizes) for sizes in zip(*timeline["bytes"].values(), strict=True)]
    return list(zip(timeline["time_s"], totals, strict=True))


def first_line(error: Exception) -> str:
    """Return the error's type and first line, for the column ``failure``."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"
