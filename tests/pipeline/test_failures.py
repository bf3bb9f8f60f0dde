"""Tests of runs with stages of which one is killed, fails or is slow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.runs import LLAMA, Outcome, environment, exact, rows, write_config

STAGES = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
MODEL = {"num_hidden_layers": 4, "tie_word_embeddings": True, "attention_dropout": 0.1}
KILLS = (("1", "forward", 19), ("0", "exchange", 30), ("0", "evaluation", 2), ("1", "save", 3), ("0", "rename", 6))
"""Rank, event, and its number since the start; the first three come before any checkpoint, the others in one."""


def write(directory: Path) -> Path:
    directory.mkdir()
    trainer = {"max_steps": 8, "save_interval": 2, "val_check_interval": 2, "async_save": True}
    model = {"config_overrides": LLAMA | MODEL}
    return write_config(directory, parallel=STAGES, model=model, data={"micro_batch_size": 1}, trainer=trainer)


def run(config: Path, *failure: object, launcher: tuple[str, ...] = ()) -> Outcome:
    """Train on two ranks; ``failure`` is what ``failing_program`` takes: rank, event, number and action."""
    words = [sys.executable, *launcher, "-m", "tests.pipeline.failing_program"]
    words += map(str, failure or ("0", "save", 0, "kill"))
    done = subprocess.run(
        [*words, "--config", str(config)], env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def require_equal(found: Path, expected: Path) -> None:
    assert exact(found) == exact(expected)
    assert rows(found, "evaluation.jsonl") == rows(expected, "evaluation.jsonl")
    files = [each / "export" / "model.safetensors" for each in (found, expected)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run without failures."""
    directory = tmp_path_factory.mktemp("failures") / "whole"
    outcome = run(write(directory))
    assert outcome.returncode == 0, outcome.stderr
    return directory / "run"


@pytest.mark.slow
def test_kills_in_all_phases_change_nothing(whole: Path, tmp_path: Path) -> None:
    """Each kill is reported in one line: what the other rank sees of it is no second error."""
    config = write(tmp_path / "killed")
    for rank, event, number in KILLS:
        outcome = run(config, rank, event, number, "kill")
        assert outcome.returncode == 137, (event, outcome.stderr)
        (line,) = outcome.stderr.splitlines()
        assert line.startswith(f"error: rank {rank} was ended by SIGKILL")
    outcome = run(config)
    assert outcome.returncode == 0, outcome.stderr
    require_equal(tmp_path / "killed" / "run", whole)


@pytest.mark.slow
def test_an_error_of_a_stage_is_shown_once_and_ends_all(tmp_path: Path) -> None:
    config = write(tmp_path / "failed")
    outcome = run(config, "1", "forward", 25, "raise")
    assert outcome.returncode == 1
    assert outcome.stderr.count("Traceback") == outcome.stderr.count("Error: ") == 1, outcome.stderr
    assert "[rank1]: RuntimeError: the planted error" in outcome.stderr
    assert "in the forward of micro-batch 2 on stage 1 of the stages 0 to 3" in outcome.stderr.splitlines()[-1]


@pytest.mark.slow
def test_under_torchrun_the_other_rank_says_nothing_else(tmp_path: Path) -> None:
    """torchrun ends it by SIGTERM: it reports the signal, and neither its lost connection nor the end of training."""
    config = write(tmp_path / "failed")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    outcome = run(config, "1", "forward", 25, "raise", launcher=launcher)
    assert outcome.returncode == 1
    assert outcome.stderr.count("[rank1]: Traceback") == 1 and "[rank0]" not in outcome.stderr, outcome.stderr
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("stopped by SIGTERM")]
    assert line == "stopped by SIGTERM during training: start the same command to continue from the last checkpoint"


@pytest.mark.slow
def test_a_slow_stage_is_waited_for(whole: Path, tmp_path: Path) -> None:
    config = write(tmp_path / "slow")
    outcome = run(config, "1", "forward", 25, "20")
    assert outcome.returncode == 0, outcome.stderr
    require_equal(tmp_path / "slow" / "run", whole)
