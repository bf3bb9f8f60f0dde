"""Attention by groups of heads against the modules themselves: values, gradients, and what is saved."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.modules.head_groups import attention_by_head_groups
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.planner.techniques.tiling import auto_head_groups, head_group_bytes
from tests.dist.pool import distributed
from tests.host_copies import HostOnly
from tests.reference import assert_says, error_message
from tests.reference_models import (
    BATCH,
    LENGTH,
    batch,
    full_parameters,
    gpt_neox_config,
    hugging_face,
    llama_config,
    loss_and_gradients,
    mistral_config,
    parallel_model,
    qwen3_config,
)

# 8 query heads and 4, 2 or 8 KV heads; at T=4 a KV head of two is on two ranks.
CONFIGS = {
    "grouped": lambda: llama_config(num_attention_heads=8, num_key_value_heads=4, attention_bias=True),
    "replicated": lambda: llama_config(num_attention_heads=8, num_key_value_heads=2),
    "full": lambda: llama_config(num_attention_heads=8, num_key_value_heads=8),
    "qwen3": lambda: qwen3_config(attention_bias=True),
    "mistral": mistral_config,
    "neox": lambda: gpt_neox_config(num_attention_heads=8),
    "neox sequential": lambda: gpt_neox_config(num_attention_heads=8, use_parallel_residual=False),
}
OPTIONS = ({}, {"recompute_granularity": "full"}, {"mlp_tile_tokens": 12})


@distributed(world_size=[1, 2], slow=[4])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_equals_the_modules(name, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    for sequence_parallel in [False, True][: min(world_size, 2)]:
        full = full_parameters(hugging_face(CONFIGS[name]()))
        model = parallel_model(CONFIGS[name](), full, sequence_parallel=sequence_parallel)
        want = loss_and_gradients(model)
        for groups in (1, 2, 4, 8)[: {1: 4, 2: 3, 4: 2}[world_size]]:
            for options in OPTIONS[: 1 if groups != 2 else None]:
                apply_memory(model, MemoryConfig(attention_head_groups=groups, **options))
                for key, value in loss_and_gradients(model).items():
                    # fp32 sums in another order: the bound of docs/numerics.md
                    error = (value - want[key]).norm() / want[key].norm()
                    assert error < 2e-5, f"{key}, {groups} groups, {options}: {error}"
        apply_memory(model, MemoryConfig())
        assert all(torch.equal(value, want[key]) for key, value in loss_and_gradients(model).items())


def attention_calls(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that receives the groups of each attention by groups of heads, forward and recompute."""
    calls: list[int] = []

    def recorded(hidden, rope, mask, layers, num_groups, checkpoint):
        calls.append(num_groups)
        return attention_by_head_groups(hidden, rope, mask, layers, num_groups, checkpoint)

    patch.setattr("nxd_memopt.memory.tiles.attention_by_head_groups", recorded)
    return calls


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("name", ["grouped", "neox"])
def test_groups_chosen_from_free_memory(name, world_size):
    """Heads that fit an eighth of the fullest rank's memory are not divided."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    full = full_parameters(hugging_face(CONFIGS[name]()))
    config = CONFIGS[name]()
    heads = 8 // world_size
    head_dim = config.hidden_size // 8
    kv_heads = max(1, getattr(config, "num_key_value_heads", 8) // world_size)
    # fp32: queries, keys, values, result and their gradients; dQ and two numbers of each head
    per_token = 2 * 2 * (heads + kv_heads) * head_dim * 4 + heads * (head_dim + 2) * 4
    needed = BATCH * LENGTH * per_token
    full_memory = {"recompute_granularity": "full"}
    for sequence_parallel in [False, True][:world_size]:
        for free_bytes, groups in ((8 * needed, 1), (8 * needed - 8, 2), (0, heads)):
            with pytest.MonkeyPatch.context() as patch:
                # Ranks above 0 have more free memory than the fullest one.
                free = free_bytes + parallel_state.get_tensor_model_parallel_rank() * 2**30
                patch.setattr("nxd_memopt.memory.tiles.backend.host_transfers", partial(HostOnly, free))
                calls = attention_calls(patch)
                model = parallel_model(config, full, sequence_parallel=sequence_parallel, **full_memory)
                want = loss_and_gradients(model)
                apply_memory(model, MemoryConfig(**full_memory, attention_head_groups="auto"))
                got = loss_and_gradients(model)
                # forward and recompute of each layer
                assert calls == ([] if groups == 1 else [groups] * config.num_hidden_layers * 2), free_bytes
                for key, value in got.items():
                    if groups == 1:
                        assert torch.equal(value, want[key]) or config.model_type == "gpt_neox", key
                    assert (value - want[key]).norm() < 2e-5 * want[key].norm(), key


def test_numbers_of_groups():
    # LLaMA-3-8B, bf16: 57,600 bytes of a token, 56 GiB at 1,048,576 tokens
    sizes = {"query_size": 4096, "kv_size": 1024, "num_heads": 32, "element_bytes": 2}
    assert head_group_bytes(1, **sizes) == 57600 and head_group_bytes(1, **sizes, num_groups=4) == 14400
    everything = head_group_bytes(1 << 20, **sizes)
    groups = [auto_head_groups(free, [1, 2, 4, 8, 16, 32], everything) for free in (1 << 40, 120 << 30, 0, None)]
    assert groups == [1, 4, 32, 1]
    layers = parallel_model(llama_config(num_attention_heads=8)).recompute_modules()["attn"][0].layers()
    assert layers.group_counts() == [1, 2, 4, 8]


def test_the_input_alone_is_saved():
    model = parallel_model(llama_config(num_attention_heads=8), attention_head_groups=4)
    attention = model.recompute_modules()["attn"][0]
    x = torch.randn(BATCH, LENGTH, 32, requires_grad=True)
    rope = tuple(torch.randn(1, LENGTH, 4) for _ in range(2))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attention(x, rope, None)
    allowed = {x.data_ptr(), *(table.data_ptr() for table in rope), *(p.data_ptr() for p in attention.parameters())}
    assert {tensor.data_ptr() for tensor in kept if tensor.numel()} <= allowed


def test_packed_documents_and_frozen_weights():
    documents = torch.tensor([0, 5, 9, LENGTH])
    ids = batch()["input_ids"][:1]

    def gradients(groups):
        torch.manual_seed(1)
        model = parallel_model(llama_config(num_attention_heads=8, num_key_value_heads=4))
        apply_memory(model, MemoryConfig(attention_head_groups=groups))
        model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
        model(ids, labels=ids, cu_seqlens=documents).loss.backward()
        return [param.grad for param in model.parameters()]

    for a, b in zip(gradients(None), gradients(4), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)  # as above


def test_refusals():
    model = parallel_model(llama_config(num_attention_heads=8, num_key_value_heads=4))
    message = error_message(lambda: apply_memory(model, MemoryConfig(attention_head_groups=3)))
    assert_says(message, "attention_head_groups 3", "8 query heads", "4 KV heads", "divisor of 8")
    some_layers = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    for groups, options, word in (
        (0, {}, "must be"),
        (2, {"recompute_granularity": "selective"}, "['core_attn']"),
        (2, {"recompute_granularity": "full", "recompute_keep_core_attn": True}, "recompute_keep_core_attn"),
        ("auto", {}, "give a number"),
        ("auto", some_layers, "give a number"),
    ):
        assert_says(error_message(partial(MemoryConfig, attention_head_groups=groups, **options)), word)
    two = MemoryConfig(attention_head_groups=2)
    assert_says(error_message(lambda: apply_memory(model, two, compile="layer")), "compile 'layer'", "null")
    apply_memory(model, two)
    handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *args: None)
    assert_says(error_message(lambda: model(**batch())), "attention_head_groups", "ColumnParallelLinear", "remove it")
    handle.remove()
    model.model.layers[0].self_attn.o_proj = torch.nn.Linear(32, 32)
    assert_says(error_message(lambda: model(**batch())), "needs a RowParallelLinear", "Linear")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nxd_memopt.memory.tiles.backend.views_share_memory", False)
        assert_says(error_message(lambda: apply_memory(model, two)), "backend cpu", "leave it out")
