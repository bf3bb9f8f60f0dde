"""Runs with routers that transformers does not have: sigmoid scores, a bias that balances, Sinkhorn's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.test_moe_training import EXPERTS2
from tests.dist.test_training import run
from tests.training.runs import LLAMA, MIXTRAL, exact, rows, summary, write_config

ROUTERS: dict[str, dict[str, Any]] = {
    "sigmoid": {
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.05,
    },
    "bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
        "moe_router_bias_update_rate": 0.02,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
}


def write_router(directory: Path, name: str, **sections: Any) -> Path:
    """Weights far from 0: the experts, and who chooses them, matter."""
    base: dict[str, Any] = {
        "model": {"config_overrides": MIXTRAL | {"initializer_range": 0.3}},
        "moe": ROUTERS[name] | {"moe_per_layer_logging": True},
        "trainer": {"export": False},
    }
    return write_config(directory, **{key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


def saved_biases(directory: Path) -> list[torch.Tensor]:
    newest = max((directory / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    tensors: dict[str, torch.Tensor] = {}
    for file in newest.glob("*.safetensors"):
        tensors |= load_file(file)
    return [tensor for name, tensor in sorted(tensors.items()) if "expert_bias" in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "bias", "sinkhorn"])
def test_a_router_learns_and_resumes_bit_by_bit(tmp_path: Path, name: str) -> None:
    (tmp_path / "once").mkdir()
    (tmp_path / "twice").mkdir()
    run(write_router(tmp_path / "once", name), ranks=1)
    first = {"optimizer": {"decay_steps": 8}}
    run(write_router(tmp_path / "twice", name, **first), "--trainer.max-steps", "4", ranks=1)
    output = run(write_router(tmp_path / "twice", name, **first), ranks=1)
    assert "resuming after step 4" in output
    assert exact(tmp_path / "once" / "run") == exact(tmp_path / "twice" / "run")
    result = summary(tmp_path / "once" / "run")
    assert result["held_out_loss_after"] < 0.95 * result["held_out_loss_before"]


def test_the_bias_follows_the_load_of_all_ranks_and_micro_batches(tmp_path: Path) -> None:
    """Two data-parallel ranks with experts of their own have one process's biases and losses."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    run(write_router(tmp_path / "one", "bias"), ranks=1)
    run(write_router(tmp_path / "two", "bias", parallel=EXPERTS2, data={"micro_batch_size": 1}), ranks=2)
    steps, others = rows(tmp_path / "one" / "run"), rows(tmp_path / "two" / "run")
    # fp32, other summation orders; near-equal scores may choose another expert in later steps.
    assert [row["loss"] for row in others] == pytest.approx([row["loss"] for row in steps], rel=5e-5)
    biases = [torch.zeros(4), torch.zeros(4)]
    for row in steps:
        for layer, counts in enumerate(row["tokens_per_expert"]):
            load = torch.tensor(counts, dtype=torch.float32)
            biases[layer] += 0.02 * (load.mean() - load).sign()
    for found in (saved_biases(tmp_path / "one" / "run"), saved_biases(tmp_path / "two" / "run")):
        assert len(found) == 2
        assert all(torch.allclose(mine, want, atol=1e-6) for mine, want in zip(found, biases, strict=True))
    assert max(bias.abs().max() for bias in biases) > 0.05


@pytest.mark.slow
def test_an_upcycled_gpt_neox_starts_from_the_dense_one_and_trains_equally_on_two_ranks(tmp_path: Path) -> None:
    """Weight decay reaches no bias of an expert; two ranks with experts of their own have one process's losses."""
    neox = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"} | {"model_type": "gpt_neox"}
    for name in ("dense", "one", "zero1", "zero3"):
        (tmp_path / name).mkdir()
    run(write_config(tmp_path / "dense", model={"config_overrides": neox}, trainer={"max_steps": 2}), ranks=1)
    pretrained = {"pretrained": str(tmp_path / "dense" / "run" / "export"), "tokenizer": None, "config_overrides": {}}
    same: dict[str, Any] = {
        "model": pretrained,
        "moe": {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01},
        "trainer": {"export": False},
        "optimizer": {"weight_decay": 0.1},
    }
    run(write_config(tmp_path / "one", **same), ranks=1)
    result, dense = summary(tmp_path / "one" / "run"), summary(tmp_path / "dense" / "run")
    assert result["held_out_loss_before"] == pytest.approx(dense["held_out_loss_after"], rel=1e-6)
    assert result["held_out_loss_after"] < 0.95 * result["held_out_loss_before"]
    steps = [row["loss"] for row in rows(tmp_path / "one" / "run")]
    for stage in ("zero1", "zero3"):
        sharding = {"data_parallel": {"sharding": stage}, "parallel": EXPERTS2, "data": {"micro_batch_size": 1}}
        run(write_config(tmp_path / stage, **same, **sharding), ranks=2)
        # fp32, other summation orders; the aux loss is that of each micro-batch, which differ.
        assert [row["loss"] for row in rows(tmp_path / stage / "run")] == pytest.approx(steps, rel=1e-3)
