"""The benchmark of planned memory: cells that a seed draws, rows with both figures, and a limited time."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from nxd_memopt.backends import backend
from nxd_memopt.planner.hardware import GIB, device_named
from scripts.bench.planner import memory as planned_memory
from scripts.bench.planner.cells import LARGEST_HOST_GIB, NAMED, NAMED_ON, drawn, plan_of
from scripts.bench.planner.errors import totals
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
    capsys.readouterr()
    assert len(run(monkeypatch, path, "--cells", number("neox 2k graph"))) == 4
    shown = capsys.readouterr().out
    assert "failed: neox 2k graph" in shown
    # The last lines are of all rows of the commit, not of this call's alone.
    assert "2 recorded" in shown and "allocated_error: 2 rows" in shown and "host_error: 1 rows" in shown


def test_a_cell_that_stops_in_any_way_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    measured: list[str] = []

    def measure(cell, *, tiny, limits):
        assert limits
        measured.append(cell.name)
        if len(measured) == 1:
            raise AssertionError("no such kernel")
        return {"planned_allocated_bytes": 99, "allocated_bytes": 100, "step_s": 1.0, "planned_step_s": 1.1}

    monkeypatch.setattr(planned_memory, "measure", measure)
    rows = run(monkeypatch, tmp_path / "rows.csv", "--cells", "0:2")
    assert [row["failure"] for row in rows] == ["AssertionError: no such kernel", ""] and len(measured) == 2
    assert f"failed: {rows[0]['cell']}" in capsys.readouterr().out


def test_the_summary_names_the_cells_beyond_the_bounds():
    def row(name, error, measured, seed=""):
        return {"cell": name, "allocated_error": error, "allocated_bytes": measured, "seed": seed, "failure": ""}

    rows = [
        row("exact", 0.0, 80 << 30),
        row("few bytes", 8.0, 512 << 20, seed="7"),  # 41 MiB
        row("above", 5.2, 80 << 30),
        row("below", -5.1, 80 << 30),
    ]
    first, second = totals(rows)
    assert "4 rows, 1 of them drawn, median 5.15 %, -5.10 to +8.00 %, 1 below 0" in first
    assert second.endswith("above +5.20 %, below -5.10 %")
    # With margin too little is planned of a step that was out of memory with it.
    too_little = {"cell": "a", "reserved_error": -0.1, "reserved_bytes": 1 << 30, "seed": "", "failure": ""}
    assert len(totals([too_little])) == 2 and len(totals([too_little | {"reserved_error": 9.0}])) == 1


def test_the_seed_decides_the_cells_and_they_fit():
    cells = drawn(9, 5, 8.0)
    assert cells == drawn(9, 5, 8.0) and cells != drawn(9, 6, 8.0)
    device = device_named("h200")
    for cell in (*NAMED, *cells):
        plan = plan_of(cell, device)
        assert plan.fits and plan.memory.host_bytes <= LARGEST_HOST_GIB * GIB, cell
    assert len({cell.name for cell in (*NAMED, *cells)}) == len(NAMED) + 9
    assert len({cell.model for cell in cells}) > 2


def test_the_ranks_of_drawn_cells_are_tensor_parallel_or_stages():
    cells = drawn(14, 5, 8.0, ranks=4)
    assert all(cell.tensor_parallel * cell.stages[0] == 4 for cell in cells)
    assert len({cell.stages for cell in cells}) > 2
    assert any(cell.trainer for cell in cells) and any(cell.lora for cell in cells)
    staged = next(cell for cell in cells if cell.stages[0] > 1)
    assert "P=" in staged.options() and plan_of(staged, device_named("h200")).setting.pipeline_model_parallel_size > 1


@pytest.mark.slow
def test_cells_on_two_ranks(tmp_path):
    """T=2, then D=2: planned and measured figures of the rank that has most, from one rank's file."""
    path = tmp_path / "rows.csv"
    names = [cell.name for cell in NAMED_ON[2]]
    first = names.index("mixtral 8k moe T=2")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "scripts.bench.planner.memory", "--tiny", "--drawn", "0", "--append", "--csv", str(path)]
    done = subprocess.run([*command, "--cells", f"{first}:"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["cell"] for row in rows] == names[first:] and len(rows) >= 2
    assert [row["failure"] for row in rows] == [""] * len(rows)
    assert "T=2" in rows[0]["options"]
    assert {row["options"].split("sharding=")[1] for row in rows[1:]} == {"none", "zero1", "zero2", "zero3"}
