"""The rows of docs/benchmarks, and the sections of ``report_sections.toml``, which show them column by column."""

from __future__ import annotations

import csv
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
TABLE = Path(__file__).with_name("report_sections.toml")
DEVICE = "NVIDIA H200"  # of the tables that compare ours with the best peer
OTHER_DEVICE = "NVIDIA H100 80GB HBM3"
Row = dict[str, str]


def rows_of(name: str, device: str = DEVICE) -> list[Row]:
    """Return the rows of a benchmark on ``device``."""
    path = BENCHMARKS / f"{name}.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ValueError(f"{path}: row {number} has not the header's columns: mend or remove it")
    return [row for row in rows if row.get("device") == device]


def sections() -> list[str]:
    """Return title, text and table of each section."""
    table: dict[str, Any] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    parts: list[str] = []
    for name, section in table.items():
        rows = [row for device in section["devices"] for row in rows_of(name, device)]
        if name in SUMMARIES:
            rows = SUMMARIES[name](rows)
        if "setting" in section:
            rows = latest_rows(rows, section["setting"])
        parts += [f"## {section['title']}", section["text"], "\n".join(column_lines(rows, section["columns"]))]
    return parts


def column_lines(rows: Sequence[Row], columns: Mapping[str, str]) -> list[str]:
    """Return a table of ``rows``, with the header ``columns[name]`` for the column ``name``."""
    lines = [f"| {' | '.join(columns.values())} |", "|---" * len(columns) + "|"]
    return lines + [f"| {' | '.join(row[name] for name in columns)} |" for row in rows]


def latest_rows(rows: Sequence[Row], setting: Sequence[str]) -> list[Row]:
    """Return the last row of each setting, ordered by model and tokens; failures are shortened to the error's name."""
    latest = {tuple(row[column] for column in setting): row for row in rows}
    ordered = sorted(latest.values(), key=lambda row: (row["model"], int(row["tokens"])))
    return [row | {"failure": row["failure"].partition(":")[0]} for row in ordered]


def with_tensor_parallel(rows: Sequence[Row]) -> list[Row]:
    """Return ``rows`` with T; those of earlier commits have no tensor parallelism."""
    return [row | {"tensor_parallel": row.get("tensor_parallel") or "1"} for row in rows]


def planned_steps(rows: Sequence[Row]) -> list[Row]:
    """Return a line for each commit of the planner and device: numbers of steps, and errors."""
    lines: list[Row] = []
    for formulas, device in dict.fromkeys((row["formulas"], row["device"]) for row in rows):
        same = [row for row in rows if (row["formulas"], row["device"]) == (formulas, device)]
        line = {"device": device, "formulas": formulas, "rows": str(len(same))}
        line["drawn"] = str(sum(row["seed"] != "" for row in same))
        line["failed"] = str(sum(row["failure"] != "" for row in same))
        for name in ("allocated", "reserved", "host", "step", "host_limited_step"):
            line[f"{name}_error"] = _errors(same, f"{name}_error")
        lines.append(line)
    return lines


def chosen_settings(rows: Sequence[Row]) -> list[Row]:
    """Return a line for each problem and commit of the planner: the chosen setting next to the fastest."""
    lines: list[Row] = []
    for formulas, problem in dict.fromkeys((row["formulas"], row["problem"]) for row in rows):
        same = [row for row in rows if (row["formulas"], row["problem"]) == (formulas, problem)]
        measured = {int(row["rank"]): float(row["step_s"]) for row in same if not row["failure"]}
        best = min(measured, key=lambda rank: measured[rank])
        line = {"formulas": formulas, "problem": problem, "settings": str(len(measured))}
        line |= {"failed": str(len(same) - len(measured)), "best": f"{best} ({measured[best]:.4g} s)"}
        line |= {"chosen": "failed", "part": ""}
        if 0 in measured:
            line |= {"chosen": f"{measured[0]:.4g} s", "part": f"{measured[best] / measured[0]:.1%}"}
        lines.append(line)
    return lines


SUMMARIES: dict[str, Callable[[Sequence[Row]], list[Row]]] = {
    "sharded_step": with_tensor_parallel,
    "planned_memory": planned_steps,
    "planned_choice": chosen_settings,
}


def _errors(rows: Sequence[Row], column: str) -> str:
    """Return median and ends of a column of errors."""
    values = [float(row[column]) for row in rows if row.get(column)]
    if not values:
        return ""
    median = statistics.median(abs(value) for value in values)
    return f"{median:.2f} ({min(values):+.2f} to {max(values):+.2f})"
