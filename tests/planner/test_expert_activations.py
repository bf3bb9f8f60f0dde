"""The planned storages of experts under the options of their layers equal those that exist, as integers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nxd_memopt.architectures.experts import options_of
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models import model_class
from nxd_memopt.modules.moe import router
from nxd_memopt.modules.moe.gpt_neox_config import GPTNeoXMoEConfig
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.planner.memory.activations import activations
from nxd_memopt.planner.memory.layer_tensors import Kernels
from tests.dist.pool import distributed
from tests.planner.storages import LENGTH, ROWS, counted_bytes, sizes_of
from tests.reference_models import batch, gpt_neox_config, mixtral_config, qwen2_moe_config

ROUTERS = {
    "no loss": {},
    "jitter": {"moe_input_jitter_eps": 0.1},
    "fp32": {"moe_router_dtype": "fp32"},
    "fp64": {"moe_router_dtype": "fp64"},
    "jitter in fp32": {"moe_input_jitter_eps": 0.1, "moe_router_dtype": "fp32"},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "bias": {"moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 1e-3},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "z-loss": {"moe_z_loss_coeff": 0.1},
    **{
        f"{kind} in {dtype}": {
            "moe_router_load_balancing_type": kind,
            "moe_aux_loss_coeff": 0.1,
            "moe_router_dtype": dtype,
        }
        for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss", "hf_aux_loss")
        for dtype in (None, "fp64")
    },
}
DISPATCH = {
    "all rows": {},
    "blocks": {"moe_expert_block_size": 8},
    "capacity": {"moe_expert_capacity_factor": 0.5},
    "ample capacity": {"moe_expert_capacity_factor": 1.5},
    "padded": {"moe_expert_capacity_factor": 0.6, "moe_pad_expert_input_to_capacity": True},
}
SENT = {"moe_token_dispatcher_type": "alltoall"}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}


@pytest.fixture(autouse=True)
def balanced_routing(monkeypatch):
    """Plans assume it: without it the rows of a rank, and what a capacity drops, depend on the weights."""
    balance(monkeypatch.setattr)


def balance(setattr):
    choose = router.choose_experts

    def choose_evenly(logits, moe, **options):
        weights, experts = choose(logits, moe, **options)
        order = torch.arange(experts.numel()).view(experts.shape)
        return weights, order % moe.num_moe_experts

    setattr(router, "choose_experts", choose_evenly)


SHARED = {
    "shared expert": (mixtral_config, {"shared_expert_intermediate_size": 20}),
    "shared expert with a gate": (mixtral_config, {"shared_expert_intermediate_size": 20, "shared_expert_gate": True}),
    "shared expert of Qwen2-MoE, ReLU": (
        qwen2_moe_config,
        {"hidden_act": "relu", "mlp_only_layers": [], "output_router_logits": False},
    ),
}


def neox_moe_config(**changes):
    """GPT-NeoX with experts, the layer's second norm on the stream after attention."""
    dense = gpt_neox_config().to_dict()
    del dense["model_type"]
    return GPTNeoXMoEConfig(**dense | {"num_local_experts": 4} | changes)


NEOX = {
    "GPT-NeoX": (neox_moe_config, {}),
    "GPT-NeoX, sequential residual, dropout": (
        neox_moe_config,
        {"use_parallel_residual": False, "hidden_dropout": 0.1},
    ),
    "GPT-NeoX, ReLU, shared expert": (
        neox_moe_config,
        {"hidden_act": "relu", "shared_expert_intermediate_size": 12},
    ),
    "GPT-NeoX, shared expert with a gate": (
        neox_moe_config,
        {"shared_expert_intermediate_size": 12, "shared_expert_gate": True},
    ),
}


