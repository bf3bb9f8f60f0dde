"""Tests the training program: equal losses for every layout, resumption with other sizes, errors of its processes."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.training.runs import (
    LLAMA,
    TENSOR_AND_SEQUENCE,
    Outcome,
    losses,
    rows,
    run_here,
    run_on_pool,
    summary,
    train,
    write_config,
)


def succeed(outcome: Outcome) -> str:
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return outcome.stdout


def run(config: Path, *options: str, ranks: int) -> str:
    """Run the program without starting a process, and return its output: 10 times faster than ``train``."""
    if ranks == 1:
        return succeed(run_here(config, *options))
    return run_on_pool(config, *options, ranks=ranks)


def require_user_error(outcome: Outcome, message: str) -> None:
    """One line on standard error, exit code 2, no traceback."""
    lines = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    assert outcome.returncode == 2, outcome.stderr[-3000:]
    assert "Traceback" not in outcome.stderr
    assert len(lines) == 1 and message in lines[0], outcome.stderr[-3000:]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of an uninterrupted run on one process."""
    directory = tmp_path_factory.mktemp("reference")
    succeed(run_here(write_config(directory, trainer={"export": "verify", "val_check_interval": 4})))
    return directory / "run"


def test_one_process_learns_records_and_exports(reference: Path) -> None:
    steps, result = rows(reference), summary(reference)
    assert [row["step"] for row in steps] == list(range(1, 9))
    measured = {"tokens_per_s", "peak_memory_bytes", "planned_memory_bytes", "time", "tokens", "epoch"}
    assert set(steps[0]) == {"step", "loss", "grad_norm", "lr"} | measured
    assert [row["step"] for row in rows(reference, "evaluation.jsonl")] == [0, 4, 8]
    assert result["held_out_loss_after"] < 0.95 * result["held_out_loss_before"]
    assert result["transformers_difference"] < 1e-5  # fp32 sums in another order
    assert len(result["peak_memory_bytes"]) == 1
    assert list((reference / "tensorboard").iterdir())
    assert len(AutoTokenizer.from_pretrained(reference / "export")) == 257


ZERO1 = {"data_parallel": {"sharding": "zero1"}}


@pytest.mark.parametrize(
    ("ranks", "parallel", "sections"),
    [
        (4, TENSOR_AND_SEQUENCE, ZERO1),
        pytest.param(4, TENSOR_AND_SEQUENCE, {"optimizer": {"overlap_grad_reduce": True}}, marks=pytest.mark.slow),
    ],
    ids=["tensor2xdata2_zero1", "tensor2xdata2_overlap"],
)
def test_every_layout_has_the_losses_of_one_process(
    reference: Path, tmp_path: Path, ranks: int, parallel: dict[str, object], sections: dict[str, dict[str, object]]
) -> None:
    micro_batch = {"micro_batch_size": 2 if parallel else 1}
    trainer = {"export": "verify", "log_every_n_steps": 3}  # does not divide the 8 steps
    config = write_config(tmp_path, parallel=parallel, data=micro_batch, trainer=trainer, **sections)
    run(config, ranks=ranks)
    assert losses(tmp_path / "run") == pytest.approx(losses(reference), rel=2e-5)  # fp32, other summation orders
    result, expected = summary(tmp_path / "run"), summary(reference)
    assert result["held_out_loss_after"] == pytest.approx(expected["held_out_loss_after"], rel=2e-5)
    assert result["transformers_difference"] < 1e-5
    assert len(result["peak_memory_bytes"]) == ranks


@pytest.mark.parametrize(
    ("ranks", "parallel", "sections"),
    [
        (1, {}, {}),
        pytest.param(2, {}, ZERO1, marks=pytest.mark.slow),
    ],
    ids=["one", "data2_zero1"],
)
def test_a_run_resumes_with_other_sizes(
    reference: Path, tmp_path: Path, ranks: int, parallel: dict[str, object], sections: dict[str, dict[str, object]]
) -> None:
    """The first half with T=2, D=2 and ZeRO-1, saved in the background; then the losses of one process go on."""
    directory = tmp_path / "run"
    schedule = {"decay_steps": 8}
    trainer = {"max_steps": 4, "async_save": True, "export": False}
    first = write_config(tmp_path, parallel=TENSOR_AND_SEQUENCE, optimizer=schedule, trainer=trainer, **ZERO1)
    run(first, ranks=4)
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step_00000002", "step_00000004"]
    (tmp_path / "second").mkdir()
    second = write_config(
        tmp_path / "second",
        model={"tokenizer": str(tmp_path / "tokenizer")},
        parallel=parallel,
        data={"micro_batch_size": 1, "dataset": str(tmp_path / "lines.jsonl")},
        optimizer=schedule,
        **sections,
        trainer={"async_save": True, "export": "verify", "output_dir": str(directory)},
    )
    output = run(second, ranks=ranks)
    assert "resuming after step 4" in output
    assert "random streams are seeded with trainer.seed + 4" in " ".join(output.split())
    assert losses(directory) == pytest.approx(losses(reference), rel=2e-5)  # fp32, other summation orders
    assert summary(directory)["transformers_difference"] < 1e-5


