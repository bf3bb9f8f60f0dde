"""The plot of a profile as a PNG file: memory over time. Tables have the other figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_memopt.files import complete_file
from nxd_memopt.profiling.memory_summary import CATEGORIES

MIB = 2**20


def draw_memory(memory: Mapping[str, Any], path: Path) -> None:
    """Draw the bytes of each category over the step, with the peak."""
    # A figure without pyplot needs no display and keeps no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots()
    axes.set_title("memory of a step by category")
    timeline = memory["timeline"]
    shown: list[str] = []
    series: list[list[float]] = []
    # A category that the step does not have would be a line of zeros with an entry in the legend.
    for name in CATEGORIES:
        sizes = timeline["bytes"][name]
        if any(sizes):
            shown.append(name)
            series.append([size / MIB for size in sizes])
    times = [seconds * 1e3 for seconds in timeline["time_s"]]
    axes.stackplot(times, series, labels=shown, step="post")
    axes.axvline(memory["peak_time_s"] * 1e3, color="black", linestyle=":", label="peak")
    axes.set_xlabel("ms, slowed down by the recording of stacks")
    axes.set_ylabel("MiB")
    axes.legend(loc="upper left", fontsize="small")
    with complete_file(path) as file:
        figure.savefig(file, dpi=120, bbox_inches="tight")
