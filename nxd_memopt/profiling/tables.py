"""The tables of a profile, which its text, its HTML and a comparison of two profiles have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_memopt.profiling.step_profiler import FORMAT
from nxd_memopt.profiling.time_summary import PASSES, by_kind_of_module

MODULES = 25
"""Rows of a table of modules."""


@dataclass(frozen=True)
class Quantity:
    """A number with the unit in which it is shown.

    Args:
        value: in seconds, bytes or as a part of 1.
        unit: ``ms``, ``MiB``, ``%`` or ``""``.
        signed: the sign is shown.
    """

    value: float
    unit: str
    signed: bool = False

    def __str__(self) -> str:
        scale = {"ms": 1e3, "MiB": 1 / 2**20, "%": 100.0, "": 1.0}[self.unit]
        digits = {"ms": 3, "MiB": 2, "%": 1, "": 0}[self.unit]
        sign = ""
        if self.signed:
            sign = "+"
        return f"{self.value * scale:{sign},.{digits}f} {self.unit}".strip()


Cell = str | Quantity


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Args:
        title: heading.
        columns: names of the columns.
        rows: cells.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def lines(self) -> list[str]:
        """Return the table as aligned text."""
        texts = [self.columns, *(tuple(str(cell) for cell in row) for row in self.rows)]
        widths = [max(len(row[index]) for row in texts) for index in range(len(self.columns))]
        lines = [self.title]
        for row in texts:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  " + "  ".join(cells).rstrip())
        return lines


def read_profile(directory: Path) -> list[dict[str, Any]]:
    """Return the profile of each rank, rank 0 first.

    Raises:
        ValueError: the directory has no profile, or one of another version.
    """
    files = sorted(directory.glob("rank*.json"), key=lambda file: int(file.stem.removeprefix("rank")))
    if not files or files[0].name != "rank0.json":
        raise ValueError(f"{directory} has no rank0.json: name the directory that nxd-memopt profile has written")
    ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file, rank in zip(files, ranks, strict=True):
        if rank.get("format") != FORMAT:
            raise ValueError(f"{file} has format {rank.get('format')}, and this version reads {FORMAT}: profile again")
    return ranks


def mean_step_s(profile: Mapping[str, Any]) -> float:
    """Return the mean time of the timed steps."""
    return sum(profile["step_s"]) / len(profile["step_s"])


def tables(ranks: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the tables of a profile: of rank 0, and one row for each rank."""
    profile = ranks[0]
    time = profile["time"]
    step_s = mean_step_s(profile)
    modules: list[tuple[Cell, ...]] = []
    for name, times in list(by_kind_of_module(time["modules"]).items())[:MODULES]:
        columns = (*(times[stage] for stage in PASSES), sum(times.values()))
        modules.append((name, *(Quantity(seconds, "ms") for seconds in columns)))
    classes = _rows(time["classes"], "ms", total=step_s)
    found = [
        Table("Ranks", ("rank", "step", "peak memory"), [_rank_row(rank) for rank in ranks]),
        Table(f"Time by class of kernels ({time['clock']})", ("class", "time", "of the step"), classes),
        Table("Time by module (* stands for all layers)", ("module", *PASSES, "total"), modules),
        Table("Communication", ("stream", "time"), _rows(time["communication"], "ms")),
    ]
    if profile["counters"]:
        counters = [(name, f"{value:.4g}") for name, value in profile["counters"].items()]
        found.append(Table("Counters, for each step", ("counter", "value"), counters))
    return found + memory_tables(profile)


def _rows(values: Mapping[str, float], unit: str, *, total: float | None = None) -> list[tuple[Cell, ...]]:
    """Return a row for each name with its value and, with ``total``, the value's part of the total."""
    rows: list[tuple[Cell, ...]] = []
    for name, value in values.items():
        row: tuple[Cell, ...] = (name.replace("_", " "), Quantity(value, unit))
        if total is not None:
            row = (*row, Quantity(value / total, "%"))
        rows.append(row)
    return rows