def check(options, dtype, parallel, memory, config=None):
    config = config or mixtral_config(output_router_logits=False)
    moe = dataclasses.replace(options_of(config), **options)
    memory = MemoryConfig(attention_backend="sdpa", **memory)
    net = model_class(config.model_type)(config, parallel=parallel, memory=memory, dtype=dtype, moe=moe)
    inputs = batch(rows=ROWS, length=LENGTH)
    net(**inputs).loss.backward()
    counted, listed = counted_bytes(net, inputs)
    name = str(dtype).removeprefix("torch.")
    sizes = sizes_of(config, parallel, LENGTH, ROWS, name, moe=moe)
    plan = activations(sizes, memory, Kernels(fused=False, attention="sdpa"))
    assert plan.device_bytes == counted, "\n".join([str(options), str(plan), *listed])


@pytest.mark.parametrize("name", [*ROUTERS, *DISPATCH])
def test_storages_of_every_option(name):
    check((ROUTERS | DISPATCH)[name], torch.bfloat16, ParallelConfig(1), {})


@pytest.mark.parametrize("name", ["no loss", "fp32", "fp64", "jitter in fp32", "blocks"])
def test_storages_of_options_in_fp32(name):
    check((ROUTERS | DISPATCH)[name], torch.float32, ParallelConfig(1), {})


@pytest.mark.parametrize("memory", [RECOMPUTED, {"recompute_granularity": "full"}], ids=["moe", "full"])
@pytest.mark.parametrize("name", ["aux_loss in None", "seq_aux_loss in fp64", "jitter", "blocks", "capacity"])
def test_storages_of_options_under_recompute(name, memory):
    check((ROUTERS | DISPATCH)[name], torch.bfloat16, ParallelConfig(1), memory)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
@distributed(world_size=2)
def test_storages_of_options_on_a_tensor_parallel_rank(world_size, sequence_parallel):
    with pytest.MonkeyPatch.context() as patch:
        balance(patch.setattr)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
        model_parallel_manual_seed(7)
        parallel = ParallelConfig(world_size, sequence_parallel_enabled=sequence_parallel)
        for options in (ROUTERS | DISPATCH).values():
            check(options, torch.bfloat16, parallel, {})


@pytest.mark.parametrize("sent", [pytest.param(False, marks=pytest.mark.slow), True])
@distributed(world_size=2, slow=[4])
def test_storages_of_an_expert_parallel_rank(world_size, sent):
    with pytest.MonkeyPatch.context() as patch:
        balance(patch.setattr)
        parallel_state.initialize_model_parallel(expert_model_parallel_size=world_size)
        parallel = ParallelConfig(1, expert_model_parallel_size=world_size)
        for name, options in DISPATCH.items():
            if sent and name == "blocks":
                continue
            for memory in ({}, RECOMPUTED):
                check(options | (SENT if sent else {}), torch.bfloat16, parallel, memory)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] * (form not in ("all rows", "padded"))) for form in DISPATCH]
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*SHARED, *NEOX])
def test_storages_of_shared_and_of_biased_experts(name, dtype, form):
    config, changes = (SHARED | NEOX)[name]
    check(DISPATCH[form], dtype, ParallelConfig(1), {}, config(**changes))


@pytest.mark.parametrize("memory", [RECOMPUTED, {"recompute_granularity": "full"}], ids=["moe", "full"])
@pytest.mark.parametrize("name", [*SHARED, *NEOX])
def test_storages_of_shared_and_of_biased_experts_under_recompute(name, memory):
    config, changes = (SHARED | NEOX)[name]
    check({"moe_router_dtype": "fp32"}, torch.bfloat16, ParallelConfig(1), memory, config(**changes))


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
@distributed(world_size=2, slow=[4])
def test_storages_of_shared_and_of_biased_experts_on_ranks(world_size, sequence_parallel):
    """T = 2, with two expert-parallel ranks in the larger world."""
    with pytest.MonkeyPatch.context() as patch:
        balance(patch.setattr)
        experts = world_size // 2
        parallel_state.initialize_model_parallel(2, expert_model_parallel_size=experts)
        model_parallel_manual_seed(7)
        parallel = ParallelConfig(2, sequence_parallel_enabled=sequence_parallel, expert_model_parallel_size=experts)
        for config, changes in (SHARED | NEOX).values():
            for form in ("all rows", "padded", "blocks"):
                check(DISPATCH[form], torch.bfloat16, parallel, {}, config(**changes))
