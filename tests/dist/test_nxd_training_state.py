"""A run of neuronx-distributed's LLaMA sample continues with this library's model: weights and ZeRO-1 states."""

from __future__ import annotations

import zlib

import pytest
import torch
import torch.distributed as dist

from nxd_memopt import trainer
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from tests.checkpoint_models import llama_config
from tests.dist.pool import distributed
from tests.dist.test_nxd_checkpoint import STATES, optimizer_file
from tests.nxd_fixtures import rank_name, write_tag
from tests.reference import assert_says, error_message, shard, tensors


def hugging_face_state(config, suffix):
    """Values by Hugging Face name, drawn from the name."""
    hidden, width = config.hidden_size, config.intermediate_size
    kv = config.num_key_value_heads * config.head_dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        for name, rows in {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}.items():
            shapes[f"{layer}.self_attn.{name}.weight"] = (rows, hidden)
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, width)
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}
    return {
        name: tensors(*shape, seed=zlib.crc32(f"{name}{suffix}".encode()), dtype=torch.float32)
        for name, shape in shapes.items()
    }


def sample_state(state, rank, size):
    """One rank's parameters of NxD's LLaMA sample, in its order: separate projections, gate and up joined."""
    mine = {}
    for name, value in state.items():
        if "gate_proj" in name:
            pair = (value, state[name.replace("gate", "up")])
            mine[name.replace("gate", "gate_up")] = torch.cat([part.chunk(size)[rank] for part in pair])
        elif "up_proj" not in name:
            dim = 1 if "o_proj" in name or "down_proj" in name else 0
            mine[name] = value.clone() if "norm" in name else value.chunk(size, dim)[rank].clone()
    return mine


def write_sample(directory, config, size, data_size, stages):
    """The samples' parameter groups: matrices, then norms; stages as NxD's model divides two layers."""
    files = {}
    for rank in range(size):
        by_key = {key: sample_state(hugging_face_state(config, key), rank, size) for key in ("", "master", *STATES)}
        for stage in range(stages):
            mine = [name for name in by_key[""] if stages == 1 or (stage == 0) == ("embed" in name or ".0." in name)]
            files[f"model/{rank_name(rank, stage)}"] = {name: by_key["master"][name] for name in mine}
            groups = [[n for n in mine if "norm" not in n], [n for n in mine if "norm" in n]]
            for data_rank in range(data_size):
                state = optimizer_file(lambda name, key: by_key[key][name], groups, data_rank, data_size)  # noqa: B023
                files[f"optim/{rank_name(rank, stage, data_rank)}"] = state
    write_tag(directory, "theirs", files)


@distributed(world_size=[2, 4])
@pytest.mark.parametrize(("size", "data_size", "stages"), [(2, 2, 1), (1, 3, 2), (4, 1, 1)])
def test_a_samples_run_continues_with_our_model(size, data_size, stages, tmp_path):
    """Weights, masters, moments and steps, by Hugging Face name, at T=2; the model's own order of parameters."""
    config = llama_config(num_key_value_heads=4, tie_word_embeddings=False)
    if dist.get_rank() == 0:
        write_sample(tmp_path, config, size, data_size, stages)
    dist.barrier()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = LlamaForCausalLM(config)
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.125)
    report = trainer.load_nxd_training_state(tmp_path / "theirs", model, optimizer)
    assert sum("options of parameter group" in line for line in report) == 2
    wanted = {key: hugging_face_state(config, key) for key in ("master", *STATES)}
    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    shards = [param for group in optimizer.base_optimizer.param_groups for param in group["params"]]
    for (name, param), master in zip(model.named_parameters(), shards, strict=True):
        dim = None if "norm" in name else int("o_proj" in name or "down_proj" in name)
        state = optimizer.base_optimizer.state[master]
        assert state["step"].item() == 3
        for key, value in (("master", master.detach()), *((key, state[key]) for key in STATES)):
            full_value = wanted[key][name]
            mine = full_value if dim is None else shard(full_value, dim, size=2, rank=dist.get_rank() % 2)
            if key == "master":
                assert torch.equal(param.detach(), mine), name
            flat = mine.reshape(-1)
            flat = torch.cat([flat, flat.new_zeros(-flat.numel() % data_size)]).chunk(data_size)[data_rank]
            assert torch.equal(value.reshape(-1), flat), (name, key)
    assert optimizer.param_groups[0]["lr"] == 0.125
    message = error_message(
        lambda: trainer.load_nxd_training_state(tmp_path / "theirs", model, optimizer, group_of=lambda name: 0)
    )
    assert_says(message, "group 0 of 2", "pass group_of")
