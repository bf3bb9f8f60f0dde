"""Tests the picture of the losses: rows with and without losses, and that a failure does not fail the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nxd_memopt.training.reporting import reporter as reporter_module
from nxd_memopt.training.reporting.loss_plot import draw_losses, running_mean
from nxd_memopt.training.reporting.reporter import Reporter
from tests.training.config.test_config import build

SKIPPED = {"step": 4, "loss": None, "lr": 0.1}
ROWS = [{"step": step, "loss": 2 + 1 / step, "lr": 0.1} for step in range(1, 61)]


@pytest.mark.parametrize("rows", [[SKIPPED], ROWS[:1], [*ROWS, SKIPPED]])
@pytest.mark.parametrize("evaluations", [[], [{"step": 0, "held_out_loss": 3.0}, {"step": 60, "held_out_loss": 2.5}]])
def test_every_kind_of_run_is_drawn(tmp_path: Path, rows: list[dict], evaluations: list[dict]) -> None:
    draw_losses(tmp_path / "loss.png", rows, evaluations)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]


def test_the_smoothed_loss_is_the_mean_of_the_steps_up_to_its_point() -> None:
    assert running_mean(np.array([1.0, 2.0, 6.0, 1.0]), 3) == pytest.approx([3.0, 3.0])


def test_a_run_goes_on_without_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(reporter_module, "draw_losses", fail)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "lr": 0.1}\n')
    with Reporter(build(trainer={"output_dir": str(tmp_path)}), enabled=True, first_step=1):
        pass
    assert "loss.png is not drawn: RuntimeError: no fonts" in capsys.readouterr().out
