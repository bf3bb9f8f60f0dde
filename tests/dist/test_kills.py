"""Tests that a run that was killed at any moment goes on exactly with the same command."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.runs import (
    LLAMA,
    TENSOR_AND_SEQUENCE,
    command,
    environment,
    exact,
    rows,
    summary,
    train,
    write_config,
)

RANKS = 2
SECTIONS = {
    "parallel": TENSOR_AND_SEQUENCE,
    "model": {"config_overrides": LLAMA | {"attention_dropout": 0.1}},  # resumption needs every random state
}


def has_rows(run: Path, count: int) -> bool:
    path = run / "metrics.jsonl"
    return path.is_file() and path.read_bytes().count(b"\n") >= count


# The moment from which on a run is killed, after a random delay.
PHASES: dict[str, Callable[[Path], bool]] = {
    "tokenizing": lambda run: (run / "run.lock").is_file(),
    "training": lambda run: has_rows(run, 3),
    "saving": lambda run: has_rows(run, 3) and bool(list((run / "checkpoints").glob("*.tmp"))),
    "any": lambda run: (run / "run.lock").is_file(),
    "exporting": lambda run: (run / ".export.incomplete").exists(),
}
DELAYS_S = {"tokenizing": 0.2, "training": 0.2, "saving": 0.02, "any": 4.0, "exporting": 0.02}


def workers(launcher: int) -> list[int]:
    """The ids of the ranks' processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == launcher:
            found.append(int(path.parent.name))
    return sorted(found)


def start_and_kill(config: Path, run: Path, phase: str, random_numbers: random.Random) -> bool:
    """Start the program and kill a rank, or all, with SIGKILL; return False if the run ended before."""
    process = subprocess.Popen(
        command(config, ranks=RANKS),
        env=environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    try:
        while not PHASES[phase](run):
            if process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"no moment of {phase} in 240 s"
            time.sleep(0.001)
        time.sleep(random_numbers.uniform(0, DELAYS_S[phase]))
        if process.poll() is not None:
            return False
        ranks = workers(process.pid)
        victim = random_numbers.randrange(RANKS + 1)
        if victim < len(ranks):
            # The launcher notices, and ends the other rank.
            os.kill(ranks[victim], signal.SIGKILL)
            process.wait(timeout=120)
    finally:
        for pid in [*workers(process.pid), process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
    return True


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run that was not interrupted."""
    directory = tmp_path_factory.mktemp("whole")
    outcome = train(write_config(directory, **SECTIONS), ranks=RANKS)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return directory / "run"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_twenty_kills_in_all_phases_change_nothing(whole: Path, tmp_path: Path, seed: int) -> None:
    """Four runs of five kills each."""
    random_numbers = random.Random(seed)
    config = write_config(tmp_path, **SECTIONS, trainer={"async_save": seed % 2 == 1})
    run = tmp_path / "run"
    for phase in PHASES:
        # A finished run that is started again exports again, so that moment comes at each start.
        tries = 0
        while not start_and_kill(config, run, phase, random_numbers):
            tries += 1
            assert tries < 4, f"the run always ended before it could be killed in {phase}"
    resumed = train(config, ranks=RANKS)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert exact(run) == exact(whole)
    assert rows(run, "evaluation.jsonl") == rows(whole, "evaluation.jsonl")
    for name in ("held_out_loss_before", "held_out_loss_after"):
        assert summary(run)[name] == summary(whole)[name]
    assert (run / "export" / "model.safetensors").read_bytes() == (whole / "export" / "model.safetensors").read_bytes()
    left = {path.name for path in run.rglob("*") if "incomplete" in path.name or path.name.startswith("run.lock")}
    assert left == set()