@pytest.mark.slow
def test_a_full_disk_in_the_background_is_an_error_of_one_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, trainer={"async_save": True, "export": False})
    outcome = train(config, file_size_limit=60_000)  # the packed tokens have 25,000 bytes, a checkpoint more
    require_user_error(outcome, "could not write")
    assert "free disk space" in outcome.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*[0-9]"))


def test_gpt_neox_in_bfloat16_with_recompute(tmp_path: Path) -> None:
    sizes = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    model = {"config_overrides": sizes | {"model_type": "gpt_neox"}}
    config = write_config(tmp_path, model=model, trainer={"export": "verify", "precision": "bf16-mixed"})
    succeed(run_here(config, "--memory.recompute-granularity", "full"))
    result = summary(tmp_path / "run")
    assert result["held_out_loss_after"] < 0.95 * result["held_out_loss_before"]
    assert result["transformers_difference"] < 0.02  # bf16 keeps 8 bits


RECOMPUTE = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["norm", "mlp"]},
    "full": {"recompute_granularity": "full"},
}
NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"} | {"model_type": "gpt_neox"}
MODELS = {"llama": LLAMA, "gpt_neox": NEOX}
SHORT = {"max_steps": 4, "export": False}


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The output directory of a run of a model on two ranks, with eager layers."""

    @functools.cache
    def eager_run(name: str) -> Path:
        directory = tmp_path_factory.mktemp("eager")
        model = {"config_overrides": MODELS[name]}
        run(write_config(directory, model=model, parallel=TENSOR_AND_SEQUENCE, trainer=SHORT), ranks=2)
        return directory / "run"

    return eager_run


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "recompute"), [("llama", "none"), ("llama", "full"), ("gpt_neox", "selective")])
def test_compiled_layers_have_the_losses_of_eager_ones(
    eager: Callable[[str], Path], tmp_path: Path, name: str, recompute: str
) -> None:
    """With accumulation, clipping, evaluation; resumed, after the third step, by a run with eager layers.

    test_compile.py has the tests of compiled layers that are not slow.
    """
    expected = eager(name)
    sections = {
        "model": {"config_overrides": MODELS[name]},
        "parallel": TENSOR_AND_SEQUENCE,
        "memory": RECOMPUTE[recompute],
    }
    config = write_config(tmp_path, **sections, trainer=SHORT | {"max_steps": 3}, optimizer={"decay_steps": 4})
    compiled = train(config, "--trainer.compile", "layer", ranks=2)
    succeed(compiled)
    assert "compile layer: kernels are the compiler's" in compiled.stdout
    if recompute == "full":
        run(config, "--trainer.max-steps", "4", ranks=2)
    found = rows(tmp_path / "run")
    assert len(found) == (4 if recompute == "full" else 3)
    for row, other in zip(found, rows(expected), strict=False):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)  # fp32, other orders of sums
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_pretrained_directory_is_loaded(reference: Path, tmp_path: Path) -> None:
    model = {"pretrained": str(reference / "export"), "tokenizer": None, "config_overrides": {}}
    succeed(run_here(write_config(tmp_path, model=model, trainer={"max_steps": 0})))
    before = summary(tmp_path / "run")["held_out_loss_before"]
    assert before == pytest.approx(summary(reference)["held_out_loss_after"], rel=1e-6)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    config = write_config(tmp_path, optimizer={"lr": 1e38, "warmup_steps": 0}, trainer={"save_interval": 1})
    require_user_error(run_here(config), "at step 2: nothing was saved after the last checkpoint")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001"]
    assert not (tmp_path / "run" / "export").exists()


def test_port_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in world.items():
            monkeypatch.setenv(name, value)
        outcome = run_here(write_config(tmp_path))
    require_user_error(outcome, "is in use by another program")
