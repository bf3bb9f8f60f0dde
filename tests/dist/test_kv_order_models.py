"""Models whose KV heads have replicas, on trn1's ranks: against transformers, one process, and their own files."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from nxd_memopt.checkpoint import (
    TrainingState,
    load_pretrained,
    load_training_state,
    save_pretrained,
    save_training_state,
)
from nxd_memopt.config import ParallelConfig
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.modules import qkv_linear
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.parallel_layers.utils import shard_ranges
from nxd_memopt.trainer import load_checkpoint, save_checkpoint
from tests.dist.pool import SEED, distributed
from tests.dist.test_models import TOLERANCE, check_against_hugging_face
from tests.reference import (
    assert_says,
    error_message,
    fake_world,
    from_all_ranks,
    laid_out_as,
    relative_error,
)
from tests.reference_models import (
    batch,
    full_parameters,
    gathered,
    hugging_face,
    llama_config,
    local_part,
    parallel_model,
)


def initialize(size: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


@distributed(world_size=4)
@pytest.mark.parametrize("biases", [False, True])
def test_llama_equals_transformers_on_trn1(biases):
    """Loss, logits and every gradient; with 2 KV heads, and with 1, whose replicas fill the group."""
    with laid_out_as("trn1"):
        initialize(4)
        for kv_heads, sequence_parallel in ((2, False), (2, True), (1, True)):
            config = llama_config(num_key_value_heads=kv_heads, attention_bias=biases, intermediate_size=48)
            check_against_hugging_face(config, batch(length=16), sequence_parallel=sequence_parallel)


def all_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: gathered(param, param) for name, param in model.named_parameters()}


@distributed(world_size=4)
@pytest.mark.parametrize("order", ["trn1", "trn2"])
def test_initial_full_weights_are_those_of_one_process(order):
    def build_model(size: int, **options: object) -> LlamaForCausalLM:
        initialize(size)
        torch.manual_seed(SEED)
        model_parallel_manual_seed(SEED)
        return LlamaForCausalLM(llama_config(), parallel=ParallelConfig(size, **options))

    with laid_out_as(order):
        want = full_parameters(build_model(1))
        parallel_state.destroy_model_parallel()
        got = all_parameters(build_model(4))
        for name, full in want.items():
            assert torch.equal(got[name], full), name
        parallel_state.destroy_model_parallel()
        model = build_model(4, use_cpu_initialization=False)  # each rank's own stream: replicas start alike
        key = model.model.layers[0].self_attn.k_proj.weight
        everyone = from_all_ranks(key)
        alike = [torch.equal(each, key) for each in everyone]
        assert alike == [shard_ranges(key, rank=rank) == shard_ranges(key) for rank in range(4)]


@distributed(world_size=4)
def test_hugging_face_directory_comes_back_bit_for_bit(tmp_path):
    reference = hugging_face(llama_config(attention_bias=True))
    if dist.get_rank() == 0:
        reference.save_pretrained(tmp_path / "in")
    dist.barrier()
    with laid_out_as("trn1"):
        initialize(4)
        model = parallel_model(llama_config(attention_bias=True))
        load_pretrained(model, tmp_path / "in")
        # bit-equal files alone would not show heads whose output columns are on other ranks
        for name, full in full_parameters(reference).items():
            assert torch.equal(model.get_parameter(name), local_part(name, full, model.config)), name
        loss, want = model(**batch()).loss, reference(**batch()).loss
        assert relative_error(loss, want) < TOLERANCE
        save_pretrained(model, tmp_path / "out")
    stored, written = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert stored.keys() == written.keys()
    for name, tensor in stored.items():
        assert torch.equal(written[name], tensor), name


@distributed(world_size=4)
def test_rank_files_of_another_order_are_refused(tmp_path):
    """Shapes agree, so nothing else would notice."""
    for wrote, resumes in itertools.product(("trn1", "trn2"), repeat=2):
        directory = tmp_path / f"{wrote} {resumes}"
        with laid_out_as(wrote):
            initialize(4)
            save_checkpoint(directory, "tag", parallel_model(llama_config()).state_dict())
            parallel_state.destroy_model_parallel()
        with laid_out_as(resumes):
            initialize(4)
            model = parallel_model(llama_config())
            if wrote == resumes:
                load_checkpoint(directory, "tag", model)
            else:
                message = error_message(lambda at=directory, model=model: load_checkpoint(at, "tag", model))
                apart = (2, 1) if wrote == "trn1" else (1, 2)
                assert_says(message, f"ranks {apart[0]} apart", f"{apart[1]} apart", "save_pretrained")
            parallel_state.destroy_model_parallel()


@distributed(world_size=4)
@pytest.mark.parametrize(("wrote", "resumes"), [("trn1", "trn2"), ("trn2", "trn1")])
def test_training_checkpoints_do_not_depend_on_the_order(wrote, resumes, tmp_path):
    """Parameters and, by a step after the resumption, optimizer states."""
    exports = []

    def train_and_export(model, optimizer, name):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        save_pretrained(model, tmp_path / name)
        exports.append(load_file(tmp_path / name / "model.safetensors"))

    def build(seed):
        initialize(4)
        torch.manual_seed(seed)
        model = parallel_model(llama_config())
        return model, NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.01)

    with laid_out_as(wrote):
        model, optimizer = build(1)
        train_and_export(model, optimizer, "first")
        save_training_state(tmp_path / "run", 1, state=TrainingState(model, optimizer), config={})
        train_and_export(model, optimizer, "straight")
        parallel_state.destroy_model_parallel()
    with laid_out_as(resumes):
        model, optimizer = build(2)
        load_training_state(tmp_path / "run", state=TrainingState(model, optimizer), config={})
        save_pretrained(model, tmp_path / "loaded")
        first, loaded = exports[0], load_file(tmp_path / "loaded" / "model.safetensors")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in first.items())
        train_and_export(model, optimizer, "resumed")
    for name, tensor in exports[1].items():
        assert relative_error(exports[2][name], tensor) < TOLERANCE, name


@pytest.mark.parametrize("rank", [0, 9, 31])
def test_llama_3_8b_on_32_ranks(rank, monkeypatch):
    """neuronx-distributed's recipe: 32 query heads, 8 KV heads, ``--kv_replicator 4``; rank r has KV head r mod 8."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    with fake_world(32, rank=rank):
        initialize(32)
        config = llama_config(num_attention_heads=32, num_key_value_heads=8, hidden_size=64, intermediate_size=32)
        attention = LlamaForCausalLM(config, device="meta").model.layers[0].self_attn
        query, kv = {0: (0, 0), 9: (5, 1), 31: (31, 7)}[rank]  # rank 9: the second query head of KV head 1
        heads = {"q_proj": query, "k_proj": kv, "v_proj": kv, "o_proj": query}
        for name, head in heads.items():
            assert shard_ranges(getattr(attention, name).weight) == [(2 * head, 2 * head + 2)], name
        fused = qkv_linear.GQAQKVColumnParallelLinear(
            64, [64, 16], kv_size_multiplier=4, fuse_qkv=True, gather_output=False, bias=False, device="meta"
        )
        starts = [start for start, _ in shard_ranges(fused.weight_qkv)]
        assert starts == [2 * query, 64 + 2 * kv, 64 + 16 + 2 * kv]
        assert parallel_state.get_kv_shared_group(4, as_list=True)[1] == [1, 9, 17, 25]
