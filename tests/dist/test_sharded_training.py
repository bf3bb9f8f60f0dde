"""The training program at every ZeRO stage: equal losses, evaluations and exports, and resume from any to any other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.training.device_support import shard_ranks
from nxd_memopt.training.model import build_model, load_hf_config
from nxd_memopt.training.parallelize import parallelize
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message
from tests.training.resume.test_rules import build
from tests.training.runs import rows, run_here, run_on_pool, summary, write_config

TENSOR_AND_SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel_enabled": True}
# D=2 and micro-batches of 2: accumulation over 2. The first norms are about 1: clipping is active.
BATCH = {"micro_batch_size": 2, "global_batch_size": 8}
# A large eps: AdamW's first updates would otherwise amplify the rounding of gradients near 0.
CLIP = {"clip_grad": 0.25, "decay_steps": 6, "eps": 1e-3}


def run(directory: Path, stage: str, *options: str, ranks: int = 4, **sections: dict[str, Any]) -> str:
    directory.mkdir(exist_ok=True)
    base: dict[str, dict[str, Any]] = {
        "parallel": TENSOR_AND_SEQUENCE,
        "data": BATCH,
        "optimizer": CLIP,
        "trainer": {"max_steps": 6, "save_interval": 3, "val_check_interval": 2, "export": "verify"},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    config = write_config(directory, **base)
    return run_on_pool(config, "--data-parallel.sharding", stage, *options, ranks=ranks)


def values(directory: Path, name: str) -> list[float]:
    return [row[name] for row in rows(directory / "run")]


def evaluations(directory: Path) -> list[float]:
    return [row["held_out_loss"] for row in rows(directory / "run", "evaluation.jsonl")]


@pytest.fixture(scope="module")
def zero1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("zero1")
    run(directory, "zero1")
    assert min(values(directory, "grad_norm")) > CLIP["clip_grad"]
    return directory


@pytest.mark.parametrize(
    "stage", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("none", "zero2")), "zero3"]
)
def test_every_stage_has_the_losses_of_zero1(zero1: Path, tmp_path: Path, stage: str) -> None:
    """Sequence parallelism and accumulation change the order of additions: fp32 rounding."""
    output = run(tmp_path, stage)
    assert ("data-parallel sharding" in output) == (stage != "none")
    for name in ("loss", "grad_norm"):
        assert values(tmp_path, name) == pytest.approx(values(zero1, name), rel=1e-6)
    assert evaluations(tmp_path) == pytest.approx(evaluations(zero1), rel=1e-6)
    assert len(evaluations(tmp_path)) == 4
    assert summary(tmp_path / "run")["transformers_difference"] < 1e-5  # fp32 sums in another order
    exported, expected = [load_file(each / "run" / "export" / "model.safetensors") for each in (tmp_path, zero1)]
    torch.testing.assert_close(exported, expected, rtol=0, atol=1e-6)


# T, D, stage, instances of a part of 2 steps each; the first one is zero1's.
PARTS = [
    (2, 2, "zero3", "1"),
    (1, 4, "zero2", "2"),
    (1, 4, "zero3", "2"),
    (2, 1, "zero2", "1"),
    (1, 2, "none", "1"),
    (2, 2, "zero2", "1"),
    (1, 4, "zero1", "1"),
]


@pytest.mark.slow
def test_a_run_resumes_at_every_stage_and_size(tmp_path: Path) -> None:
    """Weights, masters, moments, the loss scale's absence and the position in the data go on at any stage."""
    steps = 2 * len(PARTS) + 2
    trainer = {"max_steps": steps, "export": False, "val_check_interval": 0}
    optimizer = {"decay_steps": steps}
    data = {"eval_sequences": 0}
    sections = {"trainer": trainer, "optimizer": optimizer, "data": data}
    run(tmp_path / "whole", "zero1", **sections)
    options = ("--trainer.max-steps", "2")
    run(tmp_path / "parts", "zero1", *options, **sections)
    before = "zero1"
    for part, (tensor_size, data_size, stage, instances) in enumerate(PARTS):
        layout = {"tensor_model_parallel_size": tensor_size, "sequence_parallel_enabled": tensor_size > 1}
        sharding = {"num_distributed_optimizer_instances": int(instances)}
        options = ("--trainer.max-steps", str(2 * part + 4))
        output = run(
            tmp_path / "parts",
            stage,
            *options,
            ranks=tensor_size * data_size,
            **sections | {"parallel": layout, "data_parallel": sharding},
        )
        assert f"resuming after step {2 * part + 2}" in output
        assert (f"data_parallel.sharding: {before} -> {stage}" in output) == (before != stage), output
        assert ("in 2 instances of 2" in output) == (instances == "2")
        before = stage
    for name in ("loss", "grad_norm"):
        # fp32 in other summation orders, over 16 steps
        assert values(tmp_path / "parts", name) == pytest.approx(values(tmp_path / "whole", name), rel=1e-5)


