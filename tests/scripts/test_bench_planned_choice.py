"""The benchmark of the planner's choice: which settings are measured, as what, and the verdict."""

from __future__ import annotations

import csv
import sys

import pytest

from nxd_memopt.planner.hardware import GIB, device_named
from scripts.bench.planner import choice as planned_choice
from scripts.bench.planner.cells import DEVICE, plan_of
from scripts.bench.planner.choice import BEST, CHOICES, DRAWN, cell_of, measured_ranks, ranked, verdict


def test_the_best_and_drawn_settings_are_measured():
    ranks = measured_ranks(50, 1)
    assert ranks[:BEST] == list(range(BEST)) and len(set(ranks)) == BEST + DRAWN and max(ranks) < 50
    assert ranks == measured_ranks(50, 1) and ranks != measured_ranks(50, 2)
    assert measured_ranks(14, 1) == list(range(14)) and measured_ranks(3, 1) == [0, 1, 2]


@pytest.mark.parametrize("name", CHOICES)
def test_a_measured_cell_is_the_step_of_the_ranked_setting(name, monkeypatch):
    choice = CHOICES[name]
    monkeypatch.setenv("WORLD_SIZE", str(choice.devices))
    device = device_named(DEVICE)
    found = ranked(choice, device, tiny=False)
    assert len(found) >= BEST + DRAWN
    batch = choice.cell.micro_batch
    for rank in measured_ranks(len(found), 1):
        cell = cell_of(choice, found[rank])
        assert cell.micro_batch * cell.accumulation * cell.data_parallel == batch
        plan = plan_of(cell, device)
        assert cell.cuda_graph == found[rank].setting.cuda_graph
        assert plan.memory.device == found[rank].memory.device and plan.time == found[rank].time
        assert found[rank].memory.device_bytes < choice.limit_gib * GIB


def rows_of(*seconds: float | None):
    return [{"rank": i, "failure": "" if s else "out of memory", "step_s": s} for i, s in enumerate(seconds)]


def test_the_verdict_compares_the_chosen_setting_with_the_best():
    assert "reaches 100.0% of the best, rank 0, which is at least 98%" in verdict(rows_of(1.0, 1.1))
    assert "2 settings measured, 1 failed" in verdict(rows_of(1.0, 1.1, None))
    assert "reaches 97.0% of the best, rank 2, which is below 98%" in verdict(rows_of(1.0, 1.1, 0.97))
    assert "the chosen one is not among the measured" in verdict(rows_of(None, 1.0))


def test_rows_are_appended_and_passed_over(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"

    def run(cells):
        options = ["--problem", "llama", "--tiny", "--append", "--csv", str(path), "--cells", cells]
        monkeypatch.setattr(sys, "argv", ["planned_choice.py", *options])
        planned_choice.main()
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    assert [row["rank"] for row in run("0:1")] == ["0"]
    rows = run("0:2")
    assert [row["rank"] for row in rows] == ["0", "1"] and not any(row["failure"] for row in rows)
    assert all(float(row["step_s"]) > 0 and float(row["ranked_step_s"]) > 0 for row in rows)
    assert "2 settings measured, 0 failed" in capsys.readouterr().out
