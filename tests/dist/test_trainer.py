"""The trainer surface on real ranks: model, optimizers, checkpoints, against dense arithmetic and straight runs."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_memopt import trainer
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import layers, parallel_state
from tests.dist.pool import distributed
from tests.dist.test_zero1 import (
    FEED_FORWARD,
    HIDDEN,
    OPTIONS,
    SEQUENCE,
    Mlp,
    assert_equal_to_dense,
    dense_copy,
    train,
    train_dense,
)
from tests.reference import assert_same_on_all_ranks, assert_says, error_message, tensors
from tests.reference_models import batch, full_parameters, hugging_face, local_part, mixtral_config, parallel_model


def config(**options):
    return trainer.neuronx_distributed_config(tensor_parallel_size=2, **options)


@distributed(world_size=[2, 4])
@pytest.mark.parametrize(("zero_one", "max_grad_norm"), [(False, 0.05), (True, 0.05), (True, 1e6)])
def test_optimizer_equals_dense_adamw(zero_one, max_grad_norm):
    """max_grad_norm counts with and without ZeRO-1; the hook runs although the configuration does not ask for it."""
    nxd_config = config(optimizer_config={"zero_one_enabled": zero_one, "max_grad_norm": max_grad_norm})
    model = trainer.initialize_parallel_model(nxd_config, Mlp, False, sequence_parallel=True)
    dense = dense_copy(model.module, 2)
    optimizer = trainer.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), **OPTIONS)
    assert isinstance(optimizer.optimizer, NeuronZero1Optimizer) == zero_one
    train(model, optimizer, range(3), sequence_parallel=True)
    norms = train_dense(dense, torch.optim.AdamW(dense.parameters(), **OPTIONS), range(3), max_grad_norm)
    assert_equal_to_dense(model.module, dense, 2)
    assert optimizer.grad_norm.item() == pytest.approx(norms[-1], rel=1e-5)  # fp32 sums in another order


@distributed(world_size=4)
@pytest.mark.parametrize("zero_one", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_resume_is_bit_equal(zero_one, masters, tmp_path):
    """Model, optimizer and scheduler from the newest tag; bf16 with masters, fp32 without."""
    nxd_config = config(
        optimizer_config={"zero_one_enabled": zero_one},
        mixed_precision_config={"use_master_weights": masters, "use_fp32_grad_acc": masters},
    )
    options = {"sequence_parallel": True, "dtype": torch.bfloat16 if masters else torch.float32}

    def build():
        torch.manual_seed(5)
        model = trainer.initialize_parallel_model(nxd_config, Mlp, False, **options)
        optimizer = trainer.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), **OPTIONS)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def run(model, optimizer, scheduler, steps):
        for step in steps:
            train(model, optimizer, range(step, step + 1), sequence_parallel=True)
            scheduler.step()

    straight = build()
    run(*straight, range(2))
    trainer.save_checkpoint(tmp_path, "z_first", *straight, {"step": 2}, 1, False, 2)
    run(*straight, range(2, 3))
    trainer.save_checkpoint(tmp_path, "a_second", *straight, {"step": 3}, 8, True, 2)
    run(*straight, range(3, 5))

    resumed = build()
    run(*resumed, range(9, 10))
    model, optimizer, scheduler = resumed
    assert trainer.load_checkpoint(tmp_path, None, model, optimizer, scheduler) == {"step": 3}
    run(*resumed, range(3, 5))
    for (name, want), param in zip(straight[0].named_parameters(), model.parameters(), strict=True):
        assert torch.equal(param, want), name
    assert optimizer.param_groups[0]["lr"] == straight[1].param_groups[0]["lr"] == pytest.approx(1e-2 / 32)
    data = parallel_state.get_data_parallel_rank()
    assert (tmp_path / "a_second" / "optim" / f"dp_rank_{data:02d}_tp_rank_01_pp_rank_00.pt").is_file() == (
        zero_one or data == 0
    )
    assert not (tmp_path / "a_second" / "model" / "dp_rank_01_tp_rank_00_pp_rank_00.pt").exists()


@distributed(world_size=2)
def test_checkpoints_are_complete_or_absent(tmp_path):
    """Kept by number, newest by save and not by name; a cut-off or failed save is not found."""
    config()
    state = {"weight": torch.full((2,), float(dist.get_rank()))}
    assert not trainer.has_checkpoint(tmp_path / "run")
    for tag in ("step_9", "step_10", "best"):
        trainer.save_checkpoint(tmp_path / "run", tag, {**state, "tag": tag}, num_kept_ckpts=2)
    kept = sorted(path.name for path in (tmp_path / "run").iterdir())
    trainer.finalize_checkpoint()
    assert kept == ["best", "step_10"]
    trainer.save_checkpoint(tmp_path / "run", "best", {**state, "tag": "again"}, num_kept_ckpts=-1)
    loaded: dict = {}
    assert trainer.load_checkpoint(tmp_path / "run", model=loaded) is None
    assert loaded["tag"] == "again" and torch.equal(loaded["weight"], state["weight"])
    bad = {"object": object()} if dist.get_rank() == 1 else state
    assert_says(error_message(lambda: trainer.save_checkpoint(tmp_path / "run", "bad", bad)), "object")
    own_disk = tmp_path / f"host_{dist.get_rank()}"
    assert_says(error_message(lambda: trainer.save_checkpoint(own_disk, "tag", {}, {}, zero1_optimizer=True)), "share")
    assert not trainer.has_checkpoint(own_disk)
    if dist.get_rank() == 0:
        for marker in ("manifest.json", "done"):
            (tmp_path / "run" / "best" / marker).unlink()
    trainer.finalize_checkpoint()
    trainer.load_checkpoint(tmp_path / "run", model=loaded)
    assert loaded["tag"] == "step_10"
    message = error_message(lambda: trainer.load_checkpoint(tmp_path / "run", "bad", loaded))
    assert_says(message, "no complete checkpoint", "'bad'", "step_10")
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    sharded = NeuronZero1Optimizer([nn.Parameter(torch.zeros(2))], torch.optim.SGD, lr=1.0)
    trainer.save_checkpoint(tmp_path / "run", "zero1", None, sharded)
    message = error_message(lambda: trainer.load_checkpoint(tmp_path / "run", "zero1", None, plain))
    assert_says(message, "ZeRO-1", "SGD has neither", "optimizer_config")


class Counted(nn.Linear):
    runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x)


class Stack(nn.Module):
    _no_split_modules = ("Mlp",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(sequence_parallel=False) for _ in range(2)])
        self.first = Counted(HIDDEN, HIDDEN, bias=False)
        self.second = Counted(HIDDEN, HIDDEN, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.arange(HIDDEN, dtype=torch.float32), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.second(self.first(x * self.scale))


def initialize(module: nn.Module, device: torch.device) -> None:
    assert device.type == "cpu"
    if isinstance(module, nn.Linear | layers.ColumnParallelLinear | layers.RowParallelLinear):
        for param in module.parameters(recurse=False):
            param.fill_(0.5)


@distributed(world_size=2)
def test_meta_construction_keeps_ties_shards_and_buffers():
    options = {"meta_device_init": True, "param_init_fn": initialize, "sequential_move_factor": 1}
    model = trainer.initialize_parallel_model(config(model_init_config=options), Stack).module
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.first.weight is model.second.weight and model.first.weight.eq(0.5).all()
    assert model.scale.tolist() == list(range(HIDDEN))
    weight = model.layers[0].up.weight
    assert weight.shape == (FEED_FORWARD // 2, HIDDEN) and weight.eq(0.5).all()
    assert weight.tensor_model_parallel and weight.full_shape == (FEED_FORWARD, HIDDEN)
    assert "register_on_meta" not in nn.Module.register_parameter.__qualname__


@distributed(world_size=2)
@pytest.mark.parametrize(("choice", "linear_runs"), [("full", 1), ([Mlp, Counted], 2)])
def test_activation_checkpointing_recomputes_and_keeps_names(choice, linear_runs):
    """Same gradients bit for bit, the chosen modules run twice, and no name changes."""

    def train_once(activation_checkpoint_config) -> tuple[Stack, list[int]]:
        torch.manual_seed(5)
        nxd_config = config(activation_checkpoint_config=activation_checkpoint_config)
        model = trainer.initialize_parallel_model(nxd_config, Stack).module
        inside: list[int] = []
        for layer in model.layers:
            layer.up.register_forward_hook(lambda *_: inside.append(1))
        model(tensors(SEQUENCE, 2, HIDDEN, dtype=torch.float32)).square().sum().backward()
        return model, inside

    plain, once = train_once(None)
    again, twice = train_once(choice)
    assert (len(once), len(twice)) == (2, 4)
    assert (plain.first.runs, again.first.runs) == (1, linear_runs)
    assert list(again.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in again.named_modules()] == [name for name, _ in plain.named_modules()]
    for want, param in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(param.grad, want.grad)


@distributed(world_size=4)
def test_batch_of_a_context_parallel_rank():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
    rank = parallel_state.get_context_model_parallel_rank()
    tokens = torch.arange(12).view(2, 6)
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": None, "length": torch.ones(2, 1)}
    chunk = trainer.get_batch_on_this_context_parallel_rank(batch)
    assert torch.equal(chunk["input_ids"], tokens[:, 3 * rank : 3 * rank + 3])
    shifted = torch.tensor([[1, 2, 3, 4, 5, -100], [7, 8, 9, 10, 11, -100]])
    assert torch.equal(chunk["labels"], shifted[:, 3 * rank : 3 * rank + 3])
    assert chunk["attention_mask"] is None and chunk["length"] is batch["length"]
    odd = {"input_ids": torch.zeros(2, 5)}
    message = error_message(lambda: trainer.get_batch_on_this_context_parallel_rank(odd))
    assert_says(message, "input_ids 5", "context_parallel_size 2")
    message = error_message(lambda: NeuronZero1Optimizer([nn.Parameter(torch.zeros(2))], torch.optim.SGD, lr=1.0))
    assert_says(message, "context_parallel_size 2")


@distributed(world_size=2)
def test_masters_without_zero1_are_whole(tmp_path):
    """use_master_weights without ZeRO-1: whole fp32 masters on every data-parallel rank, one file."""
    nxd_config = trainer.neuronx_distributed_config(mixed_precision_config={"use_master_weights": True})
    assert nxd_config["mixed_precision_config"]["use_master_weights_in_ckpt"]
    param = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))
    optimizer = trainer.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, [param], lr=1e-4)
    param.grad = torch.full((3, 5), float(1 + dist.get_rank()), dtype=torch.bfloat16)
    optimizer.step()
    master = optimizer.optimizer.base_optimizer.param_groups[0]["params"][0]
    assert master.shape == (3, 5) and master.dtype == torch.float32
    # mean gradient 1.5, norm 1.5 * sqrt(15) = 5.8 clipped to 1
    torch.testing.assert_close(master.detach(), torch.full((3, 5), 1 - 1e-4 / 15**0.5), rtol=1e-6, atol=0)  # fp32
    assert_same_on_all_ranks(master.detach())
    trainer.save_checkpoint(tmp_path, "tag", None, optimizer)
    assert [path.name for path in (tmp_path / "tag" / "optim").iterdir()] == ["dp_rank_00_tp_rank_00_pp_rank_00.pt"]
    assert json.loads((tmp_path / "tag" / "manifest.json").read_text())["number"] == 1


@distributed(world_size=2)
def test_a_replacement_killed_between_its_renames_leaves_the_predecessor(tmp_path):
    """The one checkpoint of a fixed tag; the state of the disk is the one after the first of the two renames."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    trainer.save_checkpoint(tmp_path, "latest", {"weight": torch.ones(2)}, user_content={"step": 1})
    if dist.get_rank() == 0:
        (tmp_path / "latest").rename(tmp_path / ".latest.replaced")
    trainer.finalize_checkpoint()
    assert trainer.has_checkpoint(tmp_path)
    for tag in (None, "latest"):
        assert trainer.load_checkpoint(tmp_path, tag) == {"step": 1}
    trainer.save_checkpoint(tmp_path, "next", {"weight": torch.ones(2)}, user_content={"step": 2}, num_kept_ckpts=2)
    assert trainer.load_checkpoint(tmp_path) == {"step": 2} and trainer.load_checkpoint(tmp_path, "latest")["step"] == 1
    trainer.save_checkpoint(tmp_path, "latest", {"weight": torch.ones(2)}, user_content={"step": 3}, num_kept_ckpts=1)
    assert trainer.load_checkpoint(tmp_path) == {"step": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


@distributed(world_size=2)
def test_experts_and_context_parallel_ranks_are_refused(tmp_path):
    """A file per tensor-parallel rank would lose experts, and no gradient is reduced over context-parallel ranks."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model = nn.Linear(2, 2)
    for function in (
        lambda: trainer.save_checkpoint(tmp_path, "first", model=model),
        lambda: trainer.save_checkpoint(tmp_path, "first", optimizer=torch.optim.SGD(model.parameters())),
        lambda: trainer.load_checkpoint(tmp_path, model=model),
    ):
        assert_says(error_message(function), "would lose experts", "expert_model_parallel_size is 2")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    nxd_config = trainer.neuronx_distributed_config()
    message = error_message(
        lambda: trainer.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=1.0)
    )
    assert_says(message, "context_parallel_size 2")


@distributed(world_size=4)
@pytest.mark.parametrize("zero_one", [False, True])
def test_expert_parallel_steps_equal_transformers(zero_one):
    """T=2 and EP=2: data-parallel ranks with rows of their own against transformers' Mixtral, clipping and SGD."""
    nxd_config = config(expert_parallel_size=2, optimizer_config={"zero_one_enabled": zero_one, "max_grad_norm": 0.5})
    hf_config = mixtral_config()
    dense = hugging_face(hf_config)
    full = full_parameters(dense)
    model = trainer.initialize_parallel_model(nxd_config, parallel_model, False, hf_config, full)
    optimizer = trainer.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, model.parameters(), lr=0.5)
    reference = torch.optim.SGD(dense.parameters(), lr=0.5)
    for _ in range(2):
        rows = [{key: value.roll(shift, 0) for key, value in batch().items()} for shift in range(2)]
        optimizer.zero_grad()
        model(**rows[parallel_state.get_data_parallel_rank()]).loss.backward()
        optimizer.step()
        reference.zero_grad()
        for each in rows:
            (dense(**each).loss / 2).backward()
        nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
        reference.step()
    wanted = dict(dense.named_parameters())
    for name, param in model.named_parameters():
        moved = local_part(name, wanted[name].detach(), hf_config) - local_part(name, full[name], hf_config)
        error = param.detach() - local_part(name, full[name], hf_config) - moved
        assert error.norm() < 1e-4 * moved.norm(), name  # fp32: two steps, measured 2e-6 of the embedding
    message = error_message(lambda: trainer.initialize_parallel_model({**nxd_config, "expert_parallel_size": 1}, Mlp))
    assert_says(message, "expert_parallel_size 1", "expert_model_parallel_size 2", "destroy_model_parallel")


