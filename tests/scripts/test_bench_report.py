"""README's performance table: the last run of a setting with its strongest peer counts."""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
from pathlib import Path

import pytest

from scripts.bench import report, report_sections
from scripts.bench.harness import record


def row(variant: str, speed: float | None, *, command: str, recompute: str = "none", tokens: int = 8192):
    values = {"model": "m", "tensor_parallel": "4", "tokens": str(tokens), "variant": variant, "recompute": recompute}
    values |= {"tokens_per_s_per_device": "" if speed is None else str(speed), "mfu": "0.5", "peak_gib": "1.0"}
    return values | {"date": "2026-01-01", "commit": "c", "command": command, "device": "GPU"}


def test_the_last_race_and_its_best_peer(monkeypatch):
    rows = [
        row("ours", 100, command="old"),
        row("fast", 400, command="old"),
        row("ours", 300, command="new"),
        row("ours, CUDA graph", 350, command="new"),
        row("slow", 100, command="new"),
        row("fast", 200, command="new"),
        row("failed", None, command="new"),
        row("ours", 900, command="without the best peer"),
        row("slow", 199, command="without the best peer"),
        row("ours", 70, command="earlier", tokens=64),
        row("fast", 50, command="earlier", tokens=64),
        row("ours", 75, command="a stronger peer", tokens=64),
        row("other", 60, command="a stronger peer", tokens=64),
        row("ours", 50, command="ours alone, no race"),
        row("ours", 80, command="full", recompute="full, attention kept"),
        row("fast", 40, command="full", recompute="full"),
        row("ours", 90, command="offloaded", recompute="none, offloaded"),
        row("fast", 45, command="offloaded", recompute="full"),
        row("ours", 10, command="short", tokens=512),
        row("fast", 20, command="short", tokens=512),
    ]
    monkeypatch.setattr(report, "rows_of", lambda _: rows)
    assert report.step_lines()[2:] == [
        "| m | 4 | 64 | none | 75 | 0.5 | 1.0 | other: 60 | 1.0 | 1.25 | c |",
        "| m | 4 | 512 | none | 10 | 0.5 | 1.0 | fast: 20 | 1.0 | 0.50 | c |",
        "| m | 4 | 8,192 | full, attention kept | 80 | 0.5 | 1.0 | fast: 40 | 1.0 | 2.00 | c |",
        "| m | 4 | 8,192 | none, offloaded | 90 | 0.5 | 1.0 | fast, recompute full: 45 | 1.0 | 2.00 | c |",
        "| m | 4 | 8,192 | none, CUDA graph | 350 | 0.5 | 1.0 | fast: 200 | 1.0 | 1.75 | c |",
    ]


def test_steps_in_float8_have_a_table_of_their_own(monkeypatch):
    rows = [
        row("ours, CUDA graph", 100, command="float8"),
        row("ours, fp8 rowwise", 130, command="float8"),
        row("torchao rowwise, flash4", 120, command="float8"),
        row("ours", 100, command="without a peer"),
        row("ours, fp8 rowwise", 900, command="without a peer"),
        row("ours, fp8 rowwise", 900, command="without bf16"),
        row("ours", 40, command="no peer at all", tokens=64),
        row("ours, fp8 rowwise", 60, command="no peer at all", tokens=64),
        row("ours", 90, command="bf16"),
        row("peer", 80, command="bf16"),
    ]
    monkeypatch.setattr(report, "rows_of", lambda _: [each | {"step_ms": "1"} for each in rows])
    assert report.step_lines()[2:] == ["| m | 4 | 8,192 | none | 90 | 0.5 | 1.0 | peer: 80 | 1.0 | 1.12 | c |"]
    assert report.scaling_lines()[2] == "| m | 64 | 40, 1 GiB, c |"
    assert report.float8_lines()[2:] == [
        "| m | 4 | 64 | ours | 1 | 40 | 1.00 | 1.0 | c |",
        "| m | 4 | 64 | ours, fp8 rowwise | 1 | 60 | 1.50 | 1.0 | c |",
        "| m | 4 | 8,192 | ours, CUDA graph | 1 | 100 | 1.00 | 1.0 | c |",
        "| m | 4 | 8,192 | ours, fp8 rowwise | 1 | 130 | 1.30 | 1.0 | c |",
        "| m | 4 | 8,192 | torchao rowwise, flash4 | 1 | 120 | 1.20 | 1.0 | c |",
    ]
    monkeypatch.setattr(report, "rows_of", lambda _: rows[-2:])
    assert report.float8_lines() == []


