"""Tests when the training script reads values from the device, and that it stops at one that is not finite."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
import torch

from nxd_memopt.training.config.train_config import ModelConfig, TrainConfig, TrainerConfig
from nxd_memopt.training.reporting.metrics import DeferredMetrics, StepResult
from nxd_memopt.training.reporting.reporter import Reporter
from nxd_memopt.training.reporting.step_metrics import Trained
from tests.training.runs import rows


def step(number: int, loss: float | torch.Tensor = 1.0, grad_norm: float = 2.0) -> StepResult:
    loss = loss if isinstance(loss, torch.Tensor) else torch.tensor(loss)
    return StepResult(number, loss, torch.tensor(grad_norm), lr=0.1)


@pytest.fixture
def metrics(tmp_path: Path) -> DeferredMetrics:
    """Reads every third step."""
    config = TrainConfig(ModelConfig(pretrained="model"), trainer=TrainerConfig(output_dir=str(tmp_path)))
    reporter = Reporter(config, enabled=True, first_step=0)

    def trained(step: int) -> Trained:
        return Trained(tokens=100 + 8 * step, epoch=step / 4)

    return DeferredMetrics(reporter, every=3, tokens_per_step=8, trained=trained, utilization_per_token=0.125)


def test_values_are_read_together_at_the_interval(metrics: DeferredMetrics, tmp_path: Path) -> None:
    for number in range(1, 6):
        metrics.start()
        metrics.add(step(number, loss=0.5 * number))
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]  # the first alone, the others at multiples of 3
    metrics.add(step(6, loss=3.0))
    found = rows(tmp_path)
    assert [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in found] == [
        (number, 0.5 * number, 2.0, 0.1) for number in range(1, 7)
    ]
    assert [(row["tokens"], row["epoch"]) for row in found] == [(100 + 8 * step, step / 4) for step in range(1, 7)]
    times = [datetime.fromisoformat(row["time"]) for row in found]
    assert times == sorted(times)
    assert all(each.utcoffset() is not None for each in times)
    assert len({row["tokens_per_s"] for row in found}) == 3
    assert [row["mfu"] for row in found] == [0.125 * row["tokens_per_s"] for row in found]


def test_reading_early_leaves_nothing_to_read_again(metrics: DeferredMetrics, tmp_path: Path) -> None:
    metrics.add(step(1))
    metrics.add(step(2))
    metrics.read()
    metrics.read()
    metrics.add(step(3))
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("loss", "grad_norm", "message"), [(float("nan"), 1.0, "loss is nan"), (1.0, float("inf"), "grad_norm is inf")]
)
def test_what_is_not_finite_stops_the_run_and_is_not_recorded(
    metrics: DeferredMetrics, tmp_path: Path, loss: float, grad_norm: float, message: str
) -> None:
    metrics.add(step(1))
    metrics.add(step(2, loss, grad_norm))
    with pytest.raises(ValueError, match=f"{message} at step 2: nothing was saved after the last checkpoint"):
        metrics.read()
    assert [row["step"] for row in rows(tmp_path)] == [1]
