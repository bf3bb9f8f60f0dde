"""Checkpoints over real ranks: slicing and gathering are inverse, failures reach every rank, resume is exact."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from nxd_memopt.checkpoint import (
    TrainingState,
    find_latest,
    gather_full_tensor,
    load_config,
    load_pretrained,
    load_training_state,
    local_slice,
    require_writable,
    save_pretrained,
    save_training_state,
)
from nxd_memopt.config import ParallelConfig
from nxd_memopt.models.gpt_neox import GPTNeoXForCausalLM
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.models.phi3 import Phi3ForCausalLM
from nxd_memopt.parallel_layers import checkpointing, coordination, parallel_state, resharding
from nxd_memopt.parallel_layers.utils import padded_size, set_tensor_model_parallel_attributes
from tests.checkpoint_models import assert_same, build, llama_config, neox_config
from tests.dist.pool import distributed
from tests.reference_models import phi3_config

FULL = {
    "embed.weight": ((10, 3), 0, 1),  # padded: 10 rows over 4 ranks
    "qkv.weight": ((24, 3), 0, 3),  # three blocks of 8 rows
    "kv.weight": ((6, 3), 0, 1),  # two shards, each on T/2 ranks
    "row.weight": ((3, 8), 1, 1),
    "norm.weight": ((3,), None, 1),
}


def initialize(size):
    if dist.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


def add_parameters(model: nn.Module, table, **options):
    """Give ``model`` this rank's shard of each parameter of ``table``, without values."""
    size = parallel_state.get_tensor_model_parallel_size()
    for name, (shape, dim, stride) in table.items():
        replicas = max(size // 2, 1) if name == "kv.weight" else 1
        local = list(shape)
        if dim is not None:
            local[dim] = padded_size(shape[dim], size // replicas) // (size // replicas)
        module = nn.Module()
        module.weight = nn.Parameter(torch.full(local, torch.nan, **options))
        if dim is not None:
            set_tensor_model_parallel_attributes(module.weight, True, dim, stride, full_shape=shape, replicas=replicas)
        model.add_module(name.removesuffix(".weight"), module)


class Sharded(nn.Module):
    """Bare parameters, one of every kind of shard; ``head`` is tied to ``embed``."""

    def __init__(self, device="cpu", dtype=torch.float32):
        super().__init__()
        add_parameters(self, FULL, device=device, dtype=dtype)
        self.norm.weight.sequence_parallel_enabled = True
        self.lm_head = nn.Module()
        self.lm_head.weight = self.embed.weight
        self.config = LlamaConfig(vocab_size=10, tie_word_embeddings=True)


def full_tensors():
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _, _) in FULL.items()}


