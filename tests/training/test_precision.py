"""Tests the names of precisions, and training with each of them on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.optimizer.loss_scaler import MAX_SCALE
from nxd_memopt.training.config.optimizer import MAX_LOSS_SCALE
from nxd_memopt.training.config.parsing import config_from_mapping
from nxd_memopt.training.config.train_config import OptimizerConfig
from nxd_memopt.training.optimizer import MasterWeightOptimizer
from tests.training.runs import rows, run_here, summary, write_config

MODEL = {"tokenizer": "t", "config_overrides": {"model_type": "llama"}}


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({}, ("32-true", "float32", True)),
        ({"precision": 32}, ("32-true", "float32", True)),
        ({"precision": "bf16-true"}, ("bf16-true", "bfloat16", False)),
        ({"precision": "bf16"}, ("bf16-mixed", "bfloat16", True)),
        ({"precision": "16"}, ("16-mixed", "float16", True)),
    ],
    ids=str,
)
def test_names_of_precisions(trainer: dict[str, object], expected: tuple[object, ...]) -> None:
    config = config_from_mapping({"model": MODEL, "trainer": trainer})
    assert (config.trainer.precision, config.dtype, config.master_weights) == expected


def test_nemos_names_of_the_loss_scale() -> None:
    nemo = {"native_amp_init_scale": 65536, "native_amp_growth_interval": 1000, "hysteresis": 2, "precision": 16}
    config = config_from_mapping({"model": MODEL | nemo})
    assert (config.trainer.precision, config.optimizer.initial_loss_scale) == ("16-mixed", 65536.0)
    for name, value in (("native_amp_growth_interval", 500), ("hysteresis", 3)):
        with pytest.raises(ValueError, match=rf"model\.{name} {value} is not supported: only {nemo[name]} is"):
            config_from_mapping({"model": MODEL | nemo | {name: value}})


@pytest.mark.parametrize("name", ["fp8", 8])
def test_other_names_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match=rf"trainer.precision '{name}' is not one of \['32-true', 'bf16-true', "):
        config_from_mapping({"model": MODEL, "trainer": {"precision": name}})


def test_the_largest_scale_is_that_of_the_scaler() -> None:
    assert MAX_LOSS_SCALE == MAX_SCALE


# Losses of 12 steps of LLaMA with 2 layers. fp16 has 11 significant bits, bf16 has 8.
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("16-mixed", 1e-3), pytest.param("bf16-mixed", 5e-3, marks=pytest.mark.slow)]
)
def test_losses_are_those_of_fp32(tmp_path: Path, precision: str, tolerance: float) -> None:
    short = {"max_steps": 12, "export": False}
    runs = []
    for name in ("32-true", precision):
        directory = tmp_path / name
        directory.mkdir()
        config = write_config(directory, trainer=short | {"precision": name}, optimizer={"initial_loss_scale": 65536})
        outcome = run_here(config)
        assert outcome.returncode == 0, outcome.stderr
        assert f"precision: {name}, " in outcome.stdout
        runs.append(directory / "run")
    wide, half = ([row["loss"] for row in rows(run)] for run in runs)
    assert half == pytest.approx(wide, rel=tolerance)
    norms = [[row["grad_norm"] for row in rows(run)] for run in runs]
    assert norms[1] == pytest.approx(norms[0], rel=30 * tolerance)
    after = [summary(run)["held_out_loss_after"] for run in runs]
    assert after[1] == pytest.approx(after[0], rel=tolerance)


def test_skipped_steps_keep_the_learning_rate_and_are_recorded(tmp_path: Path) -> None:
    """The largest scale overflows until it is small enough; a run that starts there has the same learning rates."""
    config = write_config(
        tmp_path, optimizer={"initial_loss_scale": 2.0**30}, trainer={"max_steps": 24, "precision": 16, "export": False}
    )
    outcome = run_here(config)
    assert outcome.returncode == 0, outcome.stderr
    steps = rows(tmp_path / "run")
    skipped = [row["skipped"] for row in steps]
    # At the edge a scale is small enough for some sequences and too large for others.
    count = skipped.index(False)
    assert 3 < count < 20 and sum(skipped) < 22
    # The second overflow and each further one halve the scale.
    halvings = [max(0, sum(skipped[:i]) - 1) for i in range(24)]
    assert [row["loss_scale"] for row in steps] == [2.0 ** (30 - each) for each in halvings]
    assert [row["grad_norm"] is None for row in steps] == skipped
    assert all(row["grad_norm"] > 0 for row in steps if not row["skipped"])
    # Warm-up over 2 updates: 0.005 is that of the first update, however many steps were skipped.
    assert [row["lr"] for row in steps[: count + 2]] == [0.005] * (count + 1) + [0.01]
    assert [row["step"] for row in steps] == list(range(1, 25))  # each step has its own sequences
    assert "overflow: skipped" in outcome.stdout


def test_a_weight_that_is_not_finite_is_an_error_and_not_a_skipped_step() -> None:
    parameter = nn.Parameter(torch.full((2, 2), torch.nan, dtype=torch.float16))
    optimizer = MasterWeightOptimizer([parameter], OptimizerConfig())
    assert optimizer.loss_scaler is not None
    optimizer.loss_scaler.scale_gradients_of(parameter.float().square().sum()).backward()
    assert not optimizer.reduce_gradients().isfinite()
    with pytest.raises(ValueError, match=r"a weight is NaN or infinite.* earlier checkpoint"):
        optimizer.step(0.1)


def test_devices_without_tf32_or_fp16_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    outcome = run_here(config, "--trainer.allow-tf32")
    assert outcome.returncode == 2
    assert "trainer.allow_tf32 true needs an NVIDIA GPU, and the backend is cpu; set it to false" in outcome.stderr
    monkeypatch.setattr(type(backend), "loss_scaling_refusal", lambda self: "is not supported here")
    outcome = run_here(config, "--trainer.precision", "16-mixed")
    assert outcome.returncode == 2
    assert "trainer.precision 16-mixed is not supported here; use bf16-mixed" in outcome.stderr


def test_trainium_refuses_fp16() -> None:
    from nxd_memopt.backends.neuron.native import NeuronBackend
    from nxd_memopt.backends.neuron.xla import XlaBackend

    for kind in (NeuronBackend, XlaBackend):
        refusal = object.__new__(kind).loss_scaling_refusal()
        assert refusal is not None
        assert "Trainium" in refusal