def test_the_last_row_of_each_setting_is_shown():
    rows = [
        {"model": model, "tokens": tokens, "ms": ms, "failure": "E: x"}
        for model, tokens, ms in (("b", "64", "1"), ("a", "512", "2"), ("a", "64", "3"), ("b", "64", "4"))
    ]
    found = report_sections.latest_rows(rows, ("model", "tokens"))
    assert [(row["ms"], row["failure"]) for row in found] == [("3", "E"), ("2", "E"), ("4", "E")]


def test_readme_needs_its_markers(monkeypatch):
    monkeypatch.setattr(report, "readme_section", lambda: "table\n")
    text = f"a\n{report.BEGIN}old\n{report.END}b\n"
    assert report.with_section(text) == f"a\n{report.BEGIN}table\n{report.END}b\n"
    for broken in (text.replace(report.END, ""), text + report.BEGIN):
        with pytest.raises(ValueError, match="it must have one"):
            report.with_section(broken)


def test_runs_that_failed_do_not_replace_what_was_measured(monkeypatch):
    rows = [row("ours", 300, command="old"), row("peer", 200, command="old"), row("ours", 310, command="new")]
    rows += [row("peer", None, command="new"), row("ours", None, command="newer"), row("peer", 210, command="newer")]
    monkeypatch.setattr(report, "rows_of", lambda _: rows)
    assert report.step_lines()[2:] == ["| m | 4 | 8,192 | none | 300 | 0.5 | 1.0 | peer: 200 | 1.0 | 1.50 | c |"]


def test_rows_of_other_devices_are_not_in_readme_and_broken_ones_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(report_sections, "BENCHMARKS", tmp_path)
    path = tmp_path / "train_step.csv"
    path.write_text(f"model,device\nm,{report.DEVICE}\nm,a laptop\n", encoding="utf-8")
    assert report.rows_of("train_step") == [{"model": "m", "device": report.DEVICE}]
    path.write_text(f"model,device\nm,{report.DEVICE}\n<<<<<<< HEAD\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"train_step.csv: row 3 has not the header's columns"):
        report.rows_of("train_step")
    path.write_text("model,device\nm,a laptop\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"has no rows of {report.DEVICE}"):
        report.page()


def append_rows(path: Path, count: int) -> None:
    for i in range(count):
        record.append([{"a": i}], path)


def test_processes_append_one_after_the_other(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_rows, args=(tmp_path / "rows.csv", 20)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len((tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()) == 41


def test_a_rows_commit_is_this_repositorys_and_its_command_has_what_was_set(monkeypatch, tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["bench.py", "--tokens", "8"])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(record, "_module", lambda: "bench")
    found = record.environment()
    assert len(found["commit"].removesuffix("-dirty")) >= 7
    assert "CUBLAS_WORKSPACE_CONFIG=:0:0 " in found["command"]
    assert found["command"].endswith("torchrun --nproc_per_node 2 -m bench --tokens 8")


def test_new_columns_keep_the_recorded_rows(tmp_path):
    path = tmp_path / "rows.csv"
    record.append([{"a": 1, "b": "x, y"}], path)
    record.append([{"a": 2, "c": 3}], path)
    assert path.read_text(encoding="utf-8") == 'a,b,c\n1,"x, y",\n2,,3\n'
    assert [each.name for each in tmp_path.iterdir()] == ["rows.csv"]


def test_published_rows_have_all_columns_and_their_run(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    args = argparse.Namespace(append=False, csv=path)
    record.publish([{"a": 1}, {"b": 2}], ("a", "b"), "a race", args)
    assert "a race" in capsys.readouterr().out and not path.exists()
    args.append = True
    record.publish([{"a": 1}, {"b": 2}], ("a", "b"), "a race", args)
    header, first, _ = path.read_text(encoding="utf-8").splitlines()
    assert header.startswith("a,b,date,device,torch,") and first.startswith("1,,")
