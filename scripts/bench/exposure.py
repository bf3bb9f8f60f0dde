"""Computes from a device profile how much of a step's communication no computation hides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from nxd_memopt.profiling.exposure import exposure


def profiled(step: Callable[[], object], trace: Path | None = None) -> dict[str, float]:
    """Profile one step and return ``exposure`` of it in milliseconds.

    Args:
        step: runs the step.
        trace: file for the Chrome trace (``.json.gz``).
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    # Host events (launches, synchronization) are in the profile too. Times are microseconds.
    events = [event for event in profiler.events() or [] if event.device_type == DeviceType.CUDA]
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    ranges = [(event.name, event.time_range) for event in events]
    return exposure((name, times.start / 1e3, times.end / 1e3) for name, times in ranges)
