"""Tests the files that record a run's steps: cut off rows, rows to repeat, and content of other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxd_memopt.training.reporting.records import Rows
from nxd_memopt.training.reporting.reporter import Reporter
from tests.training.config.test_config import build

ROWS = [{"step": step, "loss": 1.5} for step in (1, 2, 3)]
TEXT = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


@pytest.mark.parametrize("rest", [b"", b'{"step": 4, "lo', b"\0\0\0\0"])
def test_a_cut_off_last_row_is_removed(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(TEXT + rest)
    assert Rows(path, 3).rows == ROWS
    assert path.read_bytes() == TEXT


def test_a_complete_last_row_without_a_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(TEXT[:-1])
    assert Rows(path, 3).rows == ROWS
    assert path.read_bytes() == TEXT


def test_rows_of_steps_to_repeat_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(TEXT)
    assert Rows(path, 2).rows == ROWS[:2]


def test_the_first_row_creates_the_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = Rows(path, 2)
    assert rows.rows == [] and not path.exists()
    rows.append(ROWS[0])
    assert Rows(path, 2).rows == ROWS[:1]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (TEXT + b'{"step": 4, "lo\n', 4),  # with a newline: not what a kill leaves
        (b"text\n" + TEXT, 1),
        (TEXT + b'{"epoch": 4}', 4),
        (b'{"step": "1"}\n', 1),
        (b"\xff\xfe\n", 1),
    ],
)
def test_other_lines_are_named_and_kept(tmp_path: Path, content: bytes, line: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"metrics.jsonl line {line} is not a row with a step.*rename the file"):
        Rows(path, 3)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_row_on_a_full_disk_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = Rows(path, 0)
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"could not write .*metrics.jsonl: .*No space left.*: free disk space"):
        rows.append({"step": 1})


def test_records_of_another_run_are_not_continued(tmp_path: Path) -> None:
    config = build(trainer={"output_dir": str(tmp_path)})
    for name, row in (("metrics.jsonl", {"step": 1}), ("evaluation.jsonl", {"step": 0, "held_out_loss": 5.5})):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    for continues in (True, False):
        with Reporter(config, enabled=True, first_step=3, continues=continues) as reporter:
            assert reporter.recorded_evaluation(0) == (5.5 if continues else None)
        assert bool((tmp_path / "metrics.jsonl").read_text()) == continues
