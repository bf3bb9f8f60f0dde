"""The benchmark of planned memory: cells that a seed draws, rows with both figures, and a limited time."""

from __future__ import annotations

import csv
import sys

import pytest

from nxd_memopt.backends import backend
from nxd_memopt.planner.hardware import GIB, device_named
from scripts.bench import planned_memory
from scripts.bench.planned_cells import LARGEST_HOST_GIB, NAMED, drawn, plan_of
from tests.deferred_transfers import DeferredTransfers


def run(monkeypatch, path, *arguments: str) -> list[dict[str, str]]:
    options = ["--tiny", "--drawn", "0", "--csv", str(path), "--append", *arguments]
    monkeypatch.setattr(sys, "argv", ["planned_memory.py", *options])
    planned_memory.main()
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def number(name: str) -> str:
    index = [cell.name for cell in NAMED].index(name)
    return f"{index}:{index + 1}"


def test_rows_have_planned_and_measured_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(type(backend), "host_transfers", lambda self: DeferredTransfers())
    path = tmp_path / "rows.csv"
    run(monkeypatch, path, "--cells", number("llama 2k"))
    run(monkeypatch, path, "--cells", number("llama 8k half the states"))
    rows = run(monkeypatch, path, "--cells", number("neox 2k graph"))
    plain, states, graph = rows
    assert plain["failure"] == states["failure"] == "" and "CUDA graph" in graph["failure"]
    for row in (plain, states):
        assert float(row["loss"]) > 0 and float(row["step_s"]) > 0 and int(row["allocated_bytes"]) > 0
        error = 100 * (int(row["planned_allocated_bytes"]) / int(row["allocated_bytes"]) - 1)
        assert float(row["allocated_error"]) == pytest.approx(error, abs=1e-3)
    assert int(states["host_bytes"]) > 0 and int(plain["host_bytes"]) == 0
    assert states["formulas"] and states["commit"] and states["precision"] == "bf16-mixed"
    # What the file has from this commit is passed over, what has failed is tried again.
    assert len(run(monkeypatch, path, "--cells", number("llama 2k"))) == 3
    assert len(run(monkeypatch, path, "--cells", number("neox 2k graph"))) == 4
    assert "failed: neox 2k graph" in capsys.readouterr().out


def test_no_cell_begins_that_would_end_too_late(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planned_memory, "measured_row", lambda *_, **__: pytest.fail("a cell began"))
    path = tmp_path / "rows.csv"
    path.write_text("cell,seed,commit,failure\n")
    assert run(monkeypatch, path, "--seconds", "3", "--cells", "0:2") == []
    assert capsys.readouterr().out.count("left out") == 2


def test_the_seed_decides_the_cells_and_they_fit():
    cells = drawn(9, 5, 8.0)
    assert cells == drawn(9, 5, 8.0) and cells != drawn(9, 6, 8.0)
    device = device_named("h200")
    for cell in (*NAMED, *cells):
        plan = plan_of(cell, device)
        assert plan.fits and plan.memory.host_bytes <= LARGEST_HOST_GIB * GIB, cell
    assert len({cell.name for cell in (*NAMED, *cells)}) == len(NAMED) + 9
    assert len({cell.model for cell in cells}) > 2
