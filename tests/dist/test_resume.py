"""Tests that a run continues with other tensor-parallel, data-parallel and ZeRO sizes, and with the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.runs import LLAMA, rows, run_here, run_on_pool, write_config

STEPS = 20
MODEL = LLAMA | {"hidden_size": 32, "num_attention_heads": 4}  # 2 KV heads: with T=4 two ranks share each
SHORT = {"export": False, "save_interval": 0, "log_every_n_steps": 20}


def relative_differences(found: list[float], expected: list[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]


def start(directory: Path, steps: int) -> tuple[Path, list[float]]:
    """The YAML file of a run that is resumed, and the losses of one that is not: clipping active, accumulation 2."""
    directory.mkdir(exist_ok=True)
    optimizer = {"decay_steps": steps, "clip_grad": 0.1}
    model = {"config_overrides": MODEL}
    config = write_config(directory, model=model, optimizer=optimizer, trainer=SHORT | {"max_steps": steps})
    unchanged = directory / "unchanged"
    outcome = run_here(config, "--trainer.output-dir", str(unchanged))
    assert outcome.returncode == 0, outcome.stderr
    assert min(row["grad_norm"] for row in rows(unchanged)) > optimizer["clip_grad"]
    return config, [row["loss"] for row in rows(unchanged)]


@pytest.mark.slow
def test_tensor_parallel_sizes_1_2_4_1(tmp_path: Path) -> None:
    """20 steps after each change; the last checkpoint of each size is the next one's start."""
    config, expected = start(tmp_path, 4 * STEPS)
    for part, size in enumerate((1, 2, 4, 1), start=1):
        options = ["--trainer.max-steps", str(part * STEPS)]
        if size == 1:
            outcome = run_here(config, *options)
            assert outcome.returncode == 0, outcome.stderr
            output = outcome.stdout
        else:
            options += ["--parallel.tensor-model-parallel-size", str(size)]
            output = run_on_pool(config, *options, "--parallel.sequence-parallel-enabled", ranks=size)
        if part > 1:
            before = (1, 2, 4)[part - 2]
            assert f"parallel.tensor_model_parallel_size: {before} -> {size}" in output
            assert f"resuming after step {(part - 1) * STEPS}" in output
    differences = relative_differences([row["loss"] for row in rows(tmp_path / "run")], expected)
    print(f"largest relative difference of the losses: {max(differences):.1e}")
    assert len(differences) == 4 * STEPS
    assert max(differences) < 1e-5  # fp32, other summation orders over 80 steps


def test_data_parallel_size_and_zero1_change(tmp_path: Path) -> None:
    """D=1, then D=2 with ZeRO-1, then T=2: masters, states and the position in the data go on."""
    config, expected = start(tmp_path, 6)
    assert run_here(config, "--trainer.max-steps", "2").returncode == 0
    output = run_on_pool(config, "--trainer.max-steps", "4", "--data-parallel.sharding", "zero1", ranks=2)
    assert "data-parallel size: 1 -> 2" in output
    assert "data_parallel.sharding: none -> zero1" in output
    output = run_on_pool(config, "--parallel.tensor-model-parallel-size", "2", ranks=2)
    assert "data-parallel size: 2 -> 1" in output
    assert "data_parallel.sharding: zero1 -> none" in output
    assert max(relative_differences([row["loss"] for row in rows(tmp_path / "run")], expected)) < 1e-5  # fp32
