"""Training checkpoints over real ranks: the same bits at any T, D, with or without ZeRO-1, and one agreed outcome."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from nxd_memopt.checkpoint import BackgroundSaver, TrainingState, load_training_state, local_slice, save_training_state
from nxd_memopt.checkpoint.sharded import saving, worker
from nxd_memopt.checkpoint.sharded import snapshot as snapshots
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.optimizer.sharding import cut_shard
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.resharding import full_shape
from tests.dist.pool import distributed
from tests.dist.test_checkpoint import FULL, add_parameters
from tests.reference import error_message

CONFIG = {"seed": 5}
ODD = {"expert.weight": ((3, 20, 5), 1, 1), "wide.weight": ((5, 24), 1, 3), "bias.weight": ((7,), 0, 1)}
LAYOUTS = [(2, 2, True), (1, 4, True), (4, 1, True), (2, 2, False), (1, 4, False), (4, 1, False)]


class Every(nn.Module):
    """A parameter of every kind of shard, odd sizes, padding, strides in both dimensions, replicas and fused blocks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        add_parameters(self, FULL | ODD, dtype=dtype)
        multiplier = max(parallel_state.get_tensor_model_parallel_size() // 2, 1)
        self.fused = GQAQKVColumnParallelLinear(
            3, [16, 4], gather_output=False, dtype=dtype, kv_size_multiplier=multiplier, fuse_qkv=True
        )


def full_values(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(name.encode()))
    return torch.randn(shape, generator=generator)


class Run:
    """A model and an optimizer whose values are those of full tensors, or not a number."""

    def __init__(self, layout: tuple[int, int, bool], dtype: torch.dtype) -> None:
        tensor_size, data_size, zero1 = layout
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
        assert parallel_state.get_data_parallel_size() == data_size
        self.model = Every(dtype)
        groups = None if zero1 else [[rank] for rank in range(dist.get_world_size())]
        decayed = [{"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 0.1}]
        others = {"params": [p for p in self.model.parameters() if p.dim() < 2], "weight_decay": 0.0}
        self.optimizer = NeuronZero1Optimizer(
            [*decayed, others], torch.optim.AdamW, sharding_groups=groups, lr=0.1, optimizer_dtype=torch.float32
        )
        self.names = {id(param): name for name, param in self.model.named_parameters()}

    def state(self, **values: Any) -> TrainingState:
        return TrainingState(self.model, self.optimizer, values, {"rank": dist.get_rank()})

    def wanted(self) -> dict[str, torch.Tensor]:
        """What this rank must hold, cut out of full tensors by the code that loads Hugging Face weights and by ZeRO."""
        found = {}
        for each in self.optimizer.stored_parameters():
            name = self.names[id(each.param)]
            master = full_values(name, full_shape(each.param), 1).to(self.optimizer.optimizer_dtype)
            found[name] = local_slice(master.to(each.param.dtype), each.param)
            described = torch.empty_like(each.param, dtype=torch.float32)
            described.__dict__.update(vars(each.param))
            for kind, seed in (("master", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
                full = full_values(name, full_shape(each.param), seed)
                local = cut_shard(local_slice(full, described), self.optimizer.sharding_group)
                if kind != "master" or each.stored is not each.param:
                    found[f"{kind} {name}"] = local
            found[f"step {name}"] = torch.tensor(float(seed + len(name)))
        return found

    def fill(self) -> None:
        wanted = self.wanted()
        with torch.no_grad():
            for each in self.optimizer.stored_parameters():
                name = self.names[id(each.param)]
                each.param.copy_(wanted[name])
                if each.stored is not each.param:
                    each.stored.copy_(wanted[f"master {name}"])
                kinds = ("exp_avg", "exp_avg_sq", "step")
                self.optimizer.base_optimizer.state[each.stored] = {
                    kind: wanted[f"{kind} {name}"].clone() for kind in kinds
                }
        self.optimizer.mark_masters_synced()

    def held(self) -> dict[str, torch.Tensor]:
        found = {}
        for each in self.optimizer.stored_parameters():
            name = self.names[id(each.param)]
            found[name] = each.param.detach()
            if each.stored is not each.param:
                found[f"master {name}"] = each.stored.detach()
            for kind, value in self.optimizer.base_optimizer.state[each.stored].items():
                found[f"{kind} {name}"] = value
        return found

    def require_wanted(self) -> None:
        held, wanted = self.held(), self.wanted()
        assert held.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert held[name].dtype == tensor.dtype and torch.equal(held[name], tensor), name


@distributed(world_size=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16_masters"])
@pytest.mark.parametrize("saved", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[4]], ids=str)
def test_every_layout_loads_the_same_bits_of_every_other(saved, dtype, tmp_path):
    run = Run(saved, dtype)
    run.fill()
    run.require_wanted()
    save_training_state(tmp_path, 7, state=run.state(position=3), config=CONFIG)
    for layout in LAYOUTS:
        parallel_state.destroy_model_parallel()
        other = Run(layout, dtype)
        restored = load_training_state(tmp_path, state=other.state(), config=CONFIG)
        other.require_wanted()
        assert (restored.step, restored.shared, restored.notes) == (7, {"position": 3}, [])
        same_sizes = layout[:2] == saved[:2]
        assert restored.per_rank == ({"rank": dist.get_rank()} if same_sizes else None)
        assert [group["weight_decay"] for group in other.optimizer.base_optimizer.param_groups] == [0.1, 0.0]


@distributed(world_size=4)
def test_files_hold_full_tensors_each_element_once(tmp_path):
    """Read with safetensors and json alone."""
    run = Run((2, 2, True), torch.bfloat16)
    run.fill()
    target = save_training_state(tmp_path, 1, state=run.state(), config=CONFIG)
    content = json.loads((target / "index.json").read_text())
    files = {path.name: load_file(path) for path in target.glob("*.safetensors")}
    assert len(files) == 4
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in files.values()]
    assert max(sizes) < 1.5 * min(sizes), "what all ranks hold is written by one, in turns"
    for name, tensor in content["tensors"].items():
        full = torch.full(tensor["shape"], torch.nan, dtype=getattr(torch, tensor["dtype"]))
        written = 0
        for box in tensor["boxes"]:
            part = files[box["file"]][box["key"]]
            full[tuple(slice(a, a + n) for a, n in zip(box["offset"], box["size"], strict=True))] = part
            written += part.numel()
        assert written == full.numel()
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            kind, _, rest = rest.partition(".")
        if kind == "step":
            continue
        seed = {"model": 1, "master": 1, "exp_avg": 2, "exp_avg_sq": 3}[kind]
        assert torch.equal(full, full_values(rest, tuple(tensor["shape"]), seed).to(full.dtype)), name
    assert "optimizer.master.fused.weight_qkv" in content["tensors"]


@distributed(world_size=4)
def test_missing_masters_are_said_and_surplus_ones_refused(tmp_path):
    run = Run((2, 2, True), torch.bfloat16)
    run.fill()
    run.optimizer.save_master_weights = False
    save_training_state(tmp_path / "without", 1, state=run.state(), config=CONFIG)
    run.optimizer.save_master_weights = True
    save_training_state(tmp_path / "with", 1, state=run.state(), config=CONFIG)
    restored = load_training_state(tmp_path / "without", state=run.state(), config=CONFIG)
    assert len(restored.notes) == 1 and "holds no master weights of" in restored.notes[0]
    parallel_state.destroy_model_parallel()
    other = Run((2, 2, True), torch.bfloat16)
    plain = torch.optim.AdamW(
        [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in other.optimizer.param_groups]
    )
    state = TrainingState(other.model, plain)
    message = error_message(lambda: load_training_state(tmp_path / "with", state=state, config=CONFIG))
    assert "keeps no master weights of torch.bfloat16 parameters" in message
    parallel_state.destroy_model_parallel()
    state = Run((2, 2, True), torch.float32).state()
    message = error_message(lambda: load_training_state(tmp_path / "with", state=state, config=CONFIG))
    assert "has shape" in message and "torch.float32" in message and "torch.bfloat16" in message


# In the background


def slow_down(seconds: float) -> None:
    """Let this rank's writer take its time over each piece."""
    original = snapshots.Snapshot._read

    def read(this: Any, piece: Any, index: int) -> torch.Tensor:
        time.sleep(seconds)
        return original(this, piece, index)

    snapshots.Snapshot._read = read
    slow_down.undo = lambda: setattr(snapshots.Snapshot, "_read", original)


def update(run: Run) -> None:
    for param in run.model.parameters():
        param.grad = torch.full_like(param, float(dist.get_rank() + 1))
    run.optimizer.step()
    run.optimizer.zero_grad()


@distributed(world_size=4)
@pytest.mark.parametrize(("layout", "slow_rank"), [(LAYOUTS[0], 0), (LAYOUTS[5], 3)], ids=str)
def test_ranks_of_different_speed_save_one_moment(layout, slow_rank, tmp_path):
    run = Run(layout, torch.bfloat16)
    run.fill()
    if dist.get_rank() == slow_rank:
        slow_down(0.02)
    polls = 0
    try:
        with BackgroundSaver(tmp_path, pool=HostPool(block_bytes=1 << 10)) as saver:
            saver.save(7, run.state(), CONFIG)
            while saver.is_busy:
                update(run)
                polls += 1
                saver.poll()
    finally:
        if dist.get_rank() == slow_rank:
            slow_down.undo()
    counts = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(counts, torch.tensor([float(polls)]))
    assert len({int(count) for count in counts}) == 1, "all ranks find the save done at the same step"
    parallel_state.destroy_model_parallel()
    other = Run((1, 4, True), torch.bfloat16)
    load_training_state(tmp_path, state=other.state(), config=CONFIG)
    other.require_wanted()


@distributed(world_size=4)
@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_at_one_step(failing, tmp_path):
    run = Run((2, 2, True), torch.bfloat16)
    run.fill()
    with BackgroundSaver(tmp_path, pool=HostPool(block_bytes=1 << 10)) as saver:
        saver.save(1, run.state(), CONFIG)
        saver.finish()
        saver.save(2, run.state(), CONFIG)
        saver.finish()
        if dist.get_rank() == failing:
            slow_down(0.1)  # the next update comes before the writer has read all
            saver.pool.take = fail
        try:
            with pytest.raises(ValueError, match="no more memory"):
                saver.save(3, run.state(), CONFIG)
                while saver.is_busy:
                    update(run)
                    saver.poll()
        finally:
            if dist.get_rank() == failing:
                slow_down.undo()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.glob("step_*[0-9]")) == ["step_00000001", "step_00000002"]


@distributed(world_size=2)
@pytest.mark.parametrize(("failing", "finishes"), [(0, True), (1, False)])
def test_a_failure_that_rank_0_is_not_told_of_still_ends_the_save(failing, finishes, tmp_path):
    """The directory is gone on the failing rank, so that no file tells rank 0, which waits for the rank's files."""
    run = Run((1, 2, True), torch.bfloat16)
    run.fill()
    pool = HostPool(block_bytes=1 << 10)
    with BackgroundSaver(tmp_path, pool=pool, stall_s=1.0) as saver, pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "report_failure", lambda directory, rank, message: None)
        if dist.get_rank() == failing:
            patch.setattr(saving, "write_file", fail)
        started = time.monotonic()
        saver.save(3, run.state(), CONFIG)
        with pytest.raises(ValueError, match="no more memory") as caught:
            while saver.is_busy and time.monotonic() < started + 20:
                saver.finish() if finishes else saver.poll()
        assert (f"failed on rank {failing}: ValueError: no more" in str(caught.value)) == (dist.get_rank() != failing)
        assert time.monotonic() < started + 20 and not saver.is_busy and saver.pool.ledger() == {}


@distributed(world_size=2)
def test_a_save_that_one_rank_refuses_keeps_no_memory_on_the_others(tmp_path):
    """A rank that has no memory, and one that does not see the directory."""
    run = Run((1, 2, True), torch.bfloat16)
    run.fill()
    with BackgroundSaver(tmp_path / str(dist.get_rank())) as saver:
        message = error_message(lambda: saver.save(1, run.state(), CONFIG))
        assert "is not visible here: use a directory that all hosts share" in message
        assert not saver.is_busy and saver.pool.ledger() == {}
    with BackgroundSaver(tmp_path, pool=HostPool(block_bytes=1 << 10)) as saver:
        if dist.get_rank() == 1:
            saver.pool.take = fail
        values = run.state()
        state = TrainingState(values.model, values.optimizer, per_rank={"rng": torch.arange(10)})  # copied at once
        assert "no more memory" in error_message(lambda: saver.save(1, state, CONFIG))
        update(run)
        assert saver.pool.ledger() == {} and not saver.is_busy


def fail(*args: Any) -> Any:
    raise ValueError(f"no more memory for {args[:1]}")
