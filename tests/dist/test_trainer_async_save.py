"""Tagged checkpoints with async_save=True: the state of the call, one at a time, errors on all ranks at one step."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nxd_memopt import trainer
from nxd_memopt.checkpoint import pickled
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.trainer import checkpoint
from tests.dist.pool import distributed
from tests.dist.test_zero1 import OPTIONS, Mlp, train
from tests.reference import error_message


def build(zero_one: bool = True):
    nxd_config = trainer.neuronx_distributed_config(
        tensor_parallel_size=2, optimizer_config={"zero_one_enabled": zero_one}
    )
    torch.manual_seed(5)
    model = trainer.initialize_parallel_model(nxd_config, Mlp, False, sequence_parallel=True)
    return model, trainer.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), **OPTIONS)


def run(model, optimizer, steps):
    for step in steps:
        train(model, optimizer, range(step, step + 1), sequence_parallel=True)


@distributed(world_size=4)
@pytest.mark.parametrize("zero_one", [True, False])
def test_training_goes_on_and_a_resumed_run_is_exact(zero_one, tmp_path):
    straight = build(zero_one)
    run(*straight, range(2))
    write, may_write = pickled.write_tensors, threading.Event()

    def write_later(path, content):
        assert may_write.wait(60), "two steps take less than a minute"
        write(path, content)

    pickled.write_tensors = write_later
    try:
        trainer.save_checkpoint(tmp_path, "second", *straight, user_content={"step": 2}, async_save=True)
        run(*straight, range(2, 4))  # writes to every parameter and state before any of them is in a file
    finally:
        may_write.set()
        pickled.write_tensors = write
    trainer.save_checkpoint(tmp_path, "fourth", *straight, user_content={"step": 4}, async_save=True, num_kept_ckpts=2)
    run(*straight, range(4, 5))
    trainer.finalize_checkpoint()
    assert parallel_state.UNFINISHED_SAVES == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fourth", "second"]
    assert not list(tmp_path.rglob("rank_*")), "markers are removed"
    for tag, step in (("second", 2), ("fourth", 4)):
        resumed = build(zero_one)
        assert trainer.load_checkpoint(tmp_path, tag, *resumed) == {"step": step}
        run(*resumed, range(step, 5))
        for (name, want), param in zip(straight[0].named_parameters(), resumed[0].parameters(), strict=True):
            assert torch.equal(param, want), (tag, name)


@distributed(world_size=4)
@pytest.mark.parametrize("failing", [0, 3])
def test_an_error_is_raised_on_all_ranks_at_one_step(failing, tmp_path):
    model, optimizer = build()
    run(model, optimizer, range(1))
    trainer.save_checkpoint(tmp_path, "good", model, optimizer)
    original = pickled.write_tensors
    if dist.get_rank() == failing:
        pickled.write_tensors = full_disk
    try:
        trainer.save_checkpoint(tmp_path, "bad", model, optimizer, async_save=True)
        steps = 0
        with pytest.raises((ValueError, OSError), match=rf"failed on rank {failing}.*no space left|^no space left"):
            while parallel_state.UNFINISHED_SAVES:
                run(model, optimizer, range(steps, steps + 1))
                steps += 1
    finally:
        pickled.write_tensors = original
    counts = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(counts, torch.tensor([float(steps)]))
    assert len({int(count) for count in counts}) == 1
    trainer.finalize_checkpoint()  # reported once
    loaded: dict = {}
    trainer.load_checkpoint(tmp_path, model=loaded)
    assert "no complete checkpoint 'bad'" in error_message(lambda: trainer.load_checkpoint(tmp_path, "bad", loaded))
    trainer.save_checkpoint(tmp_path, "bad", model, optimizer, async_save=True)  # what was left is replaced
    trainer.finalize_checkpoint()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "good"]


def full_disk(path, content):
    raise OSError("no space left")


@distributed(world_size=4)
def test_what_cannot_be_stored_is_refused_at_the_call(tmp_path):
    build()
    state = {"x": object() if dist.get_rank() == 1 else 1}
    message = error_message(lambda: trainer.save_checkpoint(tmp_path, "t", state, async_save=True))
    assert "model['x'] has the type object" in message.replace("dp_rank_00_tp_rank_01_pp_rank_00", "model")
    directory = Path(tmp_path) / str(dist.get_rank())
    message = error_message(lambda: trainer.save_checkpoint(directory, "t", {"w": torch.zeros(3)}, async_save=True))
    assert "is not visible here: use a directory that all hosts share" in message
    assert parallel_state.UNFINISHED_SAVES == []


def test_a_host_with_too_little_memory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("nxd_memopt.memory.host_limits.available_host_bytes", lambda: 1000)
    trainer.neuronx_distributed_config()
    message = error_message(lambda: trainer.save_checkpoint(tmp_path, "t", {"w": torch.zeros(300)}, async_save=True))
    assert "tagged checkpoint requires 1200 bytes of host memory, and 1000 are available" in message
    assert checkpoint.has_checkpoint(tmp_path) is False
