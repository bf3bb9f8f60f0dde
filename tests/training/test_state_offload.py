"""Optimizer states on the host in the training program: equal bits at every fraction, also after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from nxd_memopt.backends import backend
from nxd_memopt.optimizer.offloaded_zero1 import OffloadedZero1Optimizer
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.model import build_model
from tests.data_parallel.test_checkpoints import assert_bit_equal, full_tensors, with_masters
from tests.deferred_transfers import DeferredTransfers
from tests.dist import pool
from tests.training.resume.test_resumed_runs import refuse, succeed
from tests.training.runs import LLAMA, _run_rank, rows, run_here, summary, write_config

SECTIONS: dict[str, dict[str, Any]] = {
    # accumulation over 2 micro-batches, clipping active
    "data": {"micro_batch_size": 1, "global_batch_size": 2},
    "optimizer": {"clip_grad": 0.25, "eps": 1e-3, "decay_steps": 6, "warmup_steps": 1},
    "trainer": {"max_steps": 6, "save_interval": 3, "val_check_interval": 2, "precision": "bf16-mixed"},
}
CHUNKS_OF_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
LEAST = 1e-9  # rounded up to one parameter; 0 is the ordinary optimizer, which rounds otherwise on a CPU
HALF = ("--trainer.max-steps", "3")


def small_chunks() -> Any:
    """Chunks of 256 elements, three of them on the device; only norms are too small for the host."""
    options = {"resident_elements": 100, "chunk_elements": 256, "staging_bytes": 3 * 12 * 256}
    return mock.patch.dict(OffloadedZero1Optimizer.__init__.__kwdefaults__, options)


@pytest.fixture(autouse=True)
def simulated_transfers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(type(backend), "host_transfers", lambda self: DeferredTransfers())
    with small_chunks():
        yield


def write(directory: Path, **sections: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    base = {name: dict(values) for name, values in SECTIONS.items()}
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return write_config(directory, **base)


def offload(fraction: float, *, in_forward: bool = False) -> dict[str, Any]:
    return {
        "optimizer_offload_fraction": fraction,
        "optimizer_staging_gib": 3 * 12 * 256 / 2**30,
        "optimizer_update_in_forward": in_forward,
    }


def results(directory: Path) -> list[Any]:
    run = directory / "run"
    steps = [(row["loss"], row["grad_norm"]) for row in rows(run)]
    return [*steps, *rows(run, "evaluation.jsonl")]


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the states of a single parameter on the host, updated by the same arithmetic."""
    directory = tmp_path_factory.mktemp("resident")
    with mock.patch.object(type(backend), "host_transfers", lambda self: DeferredTransfers()), small_chunks():
        succeed(run_here(write(directory, optimizer=offload(LEAST))))
    return directory


@pytest.mark.parametrize(
    ("fraction", "in_forward", "memory"),
    [
        pytest.param(1.0, False, {}, marks=pytest.mark.slow),
        pytest.param(0.6, True, {}, marks=pytest.mark.slow),
        (1.0, True, CHUNKS_OF_LAYERS),
    ],
)
def test_every_fraction_has_the_bits_of_resident_states(
    resident: Path, tmp_path: Path, fraction: float, in_forward: bool, memory: dict[str, Any]
) -> None:
    output = succeed(run_here(write(tmp_path, optimizer=offload(fraction, in_forward=in_forward), memory=memory)))
    percent = round(100 * fraction)
    where = "in the next forward" if in_forward else "after backward"
    assert f"optimizer states: {percent}% of masters and moments in host memory, updated {where}" in output
    assert results(tmp_path) == results(resident)
    files = [each / "run" / "export" / "model.safetensors" for each in (tmp_path, resident)]
    assert files[0].read_bytes() == files[1].read_bytes()
    checkpoints = [each / "run" / "checkpoints" for each in (tmp_path, resident)]
    assert_bit_equal(full_tensors(checkpoints[0]), full_tensors(checkpoints[1]), "checkpoint")


