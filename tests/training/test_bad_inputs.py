"""Tests that a bad input ends the training program with one line that names it and the remedy, and loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.bad_inputs import CASES
from tests.training.bad_inputs.case import BadInput
from tests.training.runs import run_here


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of ``directory``, by relative path."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_line_names_the_fault_and_nothing_is_lost(case: BadInput, tmp_path: Path) -> None:
    config = case.prepare(tmp_path)
    before = contents(tmp_path)
    outcome = run_here(config, *case.options)
    lines = outcome.stderr.splitlines()
    assert outcome.returncode == 2, outcome.stdout[-2000:] + outcome.stderr[-2000:]
    # Several problems have a line each.
    assert lines[0].startswith("error: ") and all(line.startswith("- ") for line in lines[1:]), outcome.stderr
    assert [part for part in case.says if part not in outcome.stderr] == [], outcome.stderr
    after = contents(tmp_path)
    assert {name: after.get(name) for name in before} == before
