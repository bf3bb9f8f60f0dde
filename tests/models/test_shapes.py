"""Shapes of full-size models at TP = 32 on the meta device: every parameter against a table written by hand."""

from __future__ import annotations

import pytest
from transformers import GPTNeoXConfig, LlamaConfig

from nxd_memopt.config import ParallelConfig
from nxd_memopt.models.gpt_neox import GPTNeoXForCausalLM
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.utils import shard_ranges
from tests.reference import fake_world

SIZE = 32
LLAMA_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
)
NEOX_20B = GPTNeoXConfig(
    hidden_size=6144, intermediate_size=24576, num_hidden_layers=44, num_attention_heads=64, vocab_size=50432
)
# shape on one rank, ranks that hold the same part; heads of 128: 8 KV heads on 32 ranks, four ranks to one
LLAMA_70B_SHAPES = {
    "embed_tokens.weight": ((4008, 8192), 1),
    "q_proj.weight": ((256, 8192), 1),
    "k_proj.weight": ((128, 8192), 4),
    "v_proj.weight": ((128, 8192), 4),
    "o_proj.weight": ((8192, 256), 1),
    "gate_proj.weight": ((896, 8192), 1),
    "up_proj.weight": ((896, 8192), 1),
    "down_proj.weight": ((8192, 896), 1),
    "input_layernorm.weight": ((8192,), SIZE),
    "post_attention_layernorm.weight": ((8192,), SIZE),
    "norm.weight": ((8192,), SIZE),
    "lm_head.weight": ((4008, 8192), 1),
}
NEOX_20B_SHAPES = {
    "embed_in.weight": ((1576, 6144), 1),
    "query_key_value.weight": ((576, 6144), 1),
    "query_key_value.bias": ((576,), 1),
    "dense.weight": ((6144, 192), 1),
    "dense.bias": ((6144,), SIZE),
    "dense_h_to_4h.weight": ((768, 6144), 1),
    "dense_h_to_4h.bias": ((768,), 1),
    "dense_4h_to_h.weight": ((6144, 768), 1),
    "dense_4h_to_h.bias": ((6144,), SIZE),
    "input_layernorm.weight": ((6144,), SIZE),
    "input_layernorm.bias": ((6144,), SIZE),
    "post_attention_layernorm.weight": ((6144,), SIZE),
    "post_attention_layernorm.bias": ((6144,), SIZE),
    "final_layer_norm.weight": ((6144,), SIZE),
    "final_layer_norm.bias": ((6144,), SIZE),
    "lm_head.weight": ((1576, 6144), 1),
}
MODELS = {
    # class, config, shapes, parameters of the whole model as published (70.6 and 20.6 billion)
    "Llama-3-70B": (LlamaForCausalLM, LLAMA_70B, LLAMA_70B_SHAPES, 70_553_706_496),
    "GPT-NeoX-20B": (GPTNeoXForCausalLM, NEOX_20B, NEOX_20B_SHAPES, 20_554_567_680),
}


@pytest.mark.parametrize("rank", [0, 5, 31])
@pytest.mark.parametrize("name", MODELS)
def test_every_local_shape(name, rank):
    cls, config, shapes, published = MODELS[name]
    with fake_world(SIZE, rank):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=SIZE)
        model = cls(config, parallel=ParallelConfig(SIZE, sequence_parallel_enabled=True), device="meta")
        total, seen = 0, set()
        for full_name, param in model.named_parameters():
            key = ".".join(full_name.split(".")[-2:])
            shape, copies = shapes[key]
            assert param.is_meta and tuple(param.shape) == shape, full_name
            total += param.numel() * SIZE // copies
            seen.add(key)
            if copies < SIZE:
                ((start, stop),) = shard_ranges(param)
                length = shape[param.partition_dim]
                assert (start, stop) == (rank // copies * length, (rank // copies + 1) * length), full_name
            assert getattr(param, "sequence_parallel_enabled", False) == (copies == SIZE), full_name
    assert seen == set(shapes) and total == published