@distributed(world_size=4)
def test_states_of_several_sharding_groups_are_loaded(tmp_path):
    """Every rank has written a file, and two have the same shard; resumed with those groups, and with one of all."""
    nxd_config = trainer.neuronx_distributed_config()
    values = []
    for saved, loaded in (([[0, 1], [2, 3]], [[0, 1], [2, 3]]), ([[0, 1], [2, 3]], None), ([[0], [1], [2], [3]], None)):
        found = []
        for groups in (saved, loaded):
            torch.manual_seed(3)
            model = nn.Linear(5, 3)
            optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, sharding_groups=groups, lr=0.1)
            if found:
                trainer.load_checkpoint(tmp_path, str(len(values)), model=model, optimizer=optimizer)
            else:
                train_once(model, optimizer)
                trainer.save_checkpoint(tmp_path, str(len(values)), model=model, optimizer=optimizer)
            train_once(model, optimizer)
            found.append(model.weight.detach().clone())
        torch.testing.assert_close(*found, rtol=1e-6, atol=0)  # fp32: the norm is summed in another order
        values.append(found)
    assert nxd_config["tensor_parallel_size"] == 1


def train_once(model, optimizer):
    optimizer.zero_grad()
    for number, param in enumerate(model.parameters()):
        param.grad = torch.linspace(-1, 1, param.numel()).view(param.shape) + number
    optimizer.step()
