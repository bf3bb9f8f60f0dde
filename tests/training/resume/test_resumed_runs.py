"""Tests that a resumed run keeps its losses over every change that may not alter them, and says what changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from nxd_memopt.checkpoint.sharded.index import read_checked_json, write_json
from nxd_memopt.training.config.train_config import OptimizerConfig
from nxd_memopt.training.data.packed.sequences import PackedSequences
from nxd_memopt.training.data.packing import Tokens
from nxd_memopt.training.optimizer import MasterWeightOptimizer
from nxd_memopt.training.schedule import learning_rate
from tests.training.runs import LINES, Outcome, losses, rows, run_here, summary, write_config, write_jsonl

SCHEDULE = {"decay_steps": 8}
HALF = ("--trainer.max-steps", "4")


def begin(directory: Path, **sections: dict[str, Any]) -> Path:
    """Train the first 4 of 8 steps; return the YAML file."""
    directory.mkdir(exist_ok=True)
    sections["optimizer"] = SCHEDULE | sections.get("optimizer", {})
    sections["trainer"] = {"export": False} | sections.get("trainer", {})
    config = write_config(directory, **sections)
    succeed(run_here(config, *HALF))
    return config


def succeed(outcome: Outcome) -> str:
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return outcome.stdout


def refuse(outcome: Outcome, *parts: str) -> None:
    assert outcome.returncode == 2, outcome.stdout[-1000:] + outcome.stderr[-3000:]
    assert len(outcome.stderr.splitlines()) == 1
    assert [part for part in parts if part not in outcome.stderr] == [], outcome.stderr


def set_options(config: Path, section: str, **options: Any) -> None:
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    values[section] |= options
    config.write_text(yaml.safe_dump(values), encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of 8 steps without interruption."""
    directory = tmp_path_factory.mktemp("whole")
    succeed(run_here(write_config(directory, optimizer=SCHEDULE, trainer={"export": False})))
    return losses(directory / "run")


