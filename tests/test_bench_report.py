"""README's performance table: the last run of a setting counts, and its best peer."""

from __future__ import annotations

import report


def row(variant: str, speed: float | None, *, command: str, recompute: str = "none", tokens: int = 8192):
    values = {"model": "m", "tensor_parallel": "4", "tokens": str(tokens), "variant": variant, "recompute": recompute}
    values |= {"tokens_per_s_per_device": "" if speed is None else str(speed), "mfu": "0.5", "peak_gib": "1.0"}
    return values | {"date": "2026-01-01", "commit": "c", "command": command, "device": "GPU"}


def test_the_last_race_and_its_best_peer(monkeypatch):
    rows = [
        row("ours", 100, command="old"),
        row("peer", 400, command="old"),
        row("ours", 300, command="new"),
        row("slow", 100, command="new"),
        row("fast", 200, command="new"),
        row("failed", None, command="new"),
        row("ours", 50, command="ours alone, no race"),
        row("ours", 80, command="full", recompute="full, attention kept"),
        row("fast", 40, command="full", recompute="full"),
        row("ours", 10, command="short", tokens=512),
        row("fast", 20, command="short", tokens=512),
    ]
    monkeypatch.setattr(report, "rows_of", lambda _: rows)
    assert report.step_lines()[2:] == [
        "| m | 4 | 512 | none | 10 | 0.5 | 1.0 | fast: 20 | 1.0 | 0.50 |",
        "| m | 4 | 8,192 | full, attention kept | 80 | 0.5 | 1.0 | fast: 40 | 1.0 | 2.00 |",
        "| m | 4 | 8,192 | none | 300 | 0.5 | 1.0 | fast: 200 | 1.0 | 1.50 |",
    ]


def test_plots_are_written(monkeypatch, tmp_path):
    rows = [row("ours", 100, command="a"), row("peer", 90, command="a")]
    monkeypatch.setattr(report, "rows_of", lambda _: rows)
    (path,) = report.plots(tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
