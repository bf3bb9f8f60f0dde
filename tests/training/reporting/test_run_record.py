"""Tests what a run records of itself: options that start it again, versions, boards, and its MFU."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaConfig, MixtralConfig

from nxd_memopt._optional import MissingDependencyError
from nxd_memopt.backends import backend
from nxd_memopt.training.config.parsing import parse_config
from nxd_memopt.training.config.train_config import RECIPES, TrainConfig
from nxd_memopt.training.reporting import mfu as utilization
from nxd_memopt.training.reporting.boards import WANDB_ID, Boards, require_boards
from nxd_memopt.training.reporting.mfu import utilization_per_token
from nxd_memopt.training.reporting.run_record import environment, write_run_record

H200 = 989e12  # FLOP/s in bf16, NVIDIA's data sheet


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_the_recorded_options_start_the_same_run(tmp_path: Path, recipe: str) -> None:
    config = parse_config(
        ["--recipe", recipe, "--model.pretrained", "m", "--model.tokenizer", "t", "--trainer.output-dir", str(tmp_path)]
    )
    write_run_record(config)
    assert parse_config(["--config", str(tmp_path / "config.yaml")]) == config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "environment.json"]


def test_versions_and_variables_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("API_KEY", "secret")
    write_run_record(config_of(tmp_path))
    text = (tmp_path / "environment.json").read_text()
    found = json.loads(text)
    assert found == environment()
    assert found["variables"]["NCCL_ALGO"] == "Ring"
    assert "secret" not in text
    assert {"torch", "transformers", "nxd_memopt"} <= set(found["packages"])


def config_of(directory: Path, *options: str) -> TrainConfig:
    return parse_config(["--model.pretrained", "m", "--trainer.output-dir", str(directory), *options])


def test_tensorboard_has_the_options_and_the_values(tmp_path: Path) -> None:
    board = Boards(tmp_path, first_step=0, wandb_project=None)
    board.options("trainer:\n  seed: 7\n", {"trainer": {"seed": 7, "allow_changes": []}})
    board.scalars({"train/loss": 1.5, "train/loss_scale": None, "train/z_loss_per_layer": [0.5, 0.25]}, 3)
    board.close(exit_code=0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/loss", "moe/z_loss_layer_0", "moe/z_loss_layer_1"]
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(3, 1.5)]
    (text,) = events.Tensors("options/text_summary")
    assert text.tensor_proto.string_val[0] == b"    trainer:\n      seed: 7\n    "


class FakeRun:
    def __init__(self, **options: Any) -> None:
        self.started = options
        self.config: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, Any]] = []
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeConfig(dict[str, Any]):
    def update(self, values: dict[str, Any], *, allow_val_change: bool) -> None:  # type: ignore[override]
        assert allow_val_change  # a resumed run may change options
        super().update(values)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """Of Weights & Biases, in a package that only records what it is called with."""
    found: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        found.append(FakeRun(**options))
        found[-1].config = FakeConfig()
        return found[-1]

    package = types.ModuleType("wandb")
    vars(package).update(init=init)
    monkeypatch.setitem(sys.modules, "wandb", package)
    return found


def test_a_resumed_run_continues_the_same_run_of_wandb(tmp_path: Path, runs: list[FakeRun]) -> None:
    for step in (4, 3):  # the second process repeats a step
        board = Boards(tmp_path, first_step=step - 1, wandb_project="llm")
        board.options("", {"trainer": {"seed": step}})
        board.scalars({"train/loss": 1.5, "moe": [1.0]}, step)
        board.close(exit_code=step - 3)
    identity = (tmp_path / WANDB_ID).read_text()
    assert len(identity) == 16
    for run, step in zip(runs, (4, 3), strict=True):
        options = {"project": "llm", "name": tmp_path.name, "id": identity, "resume": "allow", "dir": str(tmp_path)}
        assert run.started == options
        assert run.config == {"trainer": {"seed": step}}
        assert run.logged == [{"train/loss": 1.5, "step": step}]
        assert run.metrics == [("step", None), ("*", "step")]
        assert run.exit_code == step - 3


def test_a_missing_wandb_is_named() -> None:
    require_boards(None)
    with pytest.raises(MissingDependencyError, match=r"trainer.wandb_project needs wandb.*nxd_memopt\[wandb\]"):
        require_boards("llm")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "backend", types.SimpleNamespace(
        device=types.SimpleNamespace(type="cuda"), hardware_name=lambda: "NVIDIA H200"
    ))  # fmt: skip


@pytest.mark.parametrize("isolates", [False, True])
def test_utilization_counts_the_model_without_recompute(
    h200: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolates: bool
) -> None:
    config = config_of(tmp_path, "--data.seq-length", "8192", "--trainer.precision", "bf16-mixed")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, isolate_documents=isolates))
    shape = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    # Each layer: queries, output 4096^2; keys, values 4096 * 1024; three matrices of the MLP; the head.
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    attention = 0 if isolates else 3 * 32 * 4 * (8192 / 2) * 4096
    found = utilization_per_token(config, shape)
    assert found == pytest.approx((6 * weights + attention) / H200, rel=1e-3)
    monkeypatch.setattr(utilization, "world_size", lambda: 4)
    assert utilization_per_token(config, shape) == pytest.approx(found / 4)  # tokens/s are of all ranks


def test_utilization_of_experts_counts_those_of_a_token(h200: None, tmp_path: Path) -> None:
    config = config_of(tmp_path, "--trainer.precision", "bf16-mixed")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, isolate_documents=True))
    shape = MixtralConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=32000,
    )  # fmt: skip
    weights = 4 * (2 * 4096**2 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336) + 32000 * 4096
    found = utilization_per_token(config, shape)
    assert found == pytest.approx(6 * weights / H200, rel=1e-3)


def test_utilization_is_unknown_without_a_published_rate(h200: None, tmp_path: Path, monkeypatch: Any) -> None:
    shape = LlamaConfig()
    lora = config_of(tmp_path, "--lora.lora-rank", "8")
    assert utilization_per_token(lora, shape) is None
    monkeypatch.setattr(utilization, "backend", backend)
    assert utilization_per_token(config_of(tmp_path), shape) is None
