"""Tests that a run with optimizer states on the host, killed in any phase of a step, goes on exactly."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.runs import environment, exact, rows
from tests.training.test_state_offload import offload, write

EVENTS = ("copy_in", "copy_out", "update", "rename")
STEPS = 12


def run(config: Path, counts: Path, event: str = "none", number: int = 0) -> int:
    program = [sys.executable, "-m", "tests.training.streamed_program", event, str(number), str(counts)]
    command = [*program, "--config", str(config)]
    return subprocess.run(command, env=environment(), capture_output=True, timeout=300, check=False).returncode


@pytest.mark.slow
@pytest.mark.parametrize("in_forward", [False, True])
def test_twenty_kills_in_all_phases_of_a_step_change_nothing(tmp_path: Path, in_forward: bool) -> None:
    """Ten kills of one run: the updates of a killed step, all or some of them, are lost with the step."""
    optimizer = offload(1.0, in_forward=in_forward) | {"decay_steps": STEPS}
    options = {"optimizer": optimizer, "trainer": {"max_steps": STEPS, "save_interval": 1}}
    counts = tmp_path / "counts.json"
    uninterrupted = tmp_path / "uninterrupted"
    assert run(write(uninterrupted, **options), counts) == 0
    seen = json.loads(counts.read_text(encoding="utf-8"))
    random_numbers = random.Random(5 + in_forward)
    config = write(tmp_path / "killed", **options)
    for number in range(10):
        # Within the events of one step: the run gets one step further at most, and never to its end.
        event = EVENTS[number % len(EVENTS)]
        last = max(1, seen[event] // STEPS)
        assert run(config, counts, event, random_numbers.randint(1, last)) == -signal.SIGKILL
    assert run(config, counts) == 0
    assert exact(tmp_path / "killed" / "run") == exact(uninterrupted / "run")
    found, expected = [rows(each / "run", "evaluation.jsonl") for each in (tmp_path / "killed", uninterrupted)]
    assert found == expected
    files = [each / "run" / "export" / "model.safetensors" for each in (tmp_path / "killed", uninterrupted)]
    assert files[0].read_bytes() == files[1].read_bytes()
