"""Tests that the best checkpoint stays, across a resume, and that a finished run's summary stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_memopt.training import loop
from tests.training.runs import Outcome, require_converted, run_here, summary, write_config

# Held-out losses by step: the best one before, at and after the step at which the first start ends.
LOSSES = {0: 5.0, 1: 3.5, 2: 3.0, 3: 3.2, 4: 3.1, 5: float("nan"), 6: 2.9, 7: 3.3, 8: 3.4}


@pytest.mark.parametrize("background", [False, True])
def test_the_best_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    monkeypatch.setattr(loop, "held_out_loss", lambda training, *_, **__: LOSSES[training.step])
    trainer = {"save_interval": 0, "val_check_interval": 1, "keep_checkpoints": 1, "keep_best": True}
    file = write_config(tmp_path, trainer=trainer | {"async_save": background, "output_dir": str(tmp_path / "run")})
    checkpoints = tmp_path / "run" / "checkpoints"

    def start(steps: int) -> tuple[list[int], Outcome]:
        outcome = run_here(file, "--trainer.max-steps", str(steps), "--optimizer.decay-steps", "8")
        assert outcome.returncode == 0, outcome.stderr
        return sorted(int(path.name[5:]) for path in checkpoints.iterdir()), outcome

    # The best step is saved though no other option asks for it, and stays next to the newest one.
    steps, outcome = start(4)
    assert steps == [2, 4] and "step_00000002, held-out loss 3.0000" in outcome.stdout
    assert summary(tmp_path / "run")["best_held_out_loss"] == 3.0
    # Of the losses of both starts; a loss that is no number is no record.
    steps, _ = start(8)
    assert steps == [6, 8]
    found = summary(tmp_path / "run")
    assert (found["best_checkpoint"], found["best_held_out_loss"]) == (str(checkpoints / "step_00000006"), 2.9)
    # A start of the finished run changes neither.
    path = tmp_path / "run" / "summary.json"
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    assert start(8)[0] == [6, 8] and (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert found["tokens_per_s"] > 0
    # Others may read it, as far as the umask allows.
    assert (checkpoints / "step_00000008").stat().st_mode == checkpoints.stat().st_mode
    require_converted(tmp_path / "run")


@pytest.mark.parametrize(
    ("section", "option", "value"),
    [("data", "eval_sequences", 0), ("trainer", "val_check_interval", 0), ("trainer", "save_interval", "never")],
)
def test_without_evaluations_or_checkpoints_there_is_no_best_one(
    tmp_path: Path, section: str, option: str, value: object
) -> None:
    sections = {"trainer": {"keep_best": True, "val_check_interval": 2}}
    sections[section] = sections.get(section, {}) | {option: value}
    outcome = run_here(write_config(tmp_path, **sections))
    assert outcome.returncode == 2 and f"{section}.{option} is {value}" in outcome.stderr
