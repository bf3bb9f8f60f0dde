"""The benchmark of saves in the background runs to its end and records what it measured."""

from __future__ import annotations

import csv
import sys

from scripts.bench.races import async_save


def test_a_row_is_recorded_and_the_last_checkpoint_is_compared(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    options = ["--model", "llama-tiny", "--tokens", "16", "--saves", "2", "--sync-saves", "1", "--between", "2"]
    monkeypatch.setattr(sys, "argv", ["async_save.py", *options, "--csv", str(path), "--append", "--note", "a test"])
    async_save.main()
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["saves"] == "2" and row["note"] == "a test" and float(row["sync_save_s"]) > 0
    assert int(row["steps_during"]) >= 2 and int(row["steps_others"]) == 8
    assert "84 tensors of step_00000002 are what they were when the save began" in capsys.readouterr().out
