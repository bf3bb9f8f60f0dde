"""Certificates of models with experts: collectives against the formulas, recomputation, refusals."""

from __future__ import annotations

import json

import pytest

from nxd_memopt.certify import worker
from nxd_memopt.certify.command import read
from nxd_memopt.certify.memory_terms import memory_terms
from nxd_memopt.certify.request import Request
from nxd_memopt.config import ParallelConfig
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.planner.sizes.states import StateLayout
from nxd_memopt.planner.timing.collectives import Collective
from tests.certify.test_certify import certificate
from tests.certify_steps import SIZES
from tests.reference import assert_says, error_message

MIXTRAL = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "model_type": "mixtral", "num_local_experts": 4}
QWEN3 = {**SIZES, "hidden_size": 64, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 3}
QWEN3 |= {"head_dim": 8, "moe_intermediate_size": 48, "num_key_value_heads": 4, "norm_topk_prob": True}
MIXTRAL |= {"num_key_value_heads": 4, "num_experts_per_tok": 2, "sliding_window": None}
PADDED = ("moe_expert_capacity_factor=1.5", "moe_pad_expert_input_to_capacity=true")
BLOCKS = ("moe_expert_block_size=16",)
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full"}
EXPERTS = {**SELECTIVE, "recompute_modules": ("moe",)}
# Name -> model, options of experts, options of the command.
STEPS = {
    "blocks, SP, experts recomputed": (QWEN3, BLOCKS, {"sequence_parallel_enabled": True, **EXPERTS}),
    "padded, SP, two regions": (
        MIXTRAL,
        (*PADDED, "moe_aux_loss_coeff=0.1", "moe_z_loss_coeff=0.1"),
        {"sequence_parallel_enabled": True, **SELECTIVE, "recompute_modules": ("attn", "moe")},
    ),
    "padded, first layer recomputed": (
        MIXTRAL,
        PADDED,
        {**SELECTIVE, "recompute_modules": ("moe",), "recompute_method": "block", "recompute_num_layers": 1},
    ),
    "Sinkhorn, SP": (
        MIXTRAL,
        (*PADDED, "moe_router_load_balancing_type=sinkhorn"),
        {"sequence_parallel_enabled": True, **FULL},
    ),
    "router in fp64, sums in fp32, SP": (
        MIXTRAL,
        (*PADDED, "moe_router_dtype=fp64"),
        {"sequence_parallel_enabled": True, "reduce_dtype": "float32", "dtype": "bfloat16"},
    ),
    "bias of the router, four ranks": (
        QWEN3,
        (*BLOCKS, "moe_router_score_function=sigmoid", "moe_router_bias_update_rate=0.001"),
        {"sequence_parallel_enabled": True, "tensor_model_parallel_size": 4, **FULL},
    ),
}