def test_changes_that_keep_the_losses(whole: list[float], tmp_path: Path) -> None:
    options = {
        "data.micro-batch-size": "1",
        "data.eval-sequences": "3",
        "trainer.val-check-interval": "3",
        "trainer.log-every-n-steps": "2",
        "trainer.save-interval": "3",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    output = succeed(run_here(begin(tmp_path), *words)).splitlines()
    lines = (
        "data.micro_batch_size: 2 -> 1",
        "data.eval_sequences: 6 -> 3",
        "trainer.val_check_interval: 0 -> 3",
        "trainer.log_every_n_steps: 1 -> 2",
        "trainer.save_interval: 2 -> 3",
        "trainer.max_steps: 4 -> 8",
    )
    assert [line for line in lines if line not in output] == [], output
    assert losses(tmp_path / "run") == pytest.approx(whole, rel=1e-6)  # sums over other micro-batches


def test_moved_data_and_tokenizer_with_equal_content(whole: list[float], tmp_path: Path) -> None:
    config = begin(tmp_path)
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move(tmp_path / "lines.jsonl", moved / "text.jsonl")
    shutil.move(tmp_path / "tokenizer", moved / "words")
    set_options(config, "data", dataset=str(moved / "text.jsonl"))
    set_options(config, "model", tokenizer=str(moved / "words"))
    output = succeed(run_here(config))
    assert f"data.dataset: {tmp_path / 'lines.jsonl'} -> {moved / 'text.jsonl'}, with equal content" in output
    assert len(list((tmp_path / "run" / "tokens").iterdir())) == 1  # the same data: not tokenized again
    assert f"model.tokenizer: {tmp_path / 'tokenizer'} -> {moved / 'words'}, with equal content" in output
    assert losses(tmp_path / "run") == whole


def test_other_content_is_refused_unless_asked_for(tmp_path: Path) -> None:
    config = begin(tmp_path)
    write_jsonl(tmp_path / "lines.jsonl", [line.replace("abc", "xbc") for line in LINES])
    refuse(run_here(config), "the packed tokens differ: restore it", "--model.warm-start", "allow-changes data.dataset")
    output = succeed(run_here(config, "--trainer.allow-changes", "data.dataset"))
    assert "they are read from their first sequence on" in output
    # A restart without the option continues with the new data.
    succeed(run_here(config))
    write_jsonl(tmp_path / "lines.jsonl", LINES)
    refuse(run_here(config), "the packed tokens differ")


@pytest.mark.slow
def test_another_learning_rate_when_asked(whole: list[float], tmp_path: Path) -> None:
    config = begin(tmp_path)
    refuse(
        run_here(config, "--optimizer.lr", "0.02"), "optimizer.lr was 0.01 and is 0.02", "allow-changes optimizer.lr"
    )
    options = ("--optimizer.lr", "0.02", "--optimizer.clip-grad", "0.5")
    output = succeed(run_here(config, *options, "--trainer.allow-changes", "optimizer.lr", "optimizer.clip_grad"))
    assert "optimizer.lr: 0.01 -> 0.02, from this step on" in output
    rates = [row["lr"] for row in rows(tmp_path / "run")]
    assert rates[4] == pytest.approx(2 * expected_rate(5, decay_steps=8))
    assert losses(tmp_path / "run")[:5] == whole[:5]  # the fifth loss comes before the first other update
    # The changed values are the run's own from now on: nothing needs to be allowed.
    succeed(run_here(config, *options))


@pytest.mark.slow
def test_other_hyperparameters_of_adam_take_effect(whole: list[float], tmp_path: Path) -> None:
    """The states come from the checkpoint, and its hyperparameters with them."""
    config = begin(tmp_path)
    changed = ("--optimizer.betas", "0.5", "0.6", "--trainer.allow-changes", "optimizer.betas")
    succeed(run_here(config, *changed, "--trainer.max-steps", "6"))
    found = losses(tmp_path / "run")
    assert found[:5] == whole[:5] and abs(found[5] - whole[5]) > 1e-4


def test_norms_do_not_decay_after_a_resume() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    optimizer = MasterWeightOptimizer(parameters, OptimizerConfig(weight_decay=0.5, eps=1e-6))
    groups = optimizer.inner.param_groups
    for group in groups:  # as a checkpoint of other options sets them
        group.update(weight_decay=0.3, eps=1.0, betas=(0.1, 0.2))
    optimizer.use_configured_options()
    assert [(group["weight_decay"], group["eps"], tuple(group["betas"])) for group in groups] == [
        (0.5, 1e-6, (0.9, 0.95)),
        (0.0, 1e-6, (0.9, 0.95)),
    ]


def test_a_warm_up_for_a_longer_run_is_a_tenth_of_this_one(tmp_path: Path) -> None:
    schedule = {"lr": 0.2, "lr_schedule": "constant", "warmup_steps": 500}
    config = write_config(tmp_path, trainer={"export": False, "max_steps": 20}, optimizer=schedule)
    output = succeed(run_here(config))
    assert "the warm-up of this run is 10% of its steps, 2;" in output
    assert output.count("warning: optimizer.lr 0.2 is large for AdamW") == 1
    assert [row["lr"] for row in rows(tmp_path / "run")] == pytest.approx([0.1, *[0.2] * 19])
    refuse(run_here(config, "--trainer.max-steps", "600"), "optimizer.warmup_steps was 2 and is 500: restore it")


def expected_rate(step: int, decay_steps: int) -> float:
    return learning_rate(step, OptimizerConfig(lr=0.01, warmup_steps=2), decay_steps)


def test_raised_max_steps_needs_the_end_of_the_decay(tmp_path: Path) -> None:
    config = write_config(tmp_path, trainer={"export": False, "max_steps": 4})
    succeed(run_here(config))
    longer = ("--trainer.max-steps", "8")
    kept_decay = ("--optimizer.decay-steps", "4")
    stretched_decay = ("--trainer.allow-changes", "optimizer.decay_steps")
    choices = (f"set {' '.join(kept_decay)}", " ".join(stretched_decay))
    refuse(run_here(config, *longer), "ended at step 4 and would end at step 8", *choices)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    succeed(run_here(config, *longer, *kept_decay))
    kept = [row["lr"] for row in rows(tmp_path / "run")]
    assert kept == pytest.approx([expected_rate(step, 4) for step in range(1, 9)])
    # The kept schedule is the run's own, at the next resume too.
    refuse(run_here(config, *longer), "ended at step 4")
    succeed(run_here(config, *longer, *kept_decay))
    output = succeed(run_here(config, *longer, *stretched_decay, "--trainer.output-dir", str(tmp_path / "copy")))
    assert "optimizer.decay_steps: 4 -> 8, from this step on" in output
    stretched = [row["lr"] for row in rows(tmp_path / "copy")]
    assert stretched[4:] == pytest.approx([expected_rate(step, 8) for step in range(5, 9)])
    succeed(run_here(config, *longer, "--trainer.output-dir", str(tmp_path / "copy")))


@pytest.mark.slow
def test_another_global_batch_continues_at_the_next_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs: 4 steps of 4 sequences, 2 of 2, 2 of 4. They read the sequences 0 to 27 once each."""
    read: list[int] = []
    original = PackedSequences.rows

    def recording(self: PackedSequences, positions: range) -> Tokens:
        read.extend(positions)
        return original(self, positions)

    monkeypatch.setattr(PackedSequences, "rows", recording)
    config = begin(tmp_path, data={"eval_sequences": 0})
    allow = ("--trainer.allow-changes", "data.global_batch_size")
    succeed(run_here(config, "--data.global-batch-size", "2", "--trainer.max-steps", "6", *allow))
    output = succeed(run_here(config, *allow))
    assert "data.global_batch_size: 2 -> 4, from this step on" in output
    assert read == list(range(4 * 4 + 2 * 2 + 2 * 4))
    trained = [row["tokens"] // 24 for row in rows(tmp_path / "run")]
    assert trained == [4, 8, 12, 16, 18, 20, 24, 28]


@pytest.mark.slow
def test_another_backend_gets_new_random_streams(whole: list[float], tmp_path: Path) -> None:
    # The state of a GPU's generator is no state of this one.
    config = begin(tmp_path)
    path = tmp_path / "run" / "checkpoints" / "step_00000004" / "index.json"
    content = read_checked_json(path)
    random = content["per_rank"][0]["random"]
    assert random["backend"] == "cpu"
    random["backend"] = "cuda"
    random["device"] = "not a state of this device"
    write_json(path, content)
    report = succeed(run_here(config))
    assert "the backend has changed from cuda to cpu: random streams are seeded with trainer.seed + 4" in report
    assert losses(tmp_path / "run") == whole  # without dropout no step draws a number


@pytest.mark.slow
def test_a_run_continues_that_of_another_directory(whole: list[float], tmp_path: Path) -> None:
    config = begin(tmp_path)
    source = tmp_path / "run"
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    there = ("--trainer.output-dir", str(tmp_path / "next"), "--trainer.resume-from")
    output = succeed(run_here(config, *there, str(source), "--trainer.max-steps", "6"))
    assert "resuming after step 4" in output and "which stays as it is" in output
    # The same command continues from the checkpoint of its own directory.
    output = succeed(run_here(config, *there, str(source)))
    assert "resuming after step 6" in output and "stays as it is" not in output
    assert losses(tmp_path / "next") == whole[4:]
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    # A single checkpoint, which need not be the newest.
    one = (*there[:1], str(tmp_path / "one"), *there[2:], str(source / "checkpoints" / "step_00000002"))
    succeed(run_here(config, *one))
    assert losses(tmp_path / "one") == whole[2:]
    refuse(
        run_here(config, *one[:1], str(tmp_path / "other"), *there[2:], str(tmp_path / "tokenizer")),
        "trainer.resume_from",
        "has no complete checkpoint",
    )


@pytest.mark.slow
def test_warm_start_takes_the_weights_alone(tmp_path: Path) -> None:
    config = begin(tmp_path)
    reached = rows(tmp_path / "run", "evaluation.jsonl")[-1]["held_out_loss"]
    there = ("--trainer.output-dir", str(tmp_path / "next"), "--model.warm-start", str(tmp_path / "run"))
    new = (*there, "--trainer.seed", "7", "--optimizer.lr", "0.005")
    output = succeed(run_here(config, *new, *HALF))
    assert "optimizer, step and data start from the beginning" in output and "resuming" not in output
    first = rows(tmp_path / "next", "evaluation.jsonl")[0]
    assert first["step"] == 0 and rows(tmp_path / "next")[0]["step"] == 1
    assert abs(first["held_out_loss"] - reached) < 0.1 * reached
    # A restart continues the new run, not the warm start.
    output = succeed(run_here(config, *new))
    assert "resuming after step 4" in output and "warm start" not in output
    assert [row["step"] for row in rows(tmp_path / "next")] == list(range(1, 9))


def test_warm_start_is_exact(tmp_path: Path) -> None:
    """Equal data: the held-out loss at step 0 is that of the checkpoint, in another dtype too."""
    config = begin(tmp_path)
    reached = rows(tmp_path / "run", "evaluation.jsonl")[-1]["held_out_loss"]
    there = ("--model.warm-start", str(tmp_path / "run" / "checkpoints"), "--trainer.max-steps", "0")
    for precision, tolerance in {"32-true": 0.0, "bf16-mixed": 0.01}.items():
        options = ("--trainer.output-dir", str(tmp_path / precision), "--trainer.precision", precision)
        succeed(run_here(config, *there, *options))
        loss = rows(tmp_path / precision, "evaluation.jsonl")[0]["held_out_loss"]
        assert loss == pytest.approx(reached, rel=tolerance)  # bf16 keeps 8 bits


@pytest.mark.slow
def test_warm_start_is_exact_from_the_master_weights(tmp_path: Path) -> None:
    """An fp32 run that starts from a bf16 run has weights between bf16 numbers."""
    config = begin(tmp_path, trainer={"precision": "bf16-mixed"})
    there = ("--trainer.output-dir", str(tmp_path / "next"), "--model.warm-start", str(tmp_path / "run"))
    options = ("--trainer.precision", "32-true", "--trainer.max-steps", "0", "--trainer.export", "true")
    succeed(run_here(config, *there, *options))
    weights = load_file(next((tmp_path / "next" / "export").glob("*.safetensors")))
    rounded = [bool(torch.equal(weight.bfloat16().float(), weight)) for weight in weights.values() if weight.dim() > 1]
    assert rounded and not any(rounded)


@pytest.mark.slow
def test_losses_of_other_held_out_tokens_are_not_compared(tmp_path: Path) -> None:
    """eval_sequences may change: the losses before and after are then means of different tokens."""
    config = write_config(tmp_path, trainer={"export": False, "max_steps": 4}, optimizer=SCHEDULE)
    succeed(run_here(config))
    before = summary(tmp_path / "run")
    assert before["held_out_change_percent"] is not None
    output = succeed(run_here(config, "--trainer.max-steps", "8", "--data.eval-sequences", "2"))
    assert "the held-out tokens have changed since step 0" in output
    found = summary(tmp_path / "run")
    assert found["held_out_loss_before"] is None and found["held_out_change_percent"] is None
    # The finished run again, with the first number of sequences: a row of its own.
    succeed(run_here(config, "--trainer.max-steps", "8"))
    found = summary(tmp_path / "run")
    assert found["held_out_loss_before"] == before["held_out_loss_before"]
    last = [row["held_out_loss"] for row in rows(tmp_path / "run", "evaluation.jsonl") if row["step"] == 8]
    assert len(last) == 2 and last[1] == found["held_out_loss_after"] != last[0]
