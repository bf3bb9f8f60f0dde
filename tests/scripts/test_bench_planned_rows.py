"""Recorded steps that are planned again: rows name them in full, and today's formulas are near what was measured."""

from __future__ import annotations

import os

import pytest

from scripts.bench.planner.cells import NAMED_ON, drawn
from scripts.bench.planner.memory import CSV
from scripts.bench.planner.rows import beyond, cell_of, errors_of, rows_of

# Formulas of the steps that were measured as the code is now.
FORMULAS = ["5799b86", "aba393a", "0cffe7e", "b3d160d", "8eca28a", "d104159"]
COMPARED = ("allocated_error", "reserved_error", "host_error", "step_error")


def row_of(cell) -> dict[str, str]:
    """The columns of a cell, as ``planned_memory`` writes them."""
    numbers = {name: str(getattr(cell, name)) for name in ("layers", "tokens", "micro_batch", "accumulation")}
    return {
        "cell": cell.name,
        "model": cell.model,
        "precision": cell.precision,
        "options": cell.options(),
        "seed": cell.seed_text(),
    } | numbers


def test_a_row_names_its_step_in_full():
    cells = [cell for ranks in NAMED_ON for cell in NAMED_ON[ranks]]
    for cell in (*cells, *drawn(40, 31, 8.0), *drawn(10, 31, 8.0, ranks=4)):
        assert cell_of(row_of(cell)) == cell


@pytest.mark.parametrize("formulas", FORMULAS)
def test_recorded_peaks_are_within_the_bounds_of_todays_formulas(formulas):
    rows = rows_of(CSV, [formulas])
    assert len(rows) > 10
    before = os.environ.get("WORLD_SIZE")
    found = {}
    for row in rows:
        errors = {name: error for name, error in errors_of(row).items() if name in COMPARED}
        outside = beyond(row, errors)
        if outside:
            found[row["cell"], row["seed"]] = outside
    assert os.environ.get("WORLD_SIZE") == before
    assert not found


def test_a_row_is_planned_for_its_own_ranks(monkeypatch):
    row = next(row for row in rows_of(CSV, FORMULAS) if "T=2" in row["options"].split())
    found = []
    for world in ("1", "64"):
        monkeypatch.setenv("WORLD_SIZE", world)
        found.append(errors_of(row))
    assert found[0] == found[1]