def test_streamed_states_have_the_losses_of_the_ordinary_optimizer(tmp_path: Path) -> None:
    """On a CPU the ordinary one is torch's fused AdamW: fp32 rounding."""
    found = []
    for name, options in (("plain", {}), ("streamed", offload(1.0, in_forward=True))):
        trainer = {"precision": "32-true", "export": "verify"}
        succeed(run_here(write(tmp_path / name, optimizer=options, trainer=trainer)))
        found.append([row["loss"] for row in rows(tmp_path / name / "run")])
        assert summary(tmp_path / name / "run")["transformers_difference"] < 1e-5  # fp32 sums in another order
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1.0, True), (0.3, False)),
        pytest.param((0.5, False), (LEAST, False), marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_at_another_fraction(
    resident: Path, tmp_path: Path, before: tuple[float, bool], after: tuple[float, bool]
) -> None:
    config = write(tmp_path, optimizer=offload(before[0], in_forward=before[1]))
    succeed(run_here(config, *HALF))
    config = write(tmp_path, optimizer=offload(after[0], in_forward=after[1]))
    output = succeed(run_here(config))
    assert f"optimizer.optimizer_offload_fraction: {before[0]} -> {after[0]}" in output
    assert results(tmp_path)[:6] == results(resident)[:6]
    found, expected = [load_file(each / "run" / "export" / "model.safetensors") for each in (tmp_path, resident)]
    assert_bit_equal(found, expected, "export")


@pytest.mark.parametrize(("before", "after"), [(False, True)])
def test_a_run_resumes_with_and_without_remainders(tmp_path: Path, before: bool, after: bool) -> None:
    """A checkpoint has masters or remainders; each becomes the other, and no bit is lost but that of a tie."""
    found = []
    for name, settings in (("uninterrupted", (False,)), ("resumed", (before, after))):
        for setting in settings:
            optimizer = offload(1.0) | {"store_param_remainders": setting}
            config = write(tmp_path / name, optimizer=optimizer, trainer={"precision": "bf16-mixed"})
            is_first_half = name == "resumed" and setting == before
            output = succeed(run_here(config, *(HALF if is_first_half else ())))
        found.append(([row["loss"] for row in rows(tmp_path / name / "run")], masters(tmp_path / name)))
    assert f"optimizer.store_param_remainders: {before} -> {after}" in output
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-5, atol=1e-7)


def test_a_warm_start_has_the_masters_of_remainders(tmp_path: Path) -> None:
    """An fp32 run that starts from a bf16 run has weights between bf16 numbers."""
    nothing = {"data": {"eval_sequences": 0}}
    config = write(tmp_path, optimizer=offload(1.0) | {"store_param_remainders": True}, **nothing)
    succeed(run_here(config, *HALF))
    there = {"output_dir": str(tmp_path / "next"), "max_steps": 0, "precision": "32-true"}
    config = write(tmp_path, trainer=there, model={"warm_start": str(tmp_path / "run")}, **nothing)
    succeed(run_here(config))
    weights = load_file(tmp_path / "next" / "export" / "model.safetensors")
    rounded = [bool(torch.equal(weight.bfloat16().float(), weight)) for weight in weights.values() if weight.dim() > 1]
    assert rounded and not any(rounded)