def write_weights(directory):
    """Rank 0 writes; returns when the file is complete."""
    with coordination.raise_together("writing the test's weights"):
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_file(full_tensors(), Path(directory) / "model.safetensors")
    return full_tensors()


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_then_gather_gives_back_the_full_tensors(world_size, device, tmp_path):
    initialize(world_size)
    full = write_weights(tmp_path)
    model = Sharded(device)
    load_pretrained(model, tmp_path)
    assert model.lm_head.weight is model.embed.weight
    assert model.norm.weight.sequence_parallel_enabled
    rank = dist.get_rank()
    rows = model.embed.weight.shape[0]
    mine = torch.cat([full["embed.weight"], torch.zeros(padded_size(10, world_size) - 10, 3)])
    assert torch.equal(model.embed.weight, mine[rank * rows : (rank + 1) * rows])
    blocks = [block.chunk(world_size)[rank] for block in full["qkv.weight"].chunk(3)]
    assert torch.equal(model.qkv.weight, torch.cat(blocks))
    if world_size > 1:
        assert torch.equal(model.kv.weight, full["kv.weight"].chunk(2)[rank * 2 // world_size])
    for name, expected in full.items():
        gathered = gather_full_tensor(model.get_parameter(name))
        assert (gathered is None) == (rank != 0)
        assert gathered is None or torch.equal(gathered, expected)


@distributed(world_size=4)
def test_local_slice_reads_no_more_than_the_shard(tmp_path):
    initialize(4)
    read = []

    class Recorder:
        def get_shape(self):
            return [24, 3]

        def __getitem__(self, index):
            read.append(index)
            return torch.zeros(24, 3)[index]

    local_slice(Recorder(), Sharded().qkv.weight)
    rank = dist.get_rank()
    assert read == [(slice(8 * i + 2 * rank, 8 * i + 2 * rank + 2),) for i in range(3)]


@distributed(world_size=4)
@pytest.mark.parametrize("size", [2, 4])
def test_export_is_the_same_for_every_split(size, tmp_path):
    initialize(size)
    full = write_weights(tmp_path)
    model = Sharded()
    load_pretrained(model, tmp_path)
    save_pretrained(model, tmp_path / "out", max_shard_size_bytes=300)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3  # 120, 288, 72, 96, 12 bytes
    stored = {}
    for name in set(index["weight_map"].values()):
        stored.update(load_file(tmp_path / "out" / name))
    assert stored.keys() == full.keys() == index["weight_map"].keys()
    assert all(torch.equal(stored[name], full[name]) for name in full)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in full.values())


@distributed(world_size=2)
def test_export_failure_raises_on_all_and_keeps_the_previous_export(tmp_path):
    initialize(2)
    write_weights(tmp_path)
    model = Sharded()
    load_pretrained(model, tmp_path)
    out = tmp_path / "out"
    save_pretrained(model, out)
    model.config = SimpleNamespace(tie_word_embeddings=True)  # the config is written last, and this one cannot be
    with pytest.raises((ValueError, AttributeError), match="architectures"):
        save_pretrained(model, out)
    dist.barrier()
    assert torch.equal(load_file(out / "model.safetensors")["kv.weight"], full_tensors()["kv.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "out"]


@distributed(world_size=4)
def test_nxd_save_and_load(tmp_path):
    initialize(2)
    model = Sharded()
    nn.init.uniform_(model.qkv.weight)
    torch.distributed.broadcast(
        model.qkv.weight.data,
        parallel_state.get_data_parallel_src_rank(),
        group=parallel_state.get_data_parallel_group(),
    )
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpointing.save({"model": model.state_dict(), "step": 3}, tmp_path, save_serially=False)
    other = Sharded()
    assert checkpointing.load(tmp_path, other)["step"] == 3
    assert torch.equal(other.qkv.weight, saved["qkv.weight"])
    names = [f"tp_rank_0{rank}_pp_rank_00/checkpoint.pt" for rank in range(2)]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == names


@distributed(world_size=2)
def test_nxd_load_of_a_full_state_dict(tmp_path):
    initialize(2)
    full, path = full_tensors(), tmp_path / "full.pt"
    with coordination.raise_together("writing"):
        if dist.get_rank() == 0:
            torch.save({"model": {**full, "lm_head.weight": full["embed.weight"]}}, path)
    model = Sharded()
    checkpointing.load(path, model, sharded=False)
    rank = dist.get_rank()
    assert torch.equal(model.row.weight, full["row.weight"].chunk(2, dim=1)[rank])
    assert torch.equal(model.embed.weight, full["embed.weight"].chunk(2)[rank])


@distributed(world_size=2)
def test_shard_described_without_full_shape_is_unpadded(tmp_path):
    initialize(2)
    param = torch.zeros(3, 2)
    set_tensor_model_parallel_attributes(param, True, 0)
    full = torch.arange(12.0).view(6, 2)
    resharding.require_full_shape("param", full, param)
    assert torch.equal(local_slice(full, param), full.chunk(2)[dist.get_rank()])


class Weights(nn.Module):
    """A parameter that is not sharded, so that all ranks hold the same."""

    def __init__(self, value=0.0):
        super().__init__()
        self.x = nn.Parameter(torch.full((3,), float(value)))


@distributed(world_size=2)
def test_training_state_of_each_rank_comes_back(tmp_path):
    initialize(2)
    rank = dist.get_rank()
    for step in (1, 2, 3):
        own = {
            "stream": torch.full((2,), float(10 * rank + step)),
            "position": (step * rank, math.inf, b"x", {3: None}),
        }
        state = TrainingState(Weights(step), shared={"epoch": step}, per_rank=own)
        save_training_state(tmp_path, step, state=state, config={"seed": 5})
    assert find_latest(tmp_path) == tmp_path / "step_00000003"
    model = Weights()
    restored = load_training_state(tmp_path, state=TrainingState(model), config={"seed": 5})
    assert restored.step == 3 and restored.shared == {"epoch": 3} and model.x[0] == 3
    assert restored.per_rank["position"] == (3 * rank, math.inf, b"x", {3: None})
    assert torch.equal(restored.per_rank["stream"], torch.full((2,), 10.0 * rank + 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


@distributed(world_size=2)
def test_training_failures_reach_every_rank(tmp_path):
    initialize(2)
    state = TrainingState(Sharded())
    nn.init.zeros_(state.model.qkv.weight)
    save_training_state(tmp_path, 1, state=state, config={"seed": 5})
    with pytest.raises(ValueError, match="seed was 5 and is 6"):
        load_training_state(tmp_path, state=state, config={"seed": 6})
    path = tmp_path / "step_00000001" / "rank_00001.safetensors"
    dist.barrier()
    size_bytes = path.stat().st_size
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_bytes(path.read_bytes()[:100])
    dist.barrier()
    expected = rf"rank_00001.safetensors has 100 bytes and its index says {size_bytes}: .*delete .*step_00000001"
    with pytest.raises(ValueError, match=expected):
        load_training_state(tmp_path, state=state, config={"seed": 5})
    bad = TrainingState(state.model, per_rank={"x": torch.zeros(3) if dist.get_rank() == 0 else object()})
    with pytest.raises(ValueError, match=r"per_rank\['x'\] has the type object"):
        save_training_state(tmp_path, 2, state=bad, config={"seed": 5})
    with pytest.raises(ValueError, match="not writable"):
        require_writable(path)


MODELS = {
    "llama": (LlamaForCausalLM, lambda **changes: llama_config(num_attention_heads=8, vocab_size=51, **changes)),
    "gpt_neox": (GPTNeoXForCausalLM, lambda **changes: neox_config(vocab_size=51, **changes)),
    "phi3": (Phi3ForCausalLM, phi3_config),
}


@distributed(world_size=[2, 4])
@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("gpt_neox", True), ("phi3", False)])
def test_model_has_transformers_loss_and_is_exported_unchanged(world_size, architecture, tied, tmp_path):
    model_class, make_config = MODELS[architecture]
    initialize(world_size)
    reference = build(make_config(tie_word_embeddings=tied)).double()
    with coordination.raise_together("writing the reference"):
        if dist.get_rank() == 0:
            reference.save_pretrained(tmp_path / "in")
    parallel = ParallelConfig(tensor_model_parallel_size=world_size, sequence_parallel_enabled=True)
    model = model_class(load_config(tmp_path / "in"), parallel=parallel, dtype=torch.float64, device="meta")
    load_pretrained(model, tmp_path / "in")
    ids = torch.randint(51, (2, 16), generator=torch.Generator().manual_seed(0))
    expected, loss = reference(ids, labels=ids).loss, model(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, check_dtype=False)  # transformers' loss is fp32
    save_pretrained(model, tmp_path / "out", max_shard_size_bytes=10_000)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert_same(again, reference)
