"""Plots of a profile as PNG files: memory over time, memory at the peak, time by module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_memopt.files import complete_file
from nxd_memopt.profiling.memory_summary import CATEGORIES
from nxd_memopt.profiling.time_summary import PASSES, by_kind_of_module

MIB = 2**20
_BARS = 12


def draw_memory(memory: Mapping[str, Any], path: Path) -> None:
    """Draw the bytes of each category over the step, with the peak."""
    figure, axes = _figure("memory of a step by category")
    timeline = memory["timeline"]
    times = [seconds * 1e3 for seconds in timeline["time_s"]]
    shown = [name for name in CATEGORIES if any(timeline["bytes"][name])]
    series = [[size / MIB for size in timeline["bytes"][name]] for name in shown]
    axes.stackplot(times, series, labels=shown, step="post")
    axes.axvline(memory["peak_time_s"] * 1e3, color="black", linestyle=":", label="peak")
    axes.set_xlabel("ms, slowed down by the recording of stacks")
    axes.set_ylabel("MiB")
    axes.legend(loc="upper left", fontsize="small")
    _save(figure, path)


def draw_layers(memory: Mapping[str, Any], path: Path) -> None:
    """Draw the activations at the peak by layer."""
    figure, axes = _figure("activations at the peak by layer")
    layers = memory["activations_by_layer"]
    axes.barh(list(layers), [size / MIB for size in layers.values()])
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="x-small")
    axes.set_xlabel("MiB")
    _save(figure, path)


def draw_time(time: Mapping[str, Any], path: Path) -> None:
    """Draw the time of the slowest kinds of modules by pass."""
    figure, axes = _figure("time of a step by module")
    modules = dict(list(by_kind_of_module(time["modules"]).items())[:_BARS])
    start = [0.0] * len(modules)
    for stage in PASSES:
        values = [times[stage] * 1e3 for times in modules.values()]
        axes.barh(list(modules), values, left=start, label=stage)
        start = [left + value for left, value in zip(start, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend(fontsize="small")
    _save(figure, path)


def _figure(title: str) -> tuple[Any, Any]:
    # A figure without pyplot needs no display and keeps no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    with complete_file(path) as file:
        figure.savefig(file, dpi=120, bbox_inches="tight")
