"""Runs of the training program with experts: equal losses for every layout, resumption, exports, upcycling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, MixtralForCausalLM

from nxd_memopt.checkpoint import load_config
from tests.dist.test_training import run, succeed
from tests.training.runs import (
    LLAMA,
    MIXTRAL,
    TENSOR_AND_SEQUENCE,
    exact,
    losses,
    rows,
    run_here,
    summary,
    write_config,
)

# Equal micro-batches: the losses of sequences do not depend on the split.
BALANCED = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
    "moe_per_layer_logging": True,
}
EXPERTS2 = {"expert_model_parallel_size": 2}


RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
DECAY = "optimizer.decay_steps"


def write_moe(directory: Path, **sections: Any) -> Path:
    base: dict[str, Any] = {"model": {"config_overrides": MIXTRAL}, "moe": BALANCED}
    return write_config(directory, **{name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of an uninterrupted run on one process."""
    directory = tmp_path_factory.mktemp("moe")
    output = succeed(run_here(write_moe(directory, trainer={"export": "verify"})))
    assert "experts: 4 in 2 of 2 layers, 2 for each token; all of them on every rank" in output
    assert "seq_aux_loss, coefficient 0.05; z-loss, coefficient 0.01" in output
    return directory / "run"


def test_one_process_learns_records_and_exports(reference: Path) -> None:
    steps, result = rows(reference), summary(reference)
    assert result["held_out_loss_after"] < 0.95 * result["held_out_loss_before"]
    # The loss is the cross entropy: at the start it is that of the held-out text, without 0.14 of the routers.
    assert steps[0]["loss"] == pytest.approx(result["held_out_loss_before"], abs=0.05)
    assert steps[0]["load_balancing_loss"] + steps[0]["z_loss"] > 0.1
    assert result["transformers_difference"] < 1e-5  # fp32 sums in another order
    tokens = 4 * 24 * 2  # sequences of a step, their length, experts of a token
    for row in steps:
        assert [sum(layer) for layer in row["tokens_per_expert"]] == [tokens] * 2
        assert row["load_balancing_loss"] == pytest.approx(sum(row["load_balancing_loss_per_layer"]))
        assert row["z_loss"] == pytest.approx(sum(row["z_loss_per_layer"]))
        assert row["max_load"] == pytest.approx(max(max(layer) * 4 / tokens for layer in row["tokens_per_expert"]))
    board = EventAccumulator(str(reference / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    written = board.Scalars("moe/load_balancing_loss_layer_1")
    assert [each.value for each in written] == pytest.approx([row["load_balancing_loss_per_layer"][1] for row in steps])
    assert [each.value for each in board.Scalars("train/z_loss")] == pytest.approx([row["z_loss"] for row in steps])
    buckets = [each.histogram_value.bucket for each in board.Histograms("moe/tokens_per_expert_layer_0")]
    assert buckets == [row["tokens_per_expert"][0] for row in steps]


@pytest.mark.parametrize(
    ("precision", "bound"),  # 0.02 of 1.4 that the loss falls; bf16 has 8 bits, fp16 11
    [
        pytest.param("bf16-true", 0.02, marks=pytest.mark.slow),
        ("16-mixed", 0.005),
    ],
)
def test_precisions_learn_what_fp32_learns(reference: Path, tmp_path: Path, precision: str, bound: float) -> None:
    scaling = {"initial_loss_scale": 1024.0} if precision == "16-mixed" else {}
    succeed(run_here(write_moe(tmp_path, trainer={"precision": precision}, optimizer=scaling)))
    found = rows(tmp_path / "run")
    for row, expected in zip(found, rows(reference), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=bound)
        # The scale of the loss is not in the reported losses, nor in the routers' gradients.
        assert row["load_balancing_loss"] == pytest.approx(expected["load_balancing_loss"], rel=0.02)
        assert row["z_loss"] == pytest.approx(expected["z_loss"], rel=0.05)
    assert all(not row.get("skipped") for row in found)


@pytest.mark.parametrize(
    ("ranks", "parallel", "dispatcher", "stage"),
    [
        (2, EXPERTS2, "alltoall", "zero1"),
        pytest.param(2, TENSOR_AND_SEQUENCE, "allgather", "none", marks=pytest.mark.slow),
        pytest.param(4, EXPERTS2, "alltoall", "zero2", marks=pytest.mark.slow),
        pytest.param(4, EXPERTS2, "allgather", "zero3", marks=pytest.mark.slow),
        pytest.param(4, TENSOR_AND_SEQUENCE | EXPERTS2, "alltoall", "zero3", marks=pytest.mark.slow),
    ],
)
def test_every_layout_has_the_losses_of_one_process(
    reference: Path, tmp_path: Path, ranks: int, parallel: dict[str, Any], dispatcher: str, stage: str
) -> None:
    config = write_moe(
        tmp_path,
        parallel=parallel,
        data={"micro_batch_size": 1},
        data_parallel={"sharding": stage},
        moe={"moe_token_dispatcher_type": dispatcher},
        memory=RECOMPUTED if dispatcher == "alltoall" else {},
        trainer={"export": "verify", "log_every_n_steps": 3},
    )
    output = run(config, ranks=ranks)
    if "expert_model_parallel_size" in parallel:
        size = parallel["expert_model_parallel_size"]
        assert f"{4 // size} on each of {size} expert-parallel ranks, dispatched by {dispatcher}" in output
    # fp32, other summation orders; near-equal scores may choose another expert in later steps.
    for name in ("loss", "grad_norm", "load_balancing_loss", "z_loss"):
        found, expected = ([row[name] for row in rows(each)] for each in (tmp_path / "run", reference))
        assert found == pytest.approx(expected, rel=5e-5), name
    assert rows(tmp_path / "run")[0]["tokens_per_expert"] == rows(reference)[0]["tokens_per_expert"]
    result, expected = summary(tmp_path / "run"), summary(reference)
    assert result["held_out_loss_after"] == pytest.approx(expected["held_out_loss_after"], rel=5e-5)
    assert result["transformers_difference"] < 1e-5


def test_an_interrupted_run_continues_bit_by_bit(tmp_path: Path) -> None:
    """With jitter, whose random stream is part of the checkpoint, and the fractions of full steps."""
    moe = {"moe_input_jitter_eps": 0.1, "moe_router_load_balancing_type": "global_aux_loss"}
    sections: dict[str, Any] = {"moe": moe, "data": {"micro_batch_size": 1}}
    (tmp_path / "uninterrupted").mkdir()
    succeed(run_here(write_moe(tmp_path / "uninterrupted", **sections, trainer={"max_steps": 4, "export": False})))
    config = write_moe(tmp_path, **sections, optimizer={"decay_steps": 4}, trainer={"max_steps": 2, "export": False})
    succeed(run_here(config))
    succeed(run_here(config, "--trainer.max-steps", "4"))
    assert exact(tmp_path / "run") == exact(tmp_path / "uninterrupted" / "run")
    found, expected = (rows(each) for each in (tmp_path / "run", tmp_path / "uninterrupted" / "run"))
    for name in ("load_balancing_loss", "z_loss", "tokens_per_expert"):
        assert [row[name] for row in found] == [row[name] for row in expected]
    refused = run_here(config, "--trainer.max-steps", "4", "--moe.moe-z-loss-coeff", "0.5")
    assert refused.returncode == 2
    assert "moe.moe_z_loss_coeff was 0.01 and is 0.5" in refused.stderr


@pytest.mark.slow
def test_a_run_resumes_with_other_sizes(reference: Path, tmp_path: Path) -> None:
    """Four steps with T=2 and EP=2, saved in the background; then four expert-parallel ranks, then one process."""
    schedule = {"decay_steps": 8}
    first = write_moe(
        tmp_path,
        parallel=TENSOR_AND_SEQUENCE | EXPERTS2,
        optimizer=schedule,
        data_parallel={"sharding": "zero1"},
        data={"micro_batch_size": 1},
        trainer={"max_steps": 4, "async_save": True, "export": False},
    )
    run(first, ranks=4)
    change = ["--parallel.tensor-model-parallel-size", "1", "--parallel.no-sequence-parallel-enabled"]
    output = run(first, *change, "--parallel.expert-model-parallel-size", "4", "--trainer.max-steps", "6", ranks=4)
    assert "parallel.expert_model_parallel_size: 2 -> 4" in output
    run(first, *change, "--parallel.expert-model-parallel-size", "1", "--trainer.max-steps", "8", ranks=1)
    assert losses(tmp_path / "run") == pytest.approx(losses(reference), rel=5e-5)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run of a dense LLaMA with tied embeddings."""
    directory = tmp_path_factory.mktemp("dense")
    model = {"config_overrides": LLAMA | {"tie_word_embeddings": True}}
    succeed(run_here(write_config(directory, model=model, trainer={"max_steps": 3})))
    return directory / "run"


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(1, {}), pytest.param(4, TENSOR_AND_SEQUENCE | EXPERTS2, marks=pytest.mark.slow)],
    ids=["one", "tensor2xexpert2"],
)
def test_upcycling_starts_from_the_dense_model(dense: Path, tmp_path: Path, ranks: int, parallel: Any) -> None:
    model = {"pretrained": str(dense / "export"), "tokenizer": None, "config_overrides": {}}
    moe = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}
    trainer = {"max_steps": 2, "export": "verify"}
    data = {"micro_batch_size": 1}
    config = write_config(tmp_path, model=model, moe=moe, parallel=parallel, data=data, trainer=trainer)
    output = run(config, ranks=ranks)
    assert "experts: 4 in 2 of 2 layers, 2 for each token" in output
    result = summary(tmp_path / "run")
    # fp32: the weights of two equal experts add up to 1 with an error of 1e-7.
    assert result["held_out_loss_before"] == pytest.approx(summary(dense)["held_out_loss_after"], rel=1e-6)
    assert result["held_out_loss_after"] < result["held_out_loss_before"]
    assert result["transformers_difference"] < 1e-5
    assert load_config(tmp_path / "run" / "export").model_type == "mixtral"
    # Gradients differ between the experts, because tokens do: equal ones would stay equal.
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    assert isinstance(exported, MixtralForCausalLM)
    for name, weight in exported.named_parameters():
        if ".experts." in name:
            assert all((weight[0] - other).abs().max() > 1e-4 for other in weight[1:]), name
    # The resumed run has the checkpoint's weights, not copies of the dense model's again.
    if ranks == 1:
        again = succeed(run_here(config, "--trainer.max-steps", "3", "--trainer.allow-changes", DECAY))
        assert "resuming after step 2" in again
