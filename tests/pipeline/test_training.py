"""Tests that the training program gives the same losses, norms, weights and checkpoints with stages as without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import LLAMA, MIXTRAL, require_converted, rows, run_here, run_on_pool, summary, write_config

LAYERS = {"num_hidden_layers": 5}
TIED = {"tie_word_embeddings": True}
NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"} | {"model_type": "gpt_neox"}
BALANCED = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_per_layer_logging": True,
}
# fp32; norms and gradients of tied weights are added in another order.
ROUNDING = 1e-6
RUNS = ("whole", "stages")


def sizes(stages: int, chunks: int | None = None, tensor: int = 1) -> list[str]:
    options = ["--parallel.pipeline-model-parallel-size", str(stages)]
    if chunks is not None:
        options += ["--parallel.virtual-pipeline-model-parallel-size", str(chunks)]
    if tensor > 1:
        options += ["--parallel.tensor-model-parallel-size", str(tensor), "--parallel.sequence-parallel-enabled"]
    return options


def run(config: Path, directory: Path, *options: str, ranks: int) -> str:
    arguments = ["--trainer.output-dir", str(directory), *options]
    if ranks == 1:
        outcome = run_here(config, *arguments)
        assert outcome.returncode == 0, outcome.stderr
        return outcome.stdout
    return run_on_pool(config, *arguments, ranks=ranks)


def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row of metrics.jsonl that depend on the model alone."""
    names = ("step", "loss", "grad_norm", "lr", "load_balancing_loss", "z_loss", "max_load")
    return {name: row[name] for name in names if name in row}


def require_same_runs(one: Path, other: Path, tolerance: float = ROUNDING) -> None:
    expected, found = rows(one), rows(other)
    assert len(found) == len(expected)
    for left, right in zip(expected, found, strict=True):
        assert numbers(right) == pytest.approx(numbers(left), rel=tolerance)
        assert right.get("tokens_per_expert") == left.get("tokens_per_expert")
    before, after = summary(one), summary(other)
    assert after["held_out_loss_after"] == pytest.approx(before["held_out_loss_after"], rel=tolerance)
    weights, others = (load_file(run / "export" / "model.safetensors") for run in (one, other))
    assert others.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=0, atol=tolerance)


def check(
    directory: Path, stages: list[str], ranks: int, *options: str, alone: list[str] | None = None, **sections: Any
) -> None:
    """Three steps with ``stages`` on ``ranks``, beside the same without, with the options ``alone`` in their place."""
    sections.setdefault("model", {"config_overrides": LLAMA | LAYERS})
    sections.setdefault("data", {"micro_batch_size": 1})
    config = write_config(directory, trainer={"max_steps": 3, "save_interval": 0}, **sections)
    size = int(stages[stages.index("--parallel.pipeline-model-parallel-size") + 1])
    run(config, directory / "whole", *options, *(alone or []), ranks=ranks // size)
    run(config, directory / "stages", *options, *stages, ranks=ranks)
    require_same_runs(directory / "whole", directory / "stages")
    require_converted(directory / "stages")


def test_tied_model_resumes_with_other_stages(tmp_path: Path) -> None:
    """Two stages, then one rank, then two stages of two chunks: as if nothing had happened."""
    config = write_config(
        tmp_path,
        model={"config_overrides": LLAMA | LAYERS | TIED},
        data={"micro_batch_size": 1},
        optimizer={"decay_steps": 6, "clip_grad": 0.1, "weight_decay": 0.0},
        trainer={"max_steps": 6, "save_interval": 2},
    )
    run(config, tmp_path / "whole", ranks=1)
    output = run(config, tmp_path / "run", *sizes(2), "--trainer.max-steps", "2", ranks=2)
    assert (
        "pipeline: 2 ranks, layers 3, 2; with 4 micro-batches and equal stages each rank waits 20.0% of a step"
        in output
    )
    assert "ranks: 2, tensor-parallel 1 x pipeline-parallel 2 x data-parallel 1; backend cpu" in output
    assert summary(tmp_path / "run")["pipeline_model_parallel_size"] == 2
    assert "model: llama, 27,072 parameters" in output
    # Each rank has layers, and the last one the head.
    assert "gated activation with down projection: off (the kernels are for NVIDIA GPUs" in output
    assert "the device is cpu)\n" in output
    assert "residual + norm: on in 6 of 6; stages of rank 0" in output
    assert "head with loss: on in 1 of 1; stages of rank 1" in output
    output = run(config, tmp_path / "run", "--trainer.max-steps", "4", ranks=1)
    assert "parallel.pipeline_model_parallel_size: 2 -> 1" in output
    run(config, tmp_path / "run", *sizes(2, 2), ranks=2)
    require_same_runs(tmp_path / "whole", tmp_path / "run")
    require_converted(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "tensor"), [(None, 1), (2, 1), (None, 2), (2, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_llama(tmp_path: Path, chunks: int | None, tensor: int, tied: bool) -> None:
    model = {"config_overrides": LLAMA | LAYERS | {"tie_word_embeddings": tied}}
    check(tmp_path, sizes(2, chunks, tensor), 2 * tensor, alone=sizes(1, None, tensor), model=model)


@pytest.mark.slow
def test_replicated_kv_heads(tmp_path: Path) -> None:
    """One KV head on two tensor-parallel ranks."""
    model = {"config_overrides": LLAMA | LAYERS | {"num_key_value_heads": 1}}
    check(tmp_path, sizes(2, None, 2), 4, alone=sizes(1, None, 2), model=model)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 8])
def test_four_stages(tmp_path: Path, count: int) -> None:
    data = {"micro_batch_size": 1, "global_batch_size": count}
    check(tmp_path, sizes(4), 4, data=data, model={"config_overrides": LLAMA | LAYERS | TIED})


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--data-parallel.sharding", "zero1"), ("--optimizer.overlap-grad-reduce",)])
def test_data_parallel_ranks(tmp_path: Path, options: tuple[str, ...]) -> None:
    check(tmp_path, sizes(2), 4, *options, model={"config_overrides": LLAMA | LAYERS | TIED})


@pytest.mark.slow
@pytest.mark.parametrize("model", [NEOX, LLAMA | {"model_type": "qwen3", "head_dim": 4}])
def test_other_models(tmp_path: Path, model: dict[str, Any]) -> None:
    check(tmp_path, sizes(2, 2), 2, model={"config_overrides": model | LAYERS})


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "experts"), [(None, 1), (2, 1), (None, 2)])
def test_experts(tmp_path: Path, chunks: int | None, experts: int) -> None:
    """The balancing losses of all stages are trained, and the records have all layers."""
    model = {"config_overrides": MIXTRAL | LAYERS}
    options = ["--parallel.expert-model-parallel-size", str(experts)]
    check(tmp_path, sizes(2, chunks), 2 * experts, *options, model=model, moe=BALANCED)


