"""Checkpoints of every ZeRO stage load at every other stage, T and D, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nxd_memopt.checkpoint import (
    BackgroundSaver,
    TrainingState,
    find_latest,
    load_pretrained,
    load_training_state,
    save_pretrained,
    save_training_state,
)
from nxd_memopt.checkpoint.layout import parts_of
from nxd_memopt.checkpoint.sharded.index import Index
from nxd_memopt.ops.param_remainders import REMAINDER, join
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.utils import bit_equal, is_sharded
from tests.data_parallel.stages import MAX_NORM, OFFLOAD, REMAINDERS, STAGES, Run, build, initialize
from tests.dist.pool import distributed

# vocabulary and MLP width leave a remainder on 2 and on 4 ranks
SIZES = {"vocab_size": 33, "intermediate_size": 28}


def save(run: Run, directory: Path, step: int = 2) -> dict[str, Tensor]:
    """Save, and return the full tensors of the checkpoint, remainders as masters."""
    state = TrainingState(run.model, run.optimizer, shared={"step": step})
    save_training_state(directory, step, state=state, config={})
    tensors = full_tensors(directory)
    kept = [name for name in tensors if name.startswith(f"optimizer.{REMAINDER}.")]
    assert bool(kept) == (run.stage == REMAINDERS)
    return with_masters(tensors)


def full_tensors(directory: Path) -> dict[str, Tensor]:
    latest = find_latest(directory)
    assert latest is not None
    index = Index(latest)
    return {
        name: index.assemble(name, parts_of(torch.empty(index.shape(name), device="meta")), index.shape(name))
        for name in index.content["tensors"]
    }


def with_masters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the remainders in a checkpoint's tensors by the fp32 masters."""
    found = {}
    for name, value in tensors.items():
        _, _, param = name.partition(f"optimizer.{REMAINDER}.")
        if param:
            found[f"optimizer.master.{param}"] = join(tensors[f"model.{param}"], value)
        else:
            found[name] = value
    return found


def load(run: Run, directory: Path) -> None:
    restored = load_training_state(directory, state=TrainingState(run.model, run.optimizer), config={})
    assert not restored.notes, restored.notes


def assert_bit_equal(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), what
    different = [name for name in expected if not bit_equal(found[name], expected[name])]
    assert not different, f"{what}: {different}"


@distributed(world_size=4)
@pytest.mark.parametrize(
    "stage",
    [
        *(pytest.param(each, marks=[pytest.mark.slow] * (each not in ("zero1", "zero3"))) for each in STAGES),
        OFFLOAD,
        pytest.param(REMAINDERS, marks=pytest.mark.slow),
    ],
)
def test_every_stage_loads_every_other(stage, tmp_path):
    """bf16 weights, fp32 masters and moments; from T=2, D=2 to T of 1, 2 and 4."""
    initialize(2)
    run = Run.of(build("llama", dtype=torch.bfloat16, **SIZES), stage)
    run.step(0)
    run.step(1)
    saved = save(run, tmp_path / stage)
    masters = {name for name in saved if name.startswith("optimizer.master.")}
    assert len(masters) == len(run.weights())
    assert all(saved[name].dtype == torch.float32 for name in masters)
    assert any(not bit_equal(saved[name], saved[name].bfloat16().float()) for name in masters)
    targets = [("none", 1), ("zero1", 4), ("zero2", 1), ("zero3", 1), ("zero3", 2), (OFFLOAD, 1), (REMAINDERS, 2)]
    for to_stage, tensor_size in targets:
        initialize(tensor_size)
        other = Run.of(build("llama", dtype=torch.bfloat16, seed=9, **SIZES), to_stage)
        load(other, tmp_path / stage)
        assert_bit_equal(save(other, tmp_path / f"{to_stage}_{tensor_size}"), saved, f"{stage} to {to_stage}")


@distributed(world_size=2)
def test_a_weight_and_its_remainder_are_of_one_rank(tmp_path):
    """Replicas of norms that differ in the last bit, on both sides of a rounding boundary."""
    initialize(2)
    run = Run.of(build("llama", dtype=torch.bfloat16, **SIZES), REMAINDERS)
    run.step(0)
    replicas = (0x3F808001, 0x3F807FFF)
    own = replicas[parallel_state.get_tensor_model_parallel_rank()]
    master = torch.tensor([own], dtype=torch.int32).view(torch.float32)
    with torch.no_grad():
        for index, each in enumerate(run.optimizer._sharded):
            if not is_sharded(each.param):
                run.optimizer._set_master(index, master.expand(each.shard.shape).contiguous())
                each.mark_equal()
    saved = save(run, tmp_path)
    norms = [value for name, value in saved.items() if name.startswith("optimizer.master.") and value.dim() == 1]
    found = [set(norm.view(torch.int32).tolist()) for norm in norms]
    assert len(found) > 2 and all(len(bits) == 1 and bits <= set(replicas) for bits in found), found