def masters(directory: Path) -> dict[str, torch.Tensor]:
    """Return the fp32 masters in the last checkpoint of a run."""
    tensors = with_masters(full_tensors(directory / "run" / "checkpoints"))
    return {name: value for name, value in tensors.items() if name.startswith("optimizer.master.")}


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        pytest.param({"no_decay": ["embed_tokens"]}, True, marks=pytest.mark.slow),
        ({"no_decay": ["q_proj"]}, False),
    ],
)
def test_updates_in_forward_of_any_group(tmp_path: Path, options: dict[str, Any], tied: bool) -> None:
    """Also after the last step, where neither a forward nor a checkpoint completes them before the export."""
    found = []
    for in_forward in (False, True):
        directory = tmp_path / str(in_forward)
        data = {"eval_sequences": 0}
        trainer = {"save_interval": "never", "max_steps": 2, "val_check_interval": 0}
        optimizer = offload(1.0, in_forward=in_forward) | options
        model = {"config_overrides": {**LLAMA, "tie_word_embeddings": tied}}
        succeed(run_here(write(directory, optimizer=optimizer, data=data, trainer=trainer, model=model)))
        found.append((results(directory), (directory / "run" / "export" / "model.safetensors").read_bytes()))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_skipped_step_with_weights_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16-mixed: the first steps overflow; then the weights are checked where they are."""

    def build_resizable(config: TrainConfig, hf_config: Any) -> Any:
        # On a CPU, weights may be slices of memory that cannot be freed.
        model = build_model(config, hf_config)
        for param in model.parameters():
            param.data = param.data.clone()
        return model

    monkeypatch.setattr("nxd_memopt.training.loop.build_model", build_resizable)
    found = []
    for name, memory in (("device", {}), ("host", {"cpu_offloading_weights": True, "cpu_offloading_num_layers": 1})):
        options = {"initial_loss_scale": 2.0**18}
        # No checkpoint: its writer takes a view of the CPU's weights that keeps them from being freed.
        trainer = {"precision": "16-mixed", "max_steps": 6, "export": False, "save_interval": "never"}
        succeed(run_here(write(tmp_path / name, optimizer=options, trainer=trainer, memory=memory)))
        found.append([(row["loss"], row["skipped"]) for row in rows(tmp_path / name / "run")])
    assert found[0] == found[1]
    assert {skipped for _, skipped in found[0]} == {True, False}


@pytest.mark.slow
def test_sharded_states_on_the_host(tmp_path: Path) -> None:
    """T=2, D=2 with zero1: 40 % of each rank's shards on the host; then D=1 with all of them there."""
    found = {}
    layout = {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel_enabled": True}}
    trainer = {"export": False, "val_check_interval": 0}
    shared = layout | {"trainer": trainer, "data": {"micro_batch_size": 1, "global_batch_size": 4}}
    for fraction in (LEAST, 0.4):
        config = write(
            tmp_path / str(fraction), optimizer=offload(fraction), data_parallel={"sharding": "zero1"}, **shared
        )
        pool.run_on_ranks(_run_offloaded, 4, str(config), ())
        found[fraction] = results(tmp_path / str(fraction))
    assert found[0.4] == found[LEAST]
    first = write(tmp_path / "parts", optimizer=offload(0.4), data_parallel={"sharding": "zero1"}, **shared)
    pool.run_on_ranks(_run_offloaded, 4, str(first), HALF)
    second = write(tmp_path / "parts", optimizer=offload(1.0), **shared)
    pool.run_on_ranks(_run_offloaded, 2, str(second), ())
    parts = [row["loss"] for row in rows(tmp_path / "parts" / "run")]
    assert parts == pytest.approx([row["loss"] for row in rows(tmp_path / str(LEAST) / "run")], rel=1e-5)  # other sums


STAGES = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("fraction", "remainders", "tied", "ranks"),
    [
        (0.4, True, False, 2),
        (1.0, False, True, 2),
        pytest.param(1.0, False, False, 2, marks=pytest.mark.slow),
        pytest.param(0.4, False, True, 4, marks=pytest.mark.slow),
    ],
)
def test_states_of_stages(tmp_path: Path, fraction: float, remainders: bool, tied: bool, ranks: int) -> None:
    """Two stages, resumed, have the losses and weights of one rank; four ranks have zero1."""
    # The norm is added in another order, and a factor from it would round otherwise.
    options = {"store_param_remainders": remainders, "clip_grad": 0.0}
    shared: dict[str, Any] = {
        "model": {"config_overrides": LLAMA | {"num_hidden_layers": 3, "tie_word_embeddings": tied}},
        "data": {"micro_batch_size": 1, "global_batch_size": 4},
        "data_parallel": {"sharding": "zero1" if ranks == 4 else "none"},
        # Gradients of a tied embedding are added in another order too; in bf16 a weight may round otherwise.
        "trainer": {"precision": "32-true" if tied else "bf16-mixed"},
    }
    whole = write(tmp_path / "whole", **shared, optimizer=offload(LEAST) | options)
    pool.run_on_ranks(_run_offloaded, ranks // 2, str(whole), ())
    stages = write(tmp_path / "stages", **shared, optimizer=offload(fraction) | options, parallel=STAGES)
    output = pool.run_on_ranks(_run_offloaded, ranks, str(stages), HALF)[0]
    assert f"optimizer states: {fraction:.0%} of " in output
    pool.run_on_ranks(_run_offloaded, ranks, str(stages), ())
    found, expected = [[row["loss"] for row in rows(tmp_path / name / "run")] for name in ("stages", "whole")]
    files = [load_file(tmp_path / name / "run" / "export" / "model.safetensors") for name in ("stages", "whole")]
    if tied:
        assert found == pytest.approx(expected, rel=1e-6)
        return
    assert found == expected
    assert_bit_equal(*files, "export")


@pytest.mark.slow
def test_copies_of_a_tied_weight_stay_equal(tmp_path: Path) -> None:
    """The first stage may have its states on the host and the last one not; remainders do not change with the place."""
    found = []
    for fraction in (LEAST, 0.4):
        config = write(
            tmp_path / str(fraction),
            model={"config_overrides": LLAMA | {"num_hidden_layers": 3, "tie_word_embeddings": True}},
            optimizer=offload(fraction) | {"store_param_remainders": True},
            parallel=STAGES,
        )
        pool.run_on_ranks(_run_offloaded, 2, str(config), ())
        found.append(results(tmp_path / str(fraction)))
    assert found[0] == found[1]


def _run_offloaded(config: str, options: tuple[str, ...]) -> str:
    with mock.patch.object(type(backend), "host_transfers", lambda self: DeferredTransfers()), small_chunks():
        return _run_rank(config, options)


def test_too_little_memory_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may use its part of what the host has: 32 MiB of 32 GiB for each of 1,024 ranks."""
    monkeypatch.setattr("nxd_memopt.training.host_memory.available_host_bytes", lambda: 2**35)
    monkeypatch.setattr("nxd_memopt.training.host_memory.ranks_per_host", lambda: 2**10)
    wide = {"config_overrides": LLAMA | {"hidden_size": 192, "vocab_size": 16384, "num_hidden_layers": 1}}
    nothing = {"data": {"eval_sequences": 0}, "trainer": {"max_steps": 0, "export": False}}
    outcome = run_here(write(tmp_path, optimizer=offload(1.0), model=wide, **nothing))
    refuse(outcome, "optimizer states requires", "33554432", "fewer than 1024 ranks")
    assert not rows_exist(tmp_path / "run")


def rows_exist(run: Path) -> bool:
    return (run / "metrics.jsonl").is_file() and bool(rows(run))


def test_a_device_without_copies_to_the_host_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(backend), "host_transfers", lambda self: None)
    outcome = run_here(write(tmp_path, optimizer=offload(1.0)))
    refuse(outcome, "optimizer.optimizer_offload_fraction", f"the backend is {backend.name}", "set it to 0")
