"""Errors of planned memory and time: their columns, their bounds, and what all rows of a commit sum up to."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_memopt.planner.hardware import GIB

WAITING_PART = 0.0
"""A step that by plan may take longer than expected, by more than this part of its time, is limited by the host."""
Row = dict[str, Any]
BOUNDS = {
    "allocated": (5.0, 48 << 20),
    "reserved": (math.inf, 0),
    "host": (2.0, 0),
    "step": (15.0, 0),
    "host_limited_step": (math.inf, 0),
}
"""Columns -> largest error: a percentage, or a number of bytes if that is more."""


def errors(row: Row) -> Row:
    """Return the columns planned / measured - 1 in percent, of what was measured."""
    found: Row = {}
    for name in ("allocated_bytes", "reserved_bytes", "host_bytes", "step_s"):
        if row.get(name):
            found[f"{name.rsplit('_', 1)[0]}_error"] = round(100 * (row[f"planned_{name}"] / row[name] - 1), 3)
    if row.get("waiting_part", 0.0) > WAITING_PART:
        found["host_limited_step_error"] = found.pop("step_error")
    return found


def is_beyond(name: str, error: float, measured_bytes: float) -> bool:
    """Return whether an error is beyond the bounds of its column, or the margin too small.

    Args:
        name: a key of ``BOUNDS``.
        error: in percent.
        measured_bytes: what was measured, of a column of bytes.
    """
    percent, least_bytes = BOUNDS[name]
    bound = max(percent, 100 * least_bytes / measured_bytes) if least_bytes else percent
    return abs(error) > bound or (name == "reserved" and error < 0)


def totals(rows: Sequence[Row]) -> list[str]:
    """Return for each error its median and its ends over all rows, and the cells that are beyond the bounds."""
    lines: list[str] = []
    for name, (percent, least_bytes) in BOUNDS.items():
        error = f"{name}_error"
        values = [row[error] for row in rows if error in row]
        if not values:
            continue
        median = statistics.median(abs(value) for value in values)
        drawn_cells = sum(row["seed"] != "" for row in rows if error in row)
        lines.append(
            f"{error}: {len(values)} rows, {drawn_cells} of them drawn, median {median:.2f} %, "
            f"{min(values):+.2f} to {max(values):+.2f} %, {sum(value < 0 for value in values)} below 0"
        )
        beyond = [
            f"{row['cell']} {row[error]:+.2f} %"
            for row in rows
            if error in row and is_beyond(name, row[error], row.get(f"{name}_bytes") or 0)
        ]
        if beyond:
            lines.append(f"  beyond {percent:g} % or {least_bytes >> 20} MiB, or below 0: {', '.join(beyond)}")
    failed = [row["cell"] for row in rows if row["failure"]]
    if failed:
        lines.append(f"failed: {', '.join(failed)}")
    return lines


def recorded(path: Path, about: Row) -> dict[tuple[str, str], Row]:
    """Return the rows without a failure that the file has from this commit, by name and seed of the cell."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    own = [row for row in rows if row["commit"] == about["commit"] and not row["failure"]]
    return {(row["cell"], row["seed"]): _with_numbers(row) for row in own}


def _with_numbers(row: Mapping[str, str]) -> Row:
    """Return a row of a file with the columns that are summed up as numbers, without the empty ones."""
    found: Row = {}
    for name, text in row.items():
        is_number = name.endswith(("_bytes", "_error"))
        if text or not is_number:
            found[name] = float(text) if is_number else text
    return found


def summary(row: Row) -> str:
    """Return a row in words."""
    if row["failure"]:
        return row["failure"]
    size = row["allocated_bytes"] or row["planned_allocated_bytes"]
    shown = [f"{size / GIB:.2f} GiB", f"{row['step_s']:.3g} s"]
    shown += [f"{name} {value:+.2f} %" for name, value in row.items() if name.endswith("_error")]
    return ", ".join(shown)