EXPERT_PARALLEL = {"expert_model_parallel_size": 2}
SENT = "moe_token_dispatcher_type=alltoall"
SHARED = "moe_shared_expert_intermediate_size=24"
NEOX = {name: SIZES[name] for name in SIZES} | {"model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 96}
ADDED = ("num_moe_experts=4", *PADDED)
STEPS |= {
    "EP, T=1, padded, rows sent": (MIXTRAL, (*PADDED, SENT), {**EXPERT_PARALLEL, "tensor_model_parallel_size": 1}),
    "EP, padded, tokens gathered, SP": (
        MIXTRAL,
        PADDED,
        {**EXPERT_PARALLEL, **FULL, "sequence_parallel_enabled": True},
    ),
    "EP, padded, rows sent, experts recomputed, global loss": (
        MIXTRAL,
        (*PADDED, SENT, "moe_router_load_balancing_type=global_aux_loss", "moe_aux_loss_coeff=0.1"),
        {**EXPERT_PARALLEL, **EXPERTS},
    ),
    "EP, blocks, router in fp64": (QWEN3, (*BLOCKS, "moe_router_dtype=fp64"), {**EXPERT_PARALLEL, **FULL}),
    "shared expert, recomputed, EP": (
        MIXTRAL,
        (*BLOCKS, SHARED),
        {**EXPERT_PARALLEL, **EXPERTS, "sequence_parallel_enabled": True},
    ),
    "shared expert, attention and experts recomputed": (
        MIXTRAL,
        (*PADDED, SHARED),
        {**SELECTIVE, "recompute_modules": ("attn", "moe"), "sequence_parallel_enabled": True},
    ),
    "GPT-NeoX, SP, EP": (NEOX, (*ADDED, SENT), {**EXPERT_PARALLEL, **FULL, "sequence_parallel_enabled": True}),
    "GPT-NeoX with dropout, shared expert, blocks": (
        NEOX | {"hidden_dropout": 0.1},
        ("num_moe_experts=4", *BLOCKS, SHARED),
        FULL,
    ),
}


def asked(tmp_path, config, moe, *, backend="cpu", **options) -> Request:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    options = {"tensor_model_parallel_size": 2, "attention_backend": "math"} | options
    dtype = options.pop("dtype", "float32")
    arguments = ["--model", str(file), "--backend", backend, "--seq-length", "32", "--measure-layers", "2", "3"]
    arguments += ["--data.micro-batch-size", "2"]
    arguments += [f"--trainer.precision={'32-true' if dtype == 'float32' else 'bf16-true'}"]
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        section = "parallel" if name in ParallelConfig.__dataclass_fields__ else "memory"
        arguments += [f"--{section}.{name.replace('_', '-')}", *map(str, values)]
    for pair in moe:
        name, _, value = pair.partition("=")
        arguments += [f"--moe.{name.replace('_', '-')}", value]
    return read(arguments).request


# Expert parallelism, rows that are sent, recomputation and a loss over ranks in one.
FAST = ("EP, padded, rows sent, experts recomputed, global loss",)


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in FAST)) for each in STEPS])
def test_collectives_equal_the_formulas(name, tmp_path):
    config, moe, options = STEPS[name]
    request = asked(tmp_path, config, moe, **options)
    certified = certificate(request)
    checks = {check.name: check for check in certified.checks}
    assert checks["collectives"].passed, checks["collectives"].detail
    assert checks["same graph on every rank"].passed
    if request.memory.recompute_granularity:
        assert checks["recompute survives"].passed, checks["recompute survives"].detail
    # The weights of the choices are exchanged in every layer, [N, k] in the router's dtype.
    kind = "all_gather" if request.parallel.sequence_parallel_enabled else "all_reduce"
    width = 8 if "fp64" in str(moe) else 4
    size = request.parallel.tensor_model_parallel_size
    counted = certified.survivals[3].baseline.collectives
    if size > 1:
        assert counted[Collective(kind, 2 * 32 * config.get("num_experts_per_tok", 2) * width, size)] >= 3
    # Expert-parallel ranks exchange tokens, or the rows of each expert's capacity, in every layer and back.
    if request.parallel.expert_model_parallel_size == 2:
        hidden = config["hidden_size"] * 4
        rows = (
            Collective("all_to_all", 4 * 48 * hidden, 2) if SENT in moe else Collective("all_gather", 128 * hidden, 2)
        )
        assert counted[rows] >= 2 * 3


@pytest.mark.parametrize(
    ("config", "moe", "facts"),
    [
        (MIXTRAL, (), ["depend on the routing", "moe_expert_block_size", "moe_pad_expert_input_to_capacity"]),
        (MIXTRAL, (*BLOCKS, "num_moe_experts=8"), ["num_moe_experts 8", "MixtralConfig", "4"]),
        (SIZES | {"model_type": "llama"}, BLOCKS, ["moe.moe_expert_block_size", "llama", "leave it out"]),
        (QWEN3 | {"decoder_sparse_step": 2}, BLOCKS, ["moe_layer_freq", "all have experts"]),
    ],
)
def test_refusals(config, moe, facts, tmp_path):
    assert_says(error_message(lambda: asked(tmp_path, config, moe)), *facts)


def test_every_rank_is_traced(tmp_path, monkeypatch):
    """Each of T x EP ranks, with its own place in both groups."""
    places = []

    def traced(request, layers, rank):
        with worker.pretended_world(request, rank=rank):
            state = parallel_state
            places.append((state.get_tensor_model_parallel_rank(), state.get_expert_model_parallel_rank()))
        return "graph"

    monkeypatch.setattr(worker, "rank_fingerprint", traced)
    certificate(asked(tmp_path, MIXTRAL, BLOCKS, **EXPERT_PARALLEL))
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_states_of_experts_are_sharded_over_the_ranks_that_have_them(tmp_path):
    request = asked(tmp_path, MIXTRAL, BLOCKS, **EXPERT_PARALLEL, tensor_model_parallel_size=1)
    total, experts = worker.count_parameters(request)
    layers = SIZES["num_hidden_layers"]
    assert experts == layers * 2 * 3 * 64 * 96  # two of four experts with gate, up and down
    terms = memory_terms(
        num_parameters=total,
        num_expert_parameters=experts,
        states=StateLayout(4, sharding="zero1", data_parallel_size=4, expert_ranks=2),
        temporary_bytes=0,
        input_bytes=0,
        capacity_gib=16,
    ).terms
    assert terms["optimizer moments"] == 2 * 4 * (-(-(total - experts) // 4) + experts // 2)
    message = error_message(lambda: asked(tmp_path, SIZES | {"model_type": "llama"}, (), **EXPERT_PARALLEL))
    assert_says(message, "expert_model_parallel_size 2", "llama", "set it to 1")
