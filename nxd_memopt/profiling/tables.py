"""The tables of a profile, which its text, its HTML and a comparison of two profiles have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nxd_memopt.profiling.memory_summary import CATEGORIES, in_layer_order
from nxd_memopt.profiling.step_profiler import FORMAT
from nxd_memopt.profiling.time_summary import PASSES, by_kind_of_module

MODULES = 25
"""Rows of a table of modules."""


@dataclass(frozen=True)
class Quantity:
    """A number with the unit in which it is shown.

    Args:
        value: in seconds, bytes or as a part of 1.
        unit: ``s``, ``ms``, ``MiB``, ``%`` or ``""``.
        signed: the sign is shown.
    """

    value: float
    unit: str
    signed: bool = False

    def __str__(self) -> str:
        scale = {"s": 1.0, "ms": 1e3, "MiB": 1 / 2**20, "%": 100.0, "": 1.0}[self.unit]
        digits = {"s": 1, "ms": 3, "MiB": 2, "%": 1, "": 0}[self.unit]
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
        columns: list[list[str]] = []
        for index in range(len(self.columns)):
            column = [row[index] for row in texts]
            width = max(len(text) for text in column)
            # Numbers end at the right, below each other.
            if index and any(isinstance(row[index], Quantity) for row in self.rows):
                columns.append([text.rjust(width) for text in column])
            else:
                columns.append([text.ljust(width) for text in column])
        return [self.title, *("  " + "  ".join(row).rstrip() for row in zip(*columns, strict=True))]


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
    """Return the mean time of the timed steps: of a profile, or of its CUDA graph."""
    return sum(profile["step_s"]) / len(profile["step_s"])


def tables(ranks: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the tables of a profile: of rank 0, in a pipeline of a rank of each stage, and one row for each rank."""
    profile = ranks[0]
    found = [
        Table("Step", ("", "time", "tokens/s", "MFU", "peak memory"), _step_rows(profile)),
        Table("Ranks", ("rank", "step", "peak memory"), [_rank_row(rank) for rank in ranks]),
    ]
    if profile.get("pipeline") is None:
        return [*found, *_time_tables(profile), *memory_tables(profile), *run_tables(profile)]
    columns = ("rank", "stages", "layers", "waits", "of the step", "equal stages wait")
    found.append(Table("Messages between stages", columns, [_waiting_row(rank) for rank in ranks]))
    for stage in _of_stages(ranks):
        # Names of modules are the complete model's, so that the titles alone tell the stages apart.
        place = f"; rank {stage['rank']}, stage {_stages(stage)}"
        of_stage = [*_time_tables(stage), *memory_tables(stage)]
        found += [replace(table, title=table.title + place) for table in of_stage]
    return found + run_tables(profile)


