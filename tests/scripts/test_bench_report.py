"""README's performance table: the last run of a setting with its strongest peer counts."""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
from pathlib import Path

import pytest

from scripts.bench import record, report, report_sections


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


@pytest.mark.parametrize(("loss", "shown"), [("10.9", "fast: 50 (loss 10.90, ours 8.50)"), ("8.9", "fast: 50")])
def test_a_loss_that_fell_otherwise_is_shown(monkeypatch, loss, shown):
    ours = row("ours", 100, command="a") | {"first_loss": "11.2", "loss": "8.5"}
    peer = row("fast", 50, command="a") | {"first_loss": "11.2", "loss": loss}
    monkeypatch.setattr(report, "rows_of", lambda _: [ours, peer])
    assert report.step_lines()[2:] == [f"| m | 4 | 8,192 | none | 100 | 0.5 | 1.0 | {shown} | 1.0 | 2.00 | c |"]


def test_scaling_shows_the_fastest_of_the_last_day(monkeypatch):
    def ours(size: str, speed: float | None, *, date: str, variant: str = "ours", recompute: str = "none"):
        return row(variant, speed, command="", recompute=recompute) | {"tensor_parallel": size, "date": date}

    rows = [
        ours("1", 900, date="2026-01-01"),
        ours("1", 300, date="2026-01-02", recompute="none, 2 layers offloaded"),
        ours("1", 200, date="2026-01-02"),
        ours("10", 100, date="2026-01-01", variant="ours, CUDA graph"),
        ours("2", 200, date="2026-01-01"),
        ours("2", 700, date="2026-01-01") | {"commit": "d-dirty"},
        ours("2", None, date="2026-01-03"),
        ours("2", 800, date="2026-01-03", variant="peer"),
        row("ours", 50, command="", tokens=512),
        # Experts on two GPUs, T=1: not a row of one GPU.
        ours("1", 950, date="2026-01-03") | {"expert_parallel": "2"},
    ]
    monkeypatch.setattr(report, "rows_of", lambda _: rows)
    assert report.scaling_lines() == [
        "| model | tokens | T=1 | T=2 | T=4 | T=10 | T=1, EP=2 |",
        "|---|---|---|---|---|---|---|",
        "| m | 512 |  |  | 50, 1 GiB, c |  |  |",
        "| m | 8,192 | 300, 1 GiB (2 layers offloaded), c | 200, 1 GiB, c |  | 100, 1 GiB (CUDA graph), c "
        "| 950, 1 GiB, c |",
    ]


def test_experts_on_several_gpus_are_shown_with_the_other_steps_of_their_day(monkeypatch):
    def step(layout: tuple[str, str], speed: float | None, *, date: str, model: str = "m", variant: str = "ours"):
        values = row(variant, speed, command="") | {"tensor_parallel": layout[0], "expert_parallel": layout[1]}
        return values | {"model": model, "date": date, "failure": "" if speed else "OutOfMemoryError: of 1 GiB"}

    rows = [
        step(("1", "2"), 900, date="2026-01-01"),
        step(("1", "1"), 400, date="2026-01-02", variant="hf"),
        step(("2", "2"), 300, date="2026-01-02", variant="ours, all-to-all"),
        step(("1", "4"), None, date="2026-01-02"),
        step(("1", ""), 200, date="2026-01-02", model="without experts"),
        step(("1", "1"), 500, date="2026-01-03"),
    ]
    monkeypatch.setattr(report, "rows_of", lambda _: rows)
    assert report.variant_lines(report.expert_steps())[2:] == [
        "| m | T=1 | 8,192 | hf | none | 400 | 0.5 | 1.0 | c |",
        "| m | T=2, EP=2 | 8,192 | ours, all-to-all | none | 300 | 0.5 | 1.0 | c |",
        "| m | T=1, EP=4 | 8,192 | ours | none | out of memory |  |  | c |",
    ]


def test_sharded_steps_have_their_tensor_parallelism_1_in_rows_without_the_column(monkeypatch):
    step = dict.fromkeys(report_sections.SHARDED_COLUMNS, "") | {"device": report.DEVICE, "data_parallel": "2"}
    without = {name: value for name, value in step.items() if name != "tensor_parallel"}
    rows = [step | {"tensor_parallel": "2"}, step, without]
    monkeypatch.setattr(report_sections, "rows_of", lambda _, device: rows if device == report.DEVICE else [])
    lines = report_sections.sharded_parts()[-1].splitlines()[2:]
    start = f"| {report.DEVICE} |  | 2 | "
    assert [line.removeprefix(start).partition(" ")[0] for line in lines] == ["2", "1", "1"]