@pytest.mark.slow
def test_adapters(tmp_path: Path) -> None:
    check(tmp_path, sizes(2, 2, 2), 4, alone=sizes(1, None, 2), lora={"lora_rank": 4})
    expected, found = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in RUNS)
    assert found.keys() == expected.keys()
    for name, factor in expected.items():
        torch.testing.assert_close(found[name], factor, rtol=0, atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "norm"]},
    ],
)
def test_recompute_and_documents(tmp_path: Path, memory: dict[str, Any]) -> None:
    """Documents of unequal lengths: the micro-batches have unequal numbers of trained labels."""
    data = {"micro_batch_size": 1, "isolate_documents": True}
    check(tmp_path, sizes(2), 2, memory=memory, data=data)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 0), ("bf16-true", 0), ("16-mixed", 2**-11)])
def test_precision(tmp_path: Path, precision: str, tolerance: float) -> None:
    """The norm is added in another order, which may change clipped gradients, and so a rounded weight, by one bit."""
    config = write_config(
        tmp_path,
        model={"config_overrides": LLAMA | LAYERS},
        data={"micro_batch_size": 1},
        optimizer={"initial_loss_scale": 1024.0},
        trainer={"max_steps": 4, "precision": precision, "export": False},
    )
    run(config, tmp_path / "whole", ranks=1)
    run(config, tmp_path / "stages", *sizes(2), ranks=2)
    expected, found = rows(tmp_path / "whole"), rows(tmp_path / "stages")
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=tolerance, abs=0)
    assert all(row["grad_norm"] for row in found)


@pytest.mark.slow
def test_pretrained_weights_and_verified_export(tmp_path: Path) -> None:
    """The export of a run with stages is loaded by transformers, and by another run with stages."""
    config = write_config(
        tmp_path, model={"config_overrides": LLAMA | LAYERS}, trainer={"max_steps": 2, "export": "verify"}
    )
    run(config, tmp_path / "first", *sizes(2, None, 2), ranks=4)
    model = {"pretrained": str(tmp_path / "first" / "export"), "config_overrides": {}}
    (tmp_path / "next").mkdir()
    config = write_config(tmp_path / "next", model=model, trainer={"max_steps": 2})
    run(config, tmp_path / "whole", ranks=1)
    run(config, tmp_path / "stages", *sizes(2), ranks=2)
    require_same_runs(tmp_path / "whole", tmp_path / "stages")
    assert rows(tmp_path / "stages")[0]["loss"] < rows(tmp_path / "first")[0]["loss"]


@pytest.mark.slow
def test_warm_start_from_adapters(tmp_path: Path) -> None:
    """A checkpoint with adapters starts the same run with stages as without."""
    lora = {"lora_rank": 4}
    config = write_config(
        tmp_path, model={"config_overrides": LLAMA | LAYERS}, lora=lora, trainer={"max_steps": 2, "save_interval": 2}
    )
    run(config, tmp_path / "first", *sizes(2), ranks=2)
    options = ["--model.warm-start", str(tmp_path / "first")]
    for name, stages, ranks in (("whole", 1, 1), ("stages", 2, 2)):
        output = run(config, tmp_path / name, *options, *sizes(stages), ranks=ranks)
        assert "weights and adapters of" in output
    require_same_runs(tmp_path / "whole", tmp_path / "stages")