@distributed(world_size=4)
def test_every_stage_stores_the_same(tmp_path):
    """After clipped steps of bf16 weights; zero1 with and without states on the host, zero2, zero3."""
    initialize(2)
    stored: dict[str, dict[str, Tensor]] = {}
    fractions = [("zero1", 0), ("zero2", 0), ("zero3", 0), (OFFLOAD, 0.0), (OFFLOAD, 0.4), (OFFLOAD, 1.0)]
    for stage, fraction in (*fractions, (REMAINDERS, 0.0), (REMAINDERS, 0.4)):
        run = Run.of(build("llama", dtype=torch.bfloat16, sequence=False), stage, fraction=fraction)
        for step in range(3):
            run.step(step)
        assert min(run.norms) > MAX_NORM, "clipping is active"
        stored[f"{stage} {fraction}"] = save(run, tmp_path / f"{stage}_{fraction}", step=3)
    for name, tensors in stored.items():
        is_streamed = name.startswith((OFFLOAD, REMAINDERS))
        # The same additions at every stage, and at every fraction of states on the host.
        assert_bit_equal(tensors, stored[f"{OFFLOAD} 0.0" if is_streamed else "zero1 0"], name)
        for key, expected in stored["zero1 0"].items():
            # The update of states on the host rounds in another order than torch's: fp32 rounding. A weight may
            # round to the next bf16 number.
            is_weight = key.startswith("model.")
            tolerance = {"rtol": 2**-7, "atol": 1e-5} if is_weight else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(tensors[key], expected, **tolerance, msg=f"{name} {key}")


@distributed(world_size=4)
def test_resume_continues_bit_equal(tmp_path):
    """Also at the other stages: without sequence parallelism they add in the same order."""
    initialize(2)
    straight = Run.of(build("llama", dtype=torch.bfloat16, sequence=False), "zero3")
    straight.step(0)
    straight.step(1)
    save(straight, tmp_path)
    straight.step(2)
    straight.step(3)
    for stage in ("zero1", "zero2", "zero3"):
        resumed = Run.of(build("llama", dtype=torch.bfloat16, sequence=False, seed=9), stage)
        resumed.step(5)  # moments, masters and gathered parameters of another run are replaced
        load(resumed, tmp_path)
        resumed.losses.clear()
        resumed.norms.clear()
        resumed.step(2)
        resumed.step(3)
        assert resumed.losses == straight.losses[2:], stage
        assert resumed.norms == straight.norms[2:], stage
        for name, weight in straight.weights().items():
            assert bit_equal(resumed.weights()[name], weight), (stage, name)


@distributed(world_size=4)
def test_hybrid_shards_are_stored_once(tmp_path):
    initialize(1)
    run = Run.of(build("llama", dtype=torch.bfloat16, **SIZES), "zero3", ranks_per_replica=2)
    run.step(0)
    saved = save(run, tmp_path / "hybrid")
    initialize(2)
    other = Run.of(build("llama", dtype=torch.bfloat16, seed=9, **SIZES), "zero1")
    load(other, tmp_path / "hybrid")
    assert_bit_equal(save(other, tmp_path / "zero1"), saved, "hybrid to zero1")


@distributed(world_size=4)
def test_background_save_has_the_state_of_its_call(tmp_path):
    initialize(2)
    run = Run.of(build("llama", dtype=torch.bfloat16), "zero3")
    run.step(0)
    saved = save(run, tmp_path / "now", step=1)
    with BackgroundSaver(tmp_path / "background") as saver:
        saver.save(1, TrainingState(run.model, run.optimizer, shared={"step": 1}), {})
        run.step(1)
    assert_bit_equal(full_tensors(tmp_path / "background"), saved, "background")
    assert save(run, tmp_path / "later")["model.model.norm.weight"].ne(saved["model.model.norm.weight"]).any()


@distributed(world_size=4)
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_export_and_import(name, tmp_path):
    """A sharded model writes the directory of the same model without sharding, and loads it."""
    initialize(2)
    plain = build(name, dtype=torch.bfloat16, **SIZES)
    weights = {key: value.clone() for key, value in plain.state_dict().items()}
    sharded = Run.of(build(name, dtype=torch.bfloat16, **SIZES), "zero3")
    for model, directory in ((plain, "plain"), (sharded.model, "sharded")):
        save_pretrained(model, tmp_path / directory)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "sharded" / file).read_bytes(), file
    other = Run.of(build(name, dtype=torch.bfloat16, seed=9, **SIZES), "zero3")
    other.step(0)  # the root's parameters may be gathered, and are written to in full
    load_pretrained(other.model, tmp_path / "sharded")
    for key, weight in other.weights().items():
        assert bit_equal(weight, weights[key]), key
    rows = [each.shard for each in other.optimizer._sharded]
    assert all(bit_equal(row, row.bfloat16().float()) for row in rows), "masters start from the weights"
    sharded.step(1)
    save_pretrained(sharded.model, tmp_path / "trained", dtype=torch.float32)
    load_pretrained(plain, tmp_path / "trained")
    for key, weight in sharded.weights().items():
        assert bit_equal(plain.state_dict()[key], weight), key