def test_heads_are_columns(monkeypatch):
    def head(variant: str, tokens: int, ms: str):
        setting = {"head": "m", "tokens": str(tokens), "tensor_parallel": "1", "variant": variant, "ms": ms}
        return setting | {"over_floor": "1.0512", "peak_gib": "1.29", "date": "d", "commit": "c", "command": "a"}

    rows = [head("ours", 8192, "39.81"), head("peer", 8192, "40"), head("ours", 512, "2"), head("peer", 512, "")]
    rows += [head("other", 512, "3"), head("ours", 64, "1"), head("peer", 64, "")]
    rows += [head(name, 512, ms) | {"command": "slower peer"} for name, ms in (("ours", "1"), ("peer", "4"))]
    monkeypatch.setattr(report, "rows_of", lambda _: rows)
    assert report.head_lines() == [
        "| ms, x floor, GiB | m, T=1, 512 tokens | m, T=1, 8,192 tokens |",
        "|---|---|---|",
        "| ours | 2.0, 1.051, 1.29 | 39.8, 1.051, 1.29 |",
        "| other | 3.0, 1.051, 1.29 |  |",
        "| peer |  | 40.0, 1.051, 1.29 |",
    ]
    monkeypatch.setattr(report, "rows_of", lambda _: [])
    assert report.head_lines() == []


def test_plots_are_written(monkeypatch, tmp_path):
    rows = [row("ours", 100, command="a"), row("peer", 90, command="a")]
    monkeypatch.setattr(report, "rows_of", lambda _: rows)
    (path,) = report.plots(tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_readme_has_one_line_for_each_of_its_settings(monkeypatch):
    rows = []
    for command, tokens, recompute in (("a", 8192, "none"), ("b", 8192, "full"), ("c", 64, "none")):
        rows.append(row("ours", 300, command=command, tokens=tokens, recompute=recompute))
        rows.append(row("peer", 200, command=command, tokens=tokens, recompute=recompute))
    monkeypatch.setattr(report, "rows_of", lambda _: rows)
    assert len(report.step_lines()) == 2 + 3
    lines = report.step_lines([("m", "4", "64"), ("m", "4", "8192"), ("absent", "4", "64")])
    assert [line.split(" | ")[2] for line in lines[2:]] == ["64", "8,192"]


def test_a_race_in_which_all_failed_and_files_of_other_settings(monkeypatch, tmp_path):
    rows = [row("ours", None, command="a"), row("peer", None, command="a")]
    for recompute in ("full", "full, attention kept"):
        rows += [row("ours", 1, command=recompute, recompute=recompute), row("peer", 1, command=recompute)]
    rows[-1]["recompute"] = "full"
    monkeypatch.setattr(report, "rows_of", lambda _: rows)
    assert len(set(report.plots(tmp_path))) == 2


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


def test_planned_steps_are_summed_up_by_commit_of_the_planner(monkeypatch):
    def step(formulas: str, error: str, *, failure: str = "", seed: str = "3") -> dict[str, str]:
        about = {"device": report.DEVICE, "formulas": formulas, "seed": seed, "failure": failure}
        return about | dict.fromkeys(("allocated_error", "reserved_error", "step_error"), error) | {"host_error": ""}

    rows = [
        step("a", "-0.5"),
        step("a", "1.5"),
        step("a", "0.25", seed=""),
        step("a", "", failure="full"),
        step("b", "2"),
    ]
    monkeypatch.setattr(report_sections, "rows_of", lambda _, device: rows if device == report.DEVICE else [])
    *_, first, second = report_sections.planned_parts()[-1].splitlines()
    errors = "0.50 (-0.50 to +1.50)"
    assert first == f"| {report.DEVICE} | a | 4 | 3 | 1 | {errors} | {errors} |  | {errors} |  |"
    assert second.startswith(f"| {report.DEVICE} | b | 1 | 1 | 0 | 2.00 (+2.00 to +2.00) |")


def test_chosen_settings_are_compared_with_the_fastest(monkeypatch):
    def step(problem: str, rank: int, step_s: str, failure: str = "") -> dict[str, str]:
        return {"formulas": "a", "problem": problem, "rank": str(rank), "step_s": step_s, "failure": failure}

    rows = [step("p", 0, "1.0"), step("p", 1, "0.5"), step("p", 3, "", "full"), step("q", 1, "2.0")]
    monkeypatch.setattr(report_sections, "rows_of", lambda _: rows)
    *_, first, second = report_sections.choice_parts()[-1].splitlines()
    assert first == "| a | p | 2 | 1 | 1 s | 1 (0.5 s) | 50.0% |"
    assert second == "| a | q | 1 | 0 | failed | 1 (2 s) |  |"


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
    found = record.environment("bench")
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
    record.publish([{"a": 1}, {"b": 2}], ("a", "b"), "a race", args, module="bench")
    assert "a race" in capsys.readouterr().out and not path.exists()
    args.append = True
    record.publish([{"a": 1}, {"b": 2}], ("a", "b"), "a race", args, module="bench")
    header, first, _ = path.read_text(encoding="utf-8").splitlines()
    assert header.startswith("a,b,date,device,torch,") and first.startswith("1,,")