def memory_tables(profile: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a rank's memory; its tensors' bytes where allocations are not seen."""
    memory = profile["memory"]
    if memory is None:
        return [Table("Memory, by the shapes of tensors", ("category", "bytes"), _rows(profile["owned_bytes"], "MiB"))]
    peak = memory["peak_bytes"]
    categories = _rows(memory["at_peak"] | {"sum": peak}, "MiB", total=peak)
    largest: list[tuple[Cell, ...]] = []
    for each in memory["largest"]:
        names = (each["category"], each["module"], each["operator"], " < ".join(each["stack"]))
        largest.append((Quantity(each["bytes"], "MiB"), *names))
    # Names of layers and modules keep their underscores.
    layers = [(name, Quantity(size, "MiB")) for name, size in memory["activations_by_layer"].items()]
    return [
        Table("Memory at the peak", ("category", "bytes", "of the peak"), categories),
        Table("Activations at the peak, by layer", ("layer", "bytes"), layers),
        Table("Largest tensors at the peak", ("bytes", "category", "module", "operator", "stack"), largest),
    ]


def _rank_row(rank: Mapping[str, Any]) -> tuple[Cell, ...]:
    peak: Cell = "not reported"
    if rank["memory"] is not None:
        peak = Quantity(rank["memory"]["peak_bytes"], "MiB")
    return str(rank["rank"]), Quantity(mean_step_s(rank), "ms"), peak


def headline(profile: Mapping[str, Any]) -> list[str]:
    """Return what was profiled, and how its figures are to be read."""
    first, last = profile["steps"]
    lines = [
        f"{profile['model']}, {profile['parameters']:,} parameters on rank 0 of {profile['world_size']}; "
        f"backend {profile['backend']} ({profile['device']}), torch {profile['torch']}",
        f"time: mean of steps {first} to {last}; memory: step {last + 1}",
    ]
    memory = profile["memory"]
    if memory is None:
        lines.append(f"memory: {profile['memory_refusal']}")
    else:
        lines.append(f"memory counts {memory['source']}")
        if memory["allocator_peak_bytes"] is not None:
            lines.append(f"the allocator's own peak: {Quantity(memory['allocator_peak_bytes'], 'MiB')}")
    return [*lines, *profile["notes"]]


def comparison(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Table]:
    """Return the tables of the differences between rank 0 of two profiles."""
    columns = ("A", "B", "B - A", "change")
    classes = _differences(first["time"]["classes"], second["time"]["classes"], "ms")
    modules = _differences(_module_times(first), _module_times(second), "ms")
    found = [
        Table("Step", ("", *columns), [_difference("step", mean_step_s(first), mean_step_s(second), "ms")]),
        Table("Time by class of kernels", ("class", *columns), classes),
        Table("Time by module", ("module", *columns), modules[:MODULES]),
    ]
    one, other = first["memory"], second["memory"]
    if one is None or other is None:
        return found
    first_sums = one["at_peak"] | {"sum": one["peak_bytes"]}
    second_sums = other["at_peak"] | {"sum": other["peak_bytes"]}
    layers = _differences(one["activations_by_layer"], other["activations_by_layer"], "MiB")
    return [
        *found,
        Table("Memory at the peak", ("category", *columns), _differences(first_sums, second_sums, "MiB")),
        Table("Activations at the peak, by layer", ("layer", *columns), layers),
    ]


def _module_times(profile: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each kind of module, all passes together."""
    modules = by_kind_of_module(profile["time"]["modules"])
    return {name: sum(times.values()) for name, times in modules.items()}


def _differences(first: Mapping[str, float], second: Mapping[str, float], unit: str) -> list[tuple[Cell, ...]]:
    """Return a row for each name of either mapping, the largest difference first."""
    names = list(dict.fromkeys((*first, *second)))
    names.sort(key=lambda name: -abs(second.get(name, 0.0) - first.get(name, 0.0)))
    return [_difference(name, first.get(name, 0.0), second.get(name, 0.0), unit) for name in names]


def _difference(name: str, first: float, second: float, unit: str) -> tuple[Cell, ...]:
    change: Cell = "-"
    if first:
        change = Quantity(second / first - 1, "%", signed=True)
    return name, Quantity(first, unit), Quantity(second, unit), Quantity(second - first, unit, signed=True), change
