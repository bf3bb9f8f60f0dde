"""Tests the training program on simulated NeuronCores: the CPU's losses, resumption, compiled graphs, extraction."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_memopt.training import loop
from nxd_memopt.training.config.parsing import parse_config
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.runtime.distributed import init_distributed
from tests.dist import pool
from tests.training.runs import LLAMA, Outcome, rows, summary, train, write_config

XLA = {"NXD_MEMOPT_BACKEND": "xla", "PJRT_DEVICE": "CPU", "NEURON_CC_FLAGS": "-O1"}
TENSOR_AND_SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel_enabled": True}
ONE_LAYER = {"config_overrides": LLAMA | {"num_hidden_layers": 1}}
FULL_RECOMPUTE = ("--memory.recompute-granularity", "full")
LOSS_BOUND = 1e-5  # fp32 sums in another order over 4 steps


def succeed(outcome: Outcome) -> Outcome:
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return outcome


def config_in(directory: Path, **sections: dict[str, object]) -> Path:
    directory.mkdir()
    trainer = {"max_steps": 4, "save_interval": 2, "log_every_n_steps": 3}
    return write_config(directory, trainer=trainer | sections.pop("trainer", {}), **sections)


def require_equal_losses(simulated: Path, cpu: Path) -> None:
    """Every step's loss and each held-out loss of the CPU's run; a resumed run has one more, where it stopped."""
    for name, key in (("metrics.jsonl", "loss"), ("evaluation.jsonl", "held_out_loss")):
        found = {row["step"]: row[key] for row in rows(simulated, name)}
        expected = {row["step"]: row[key] for row in rows(cpu, name)}
        assert {step: found[step] for step in expected} == pytest.approx(expected, abs=LOSS_BOUND)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tensor_parallel_losses_equal_the_cpus_also_after_resumption(tmp_path: Path) -> None:
    cpu = config_in(tmp_path / "cpu", parallel=TENSOR_AND_SEQUENCE)
    simulated = config_in(tmp_path / "xla", parallel=TENSOR_AND_SEQUENCE)
    succeed(train(cpu, *FULL_RECOMPUTE, ranks=2))
    half = (
        "--trainer.max-steps",
        "2",
        "--optimizer.decay-steps",
        "4",
        "--trainer.export=false",
        "--trainer.async-save",
    )
    succeed(train(simulated, *FULL_RECOMPUTE, *half, ranks=2, env=XLA))
    rest = ("--optimizer.decay-steps", "4", "--trainer.export", "verify")
    resumed = succeed(train(simulated, *FULL_RECOMPUTE, *rest, ranks=2, env=XLA))
    assert "backend xla" in resumed.stdout and "resuming after step 2" in resumed.stdout
    require_equal_losses(tmp_path / "xla" / "run", tmp_path / "cpu" / "run")
    assert summary(tmp_path / "xla" / "run")["transformers_difference"] < LOSS_BOUND


@pytest.mark.timeout(600)
@pytest.mark.parametrize("disabled", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_data_parallel_losses_under_zero1_equal_the_cpus(disabled: str, tmp_path: Path) -> None:
    sections = {"data_parallel": {"sharding": "zero1"}, "data": {"micro_batch_size": 1}, "trainer": {"export": False}}
    cpu, simulated = (config_in(tmp_path / name, model=ONE_LAYER, **sections) for name in ("cpu", "xla"))
    succeed(train(cpu))
    succeed(train(simulated, ranks=2, env=XLA | {"XLA_DISABLE_FUNCTIONALIZATION": disabled}))
    require_equal_losses(tmp_path / "xla" / "run", tmp_path / "cpu" / "run")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_updates_in_backward_have_the_cpus_losses(tmp_path: Path) -> None:
    sections = {
        "data": {"micro_batch_size": 4},
        "optimizer": {"in_backward": True, "clip_grad": 0},
        "trainer": {"export": False},
    }
    cpu, simulated = (config_in(tmp_path / name, **sections) for name in ("cpu", "xla"))
    succeed(train(cpu))
    succeed(train(simulated, env=XLA))
    require_equal_losses(tmp_path / "xla" / "run", tmp_path / "cpu" / "run")


def run_in_this_process(config: TrainConfig) -> None:
    pool.reset_process(seed=pool.SEED)
    init_distributed(config)
    loop.run(config)


def test_extraction_writes_nothing_but_tokens_and_does_not_look_for_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_in(tmp_path / "xla", optimizer={"lr": 1e38, "warmup_steps": 0})  # NaN at step 2
    config = parse_config(["--config", str(file)])
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    run_in_this_process(config)
    assert "NEURON_EXTRACT_GRAPHS_ONLY: 2 steps" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "xla" / "run").iterdir()] == ["tokens"]
    monkeypatch.delenv("NEURON_EXTRACT_GRAPHS_ONLY")
    with pytest.raises(ValueError, match="nothing was saved after the last checkpoint"):
        run_in_this_process(config)
    assert not (tmp_path / "xla" / "run" / "checkpoints").exists()