def _of_stages(ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first rank with each of the stages of a pipeline, in their order."""
    first: dict[str, Mapping[str, Any]] = {}
    for rank in ranks:
        first.setdefault(_stages(rank), rank)
    return list(first.values())


def _stages(rank: Mapping[str, Any]) -> str:
    return ", ".join(map(str, rank["pipeline"]["stages"]))


def _waiting_row(rank: Mapping[str, Any]) -> tuple[Cell, ...]:
    """Return what a rank waits for its neighbors, and what it would with equal stages and free messages."""
    layers = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in rank["pipeline"]["layers"])
    waits = rank["time"]["waiting_for_stages_s"]
    measured = (Quantity(waits, "ms"), Quantity(waits / mean_step_s(rank), "%"))
    return str(rank["rank"]), _stages(rank), layers, *measured, Quantity(rank["pipeline"]["ideal_wait"], "%")


def _time_tables(profile: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a rank's time."""
    time = profile["time"]
    found = [
        Table(
            f"Time by class of kernels ({time['clock']})",
            ("class", "time", "of the step"),
            _rows(time["classes"], "ms", total=mean_step_s(profile)),
        ),
        Table(
            "Time by module (* stands for all layers)",
            ("module", *PASSES, "total", "of the step"),
            _module_rows(profile),
        ),
        Table("Communication", ("stream", "time"), _rows(time["communication"], "ms")),
    ]
    if profile["counters"]:
        counters = [(name, f"{value:.4g}") for name, value in profile["counters"].items()]
        found.append(Table("Counters, for each step", ("counter", "value"), counters))
    return found


def _step_rows(profile: Mapping[str, Any]) -> list[tuple[Cell, ...]]:
    """Return the profiled step, and the step with the run's CUDA graph where it was timed."""
    peak = None
    if profile["memory"] is not None:
        peak = profile["memory"]["peak_bytes"]
    graph = profile.get("graph")
    steps = [("profiled", mean_step_s(profile), peak)]
    if graph is not None:
        steps.append(("with the CUDA graph", mean_step_s(graph), graph["peak_bytes"]))
    rows: list[tuple[Cell, ...]] = []
    for name, seconds, peak_bytes in steps:
        tokens_per_s = _per_second(profile.get("tokens_per_step"), seconds)
        utilization: Cell = "-"
        if tokens_per_s is not None and profile.get("utilization_per_token") is not None:
            utilization = Quantity(tokens_per_s * profile["utilization_per_token"], "%")
        rows.append((name, Quantity(seconds, "ms"), _cell(tokens_per_s, ""), utilization, _cell(peak_bytes, "MiB")))
    return rows


def _per_second(count: float | None, seconds: float) -> float | None:
    """Return ``count / seconds``, None without a count: a loop of one's own does not say its tokens."""
    if count is None:
        return None
    return count / seconds


def _cell(value: float | None, unit: str) -> Cell:
    """Return a number with its unit, or a dash."""
    if value is None:
        return "-"
    return Quantity(value, unit)


def _module_rows(profile: Mapping[str, Any]) -> list[tuple[Cell, ...]]:
    """Return the slowest kinds of modules, all others as one row, what no module accounts for, and the step."""
    step_s = mean_step_s(profile)
    kinds = list(by_kind_of_module(profile["time"]["modules"]).items())
    others: dict[str, float] = dict.fromkeys(PASSES, 0.0)
    for _, times in kinds[MODULES:]:
        for stage, seconds in times.items():
            others[stage] += seconds
    shown = kinds[:MODULES]
    if kinds[MODULES:]:
        shown.append((f"{len(kinds) - MODULES} others", others))
    rows: list[tuple[Cell, ...]] = []
    for name, times in shown:
        total = sum(times.values())
        stages = tuple(Quantity(times[stage], "ms") for stage in PASSES)
        rows.append((name, *stages, Quantity(total, "ms"), Quantity(total / step_s, "%")))
    # Streams that run at the same time may have more than the step's time together.
    rest = step_s - sum(sum(times.values()) for _, times in kinds)
    empty = ("-",) * len(PASSES)
    name = "not recorded"
    if profile["backend"] == "cuda":
        name = "no kernel runs"
    if rest > 0:
        rows.append((name, *empty, Quantity(rest, "ms"), Quantity(rest / step_s, "%")))
    return rows


def run_tables(profile: Mapping[str, Any]) -> list[Table]:
    """Return the tables about the run: start, options and versions, as far as the profile has them."""
    found: list[Table] = []
    phases = profile.get("start_s")
    if phases:
        found.append(Table("Start of rank 0", ("phase", "time"), _rows(phases | {"sum": sum(phases.values())}, "s")))
    options = [(name, _text(value)) for name, value in profile.get("options", {}).items()]
    if options:
        found.append(Table("Options that are not defaults", ("option", "value"), options))
    if profile.get("versions"):
        found.append(Table("Versions", ("package", "version"), list(profile["versions"].items())))
    return found


def _text(value: Any) -> str:
    """Return the value of an option as JSON; without quotes if it is a text."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


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
    largest: list[tuple[Cell, ...]] = []
    for each in memory["largest"]:
        names = (each["category"], each["module"], each["operator"], " < ".join(each["stack"]))
        largest.append((Quantity(each["bytes"], "MiB"), *names))
    planned = profile.get("planned", {})
    # The plan counts a tensor where it is kept, a profile where it is allocated: the input of a layer is
    # the output of the one before, so that only sums and layers of equal parts can agree.
    layers, kept = memory["kept_by_layer"], planned.get("layers", {})
    around = {"sum": sum(layers.values())}
    if kept:
        kept = kept | {"sum": sum(kept.values()) + planned["around_layers"]}
    return [
        Table(
            "Memory at the peak",
            ("category", "bytes", "of the peak", "planned", "difference"),
            _planned_rows(
                memory["at_peak"] | {"sum": memory["peak_bytes"]}, planned.get("at_peak"), total=memory["peak_bytes"]
            ),
        ),
        Table(
            "Kept by forward for backward, by layer",
            ("layer", "bytes", "planned", "difference"),
            _planned_rows(layers | around, kept),
        ),
        Table("Largest tensors at the peak", ("bytes", "category", "module", "operator", "stack"), largest),
    ]


def _planned_rows(
    measured: Mapping[str, int], planned: Mapping[str, int] | None, *, total: int | None = None
) -> list[tuple[Cell, ...]]:
    """Return rows of a name, measured bytes, their part of ``total`` if there is one, planned bytes, and the excess."""
    planned = dict(planned or {})
    # A plan by category has no entry for what does not exist at its peak.
    if planned and total is not None:
        planned = {"sum": sum(planned.values()), **dict.fromkeys(CATEGORIES, 0)} | planned
    rows: list[tuple[Cell, ...]] = []
    for name, size in measured.items():
        row: tuple[Cell, ...] = (name, Quantity(size, "MiB"))
        if total is not None:
            row = (*row, Quantity(size / total, "%"))
        expected = planned.get(name)
        difference: Cell = "-"
        # The categories of two peaks at different moments of a step differ although their sums agree.
        if expected and (total is None or name == "sum"):
            difference = Quantity(size / expected - 1, "%", signed=True)
        rows.append((*row, _cell(expected, "MiB"), difference))
    return rows


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
        f"{profile['date']}: {profile['command']}",
        f"time: mean of steps {first} to {last}; memory: step {last + 1}",
    ]
    memory, planned = profile["memory"], profile.get("planned", {})
    if memory is None:
        lines.append(f"memory: {profile['memory_refusal']}")
    else:
        lines.append(f"memory counts {memory['source']}")
        if memory["allocator_peak_bytes"] is not None:
            lines.append(f"the allocator's own peak: {Quantity(memory['allocator_peak_bytes'], 'MiB')}")
    if "moment" in planned:
        lines.append(f"memory is planned without the allocator's margin, with its peak in {planned['moment']}")
    elif planned:
        lines.append(f"memory is not planned: {planned['refusal']}")
    graph = profile.get("graph")
    if graph is not None:
        eager, replayed = Quantity(mean_step_s(profile), "ms"), Quantity(mean_step_s(graph), "ms")
        lines.append(f"a step takes {eager} as profiled, without the CUDA graph, and {replayed} with it")
    return [*lines, *profile["notes"]]


def comparison(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Table]:
    """Return the tables of the differences between rank 0 of two profiles."""
    columns = ("A", "B", "B - A", "change")
    classes = _differences(first["time"]["classes"], second["time"]["classes"], "ms")
    modules = _differences(_module_times(first), _module_times(second), "ms")
    steps = [_difference("profiled", mean_step_s(first), mean_step_s(second), "ms")]
    graphs = [each["graph"] for each in (first, second) if each.get("graph") is not None]
    if len(graphs) == 2:
        steps.append(_difference("with the CUDA graph", mean_step_s(graphs[0]), mean_step_s(graphs[1]), "ms"))
    found = [
        *_different_options(first, second),
        Table("Step", ("", *columns), steps),
        Table("Time by class of kernels", ("class", *columns), classes),
        Table("Time by module", ("module", *columns), modules[:MODULES]),
    ]
    one, other = first["memory"], second["memory"]
    if one is None or other is None:
        return found
    first_sums = one["at_peak"] | {"sum": one["peak_bytes"]}
    second_sums = other["at_peak"] | {"sum": other["peak_bytes"]}
    ours, theirs = one["kept_by_layer"], other["kept_by_layer"]
    names = in_layer_order(dict.fromkeys((*ours, *theirs)))
    layers = [_difference(name, ours.get(name, 0), theirs.get(name, 0), "MiB") for name in names]
    return [
        *found,
        Table("Memory at the peak", ("category", *columns), _differences(first_sums, second_sums, "MiB")),
        Table("Kept by forward for backward, by layer", ("layer", *columns), layers),
    ]


def _different_options(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Table]:
    """Return a table of the options and versions that differ; none if all are the same."""
    rows: list[tuple[Cell, ...]] = []
    for kind, missing in (("options", "default"), ("versions", "not installed")):
        ours, theirs = first.get(kind, {}), second.get(kind, {})
        for name in dict.fromkeys((*ours, *theirs)):
            if ours.get(name) != theirs.get(name) or (name in ours) != (name in theirs):
                rows.append((name, *(_text(each[name]) if name in each else missing for each in (ours, theirs))))
    if not rows:
        return []
    return [Table("Options that differ", ("option", "A", "B"), rows)]


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