@pytest.mark.slow
def test_warm_start_of_a_sharded_run(tmp_path: Path) -> None:
    """zero3 starts with the weights of a zero2 run of other sizes, as zero1 does."""
    few = {"trainer": {"max_steps": 2, "export": False}, "optimizer": {"decay_steps": 2}}
    run(tmp_path / "first", "zero2", **few)
    found = {}
    for stage in ("zero1", "zero3"):
        options = ("--model.warm-start", str(tmp_path / "first" / "run"))
        layout = {"parallel": {"tensor_model_parallel_size": 1, "sequence_parallel_enabled": False}}
        output = run(tmp_path / stage, stage, *options, ranks=2, **few | layout)
        assert "warm start: weights of" in output
        found[stage] = values(tmp_path / stage, "loss")
    assert found["zero3"] == found["zero1"]
    assert found["zero3"][0] < values(tmp_path / "first", "loss")[0]


@distributed(world_size=4)
def test_one_instance_per_host():
    """Two hosts of two ranks: the shards of a host's ranks are all of the model's rows."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        config = build(data_parallel={"sharding": "zero2", "num_distributed_optimizer_instances": "hosts"})
        assert shard_ranks(config) == 2
        config = build(
            data_parallel={"sharding": "zero2", "num_distributed_optimizer_instances": "hosts"},
            parallel={"tensor_model_parallel_size": 4},
        )
        assert_says(error_message(lambda: shard_ranks(config)), "ranks per host 2", "tensor_model_parallel_size 4")
        config = build(
            data_parallel={"sharding": "zero2", "num_distributed_optimizer_instances": "hosts"},
            parallel={"tensor_model_parallel_size": 2},
        )
        assert_says(error_message(lambda: shard_ranks(config)), "hosts = 2", "nothing would be sharded")
    for instances, words in ((3, ("instances 3", "data-parallel size 4")), (4, ("instances 4", "nothing"))):
        sections = {"sharding": "zero3", "num_distributed_optimizer_instances": instances}
        assert_says(error_message(lambda each=sections: shard_ranks(build(data_parallel=each))), *words)


@pytest.mark.slow
def test_zero2_on_one_data_parallel_rank_is_zero1(tmp_path: Path) -> None:
    """Two micro-batches of a bf16 model: their gradients are added in fp32."""
    few = {"max_steps": 3, "export": False, "precision": "bf16-mixed"}
    found = []
    for stage in ("zero1", "zero2"):
        directory = tmp_path / stage
        directory.mkdir()
        outcome = run_here(write_config(directory, trainer=few, data_parallel={"sharding": stage}))
        assert outcome.returncode == 0, outcome.stderr
        found.append(values(directory, "loss"))
    assert found[0] == found[1]


@pytest.mark.slow
def test_gradient_sums_in_bf16(tmp_path: Path) -> None:
    """They round sums of two micro-batches on one rank."""
    norms = []
    for in_fp32 in (True, False):
        directory = tmp_path / str(in_fp32)
        directory.mkdir()
        few = {"max_steps": 4, "export": False, "precision": "bf16-mixed"}
        data = {"global_batch_size": 4, "eval_sequences": 0}
        config = write_config(directory, trainer=few, data=data, data_parallel={"grad_reduce_in_fp32": in_fp32})
        outcome = run_here(config)
        assert outcome.returncode == 0, outcome.stderr
        norms.append(values(directory, "grad_norm"))
    assert norms[0] != norms[1]
    assert norms[0] == pytest.approx(norms[1], rel=2**-7)  # a rounding to bf16 is 2^-9


@distributed(world_size=2)
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_every_stage_adds_the_gradients_of_ranks_in_that_dtype(stage):
    """The sum of two bf16 numbers has more bits than one of them, unless it was rounded to bf16."""
    parallel_state.initialize_model_parallel()
    for in_fp32 in (True, False):
        config = build(
            data_parallel={"sharding": stage, "grad_reduce_in_fp32": in_fp32},
            trainer={"precision": "bf16-mixed"},
            optimizer={"clip_grad": 0},
            data={"seq_length": 8, "micro_batch_size": 2, "global_batch_size": 4},
        )
        model = build_model(config, load_hf_config(config.model))
        optimizer, _ = parallelize(model, config)
        torch.manual_seed(dist.get_rank())
        ids = torch.randint(0, 257, (2, 8))
        model(ids, labels=ids).loss.backward()
        optimizer.reduce_gradients()
        gradients = [each.shard.grad for each in optimizer.inner._sharded]
        is_rounded = all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)
        assert is_rounded != in_fp32


def test_zero3_on_one_data_parallel_rank_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, data_parallel={"sharding": "zero3"})
    outcome = run_here(config)
    assert outcome.returncode == 2
    assert "data_parallel.sharding zero3" in outcome.stderr and "there is 1" in outcome.stderr
    assert not (tmp_path / "run" / "tokens").exists()
