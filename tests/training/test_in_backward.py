"""Tests ``optimizer.in_backward``: the losses of updates after backward, over techniques, ranks and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.training.config.parsing import config_from_mapping, parse_config
from nxd_memopt.training.memory_plan import plan_memory
from nxd_memopt.training.model import load_hf_config
from nxd_memopt.training.parallelize import parallelize
from nxd_memopt.training.reporting.start_report import bytes_per_parameter
from tests.reference import assert_says, error_message
from tests.training.runs import (
    LLAMA,
    MIXTRAL,
    TENSOR_AND_SEQUENCE,
    losses,
    rows,
    run_here,
    run_on_pool,
    write_config,
)

PLAIN = {"clip_grad": 0, "decay_steps": 8}
TRAINER = {"max_steps": 4, "save_interval": "never", "export": False}


def config_of(directory: Path, *, in_backward: bool, **sections: dict[str, Any]) -> Path:
    directory.mkdir()
    sections["data"] = {"micro_batch_size": 4} | sections.get("data", {})
    sections["optimizer"] = PLAIN | {"in_backward": in_backward} | sections.get("optimizer", {})
    sections["trainer"] = TRAINER | sections.get("trainer", {})
    return write_config(directory, **sections)


def both(directory: Path, *, ranks: int = 1, **sections: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """Loss and gradient norm of each step, without and with updates in backward."""
    found = []
    for in_backward in (False, True):
        config = config_of(directory / str(in_backward), in_backward=in_backward, **sections)
        if ranks == 1:
            outcome = run_here(config)
            assert outcome.returncode == 0, outcome.stderr[-3000:]
            printed = outcome.stdout
        else:
            printed = run_on_pool(config, ranks=ranks)
        assert ("updated in backward" in printed) is in_backward
        found.append([(row["loss"], row["grad_norm"]) for row in rows(directory / str(in_backward) / "run")])
    return found


def assert_equal(after: list[tuple[float, float]], inside: list[tuple[float, float]]) -> None:
    assert len(after) == TRAINER["max_steps"]
    assert [loss for loss, _ in inside] == [loss for loss, _ in after]
    norms = [norm for _, norm in after]
    assert [norm for _, norm in inside] == pytest.approx(norms, rel=1e-6)  # sums in another order
    assert len(set(norms)) == len(norms) and min(norms) > 0


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            {"model": {"config_overrides": LLAMA | {"tie_word_embeddings": True}}}, id="tied", marks=pytest.mark.slow
        ),
        pytest.param({"trainer": {"precision": "bf16-true"}}, id="bf16"),
        pytest.param(
            {"memory": {"recompute_granularity": "full", "mlp_tile_tokens": 12}}, id="tiles", marks=pytest.mark.slow
        ),
        pytest.param(
            {"memory": {"recompute_granularity": "full", "attention_head_groups": 2}},
            id="head_groups",
            marks=pytest.mark.slow,
        ),
        pytest.param({"lora": {"lora_rank": 2}}, id="lora", marks=pytest.mark.slow),
        pytest.param({"model": {"config_overrides": MIXTRAL}}, id="experts", marks=pytest.mark.slow),
    ],
)
def test_the_losses_of_updates_after_backward(sections: dict[str, Any], tmp_path: Path) -> None:
    assert_equal(*both(tmp_path, **sections))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, {}), (4, TENSOR_AND_SEQUENCE)],
    ids=["data2", "tensor2xdata2"],
)
def test_ranks(ranks: int, parallel: dict[str, Any], tmp_path: Path) -> None:
    replicas = ranks // (2 if parallel else 1)
    after, inside = both(tmp_path, ranks=ranks, parallel=parallel, data={"micro_batch_size": 4 // replicas})
    assert_equal(after, inside)


def test_a_run_resumes_with_either(tmp_path: Path) -> None:
    """Checkpoints are those of an update after backward: each half may run either way."""
    trainer = {"max_steps": 8, "save_interval": 4}
    after_backward = config_of(tmp_path / "after_backward", in_backward=False, trainer=trainer)
    assert run_here(after_backward).returncode == 0
    for first in (False, True):
        directory = tmp_path / str(first)
        config = config_of(directory, in_backward=first, trainer=trainer)
        assert run_here(config, "--trainer.max-steps", "4").returncode == 0
        option = "--optimizer.no-in-backward" if first else "--optimizer.in-backward"
        outcome = run_here(config, option)
        assert outcome.returncode == 0, outcome.stderr
        assert f"optimizer.in_backward: {first} -> {not first}" in outcome.stdout
        assert losses(directory / "run") == losses(tmp_path / "after_backward" / "run")
        name = "run/checkpoints/step_00000008"
        expected = sorted((tmp_path / "after_backward" / name).glob("*.safetensors"))
        assert expected
        for file in expected:
            want, found = load_file(file), load_file(directory / name / file.name)
            assert want.keys() == found.keys() and all(torch.equal(found[key], want[key]) for key in want)


def test_gradients_are_freed_and_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    deep = LLAMA | {"intermediate_size": 4096, "num_hidden_layers": 8}
    memory = {"recompute_granularity": "full"}
    sections = {"trainer": {"precision": "bf16-true"}, "memory": memory, "model": {"config_overrides": deep}}
    for in_backward in (False, True):
        path = config_of(tmp_path / str(in_backward), in_backward=in_backward, **sections)
        config = parse_config(["--config", str(path)])
        plans.append((bytes_per_parameter(config), plan_memory(config, load_hf_config(config.model))[1].planned_bytes))
    assert (plans[0][0], plans[1][0]) == (8, 6)
    # At the end of backward the gradients of all layers but one, of 2 x 3 x 24 x 4096 bytes each and more.
    assert plans[0][1] is not None and plans[1][1] is not None
    assert plans[0][1] - plans[1][1] > 7 * 6 * 24 * 4096
    assert "not planned" not in capsys.readouterr().out
    hf_config = load_hf_config(config.model)
    assert isinstance(hf_config, LlamaConfig)
    model = LlamaForCausalLM(hf_config)
    optimizer, _ = parallelize(model, config)
    ids = torch.arange(48).view(2, 24)
    before = model.embedding_weight().detach().clone()
    optimizer.begin_step(0.1)
    model(ids, labels=ids).loss.backward()
    assert all(param.grad is None for param in model.parameters())
    assert not torch.equal(model.embedding_weight(), before)
    assert optimizer.reduce_gradients() > 0
    optimizer.step(0.1)
    with pytest.raises(RuntimeError, match="call backward"):
        optimizer.reduce_gradients()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": {"clip_grad": 1.0}}, ("optimizer.clip_grad is 1.0", "set clip_grad to 0")),
        (
            {"optimizer": {"overlap_grad_reduce": True}},
            ("optimizer.overlap_grad_reduce is True", "leave one of them out"),
        ),
    ],
)
def test_what_it_excludes_is_named(changes: dict[str, dict[str, Any]], says: tuple[str, ...]) -> None:
    values: dict[str, Any] = {
        "model": {"tokenizer": "t", "config_overrides": LLAMA},
        "optimizer": {"in_backward": True, "clip_grad": 0},
    }
    for section, options in changes.items():
        values[section] = values.get(section, {}) | options
    assert_says(error_message(lambda: config_from_mapping(values)), "in_backward", *says)


def test_several_micro_batches_are_an_error(tmp_path: Path) -> None:
    outcome = run_here(config_of(tmp_path / "run", in_backward=True, data={"micro_batch_size": 2}))
    assert outcome.returncode == 2 and len(outcome.stderr.splitlines()) == 1
    assert_says(outcome.stderr, "data.global_batch_size 4 is 2 micro-batches of 2", "set global_batch_size to 2")
