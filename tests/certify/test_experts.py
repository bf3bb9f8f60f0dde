"""Certificates of models with experts: collectives against the formulas, recomputation, refusals."""

from __future__ import annotations

import json

import pytest

from nxd_memopt.certify.command import Certify
from nxd_memopt.certify.request import Request
from nxd_memopt.planner.collectives import Collective
from tests.certify.test_certify import certificate
from tests.certify_steps import SIZES
from tests.reference import assert_says, error_message

MIXTRAL = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "model_type": "mixtral", "num_local_experts": 4}
QWEN3 = {
    **SIZES,
    "hidden_size": 64,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
QWEN3 |= {"head_dim": 8, "moe_intermediate_size": 48, "num_key_value_heads": 4}
MIXTRAL |= {"num_key_value_heads": 4, "num_experts_per_tok": 2, "sliding_window": None}
PADDED = ("moe_expert_capacity_factor=1.5", "moe_pad_expert_input_to_capacity=true")
BLOCKS = ("moe_expert_block_size=16",)
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full"}
# Name -> model, options of experts, options of the command.
STEPS = {
    "padded, SP": (MIXTRAL, PADDED, {"sequence_parallel_enabled": True}),
    "blocks": (MIXTRAL, BLOCKS, FULL),
    "blocks, SP, experts recomputed": (
        QWEN3,
        (*BLOCKS, "moe_layer_recompute=true"),
        {"sequence_parallel_enabled": True},
    ),
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
        (*BLOCKS, "moe_router_score_function=sigmoid", "moe_router_enable_expert_bias=true"),
        {"sequence_parallel_enabled": True, "tensor_model_parallel_size": 4, **FULL},
    ),
}


def asked(tmp_path, config, moe, **options) -> Request:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    changes = {"backend": "cpu", "seq_length": 32, "micro_batch_size": 2, "dtype": "float32", "measure_layers": (2, 3)}
    changes |= {"tensor_model_parallel_size": 2, "attention_backend": "math", "moe": moe}
    return Certify(model=str(file), **{**changes, **options}).request()


SLOW = ("padded, SP", "padded, first layer recomputed")  # parts of others


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in STEPS])
def test_collectives_equal_the_formulas(name, tmp_path):
    config, moe, options = STEPS[name]
    request = asked(tmp_path, config, moe, **options)
    certified = certificate(request)
    checks = {check.name: check for check in certified.checks}
    assert checks["collectives"].passed, checks["collectives"].detail
    assert checks["same graph on every rank"].passed
    if request.memory["recompute_granularity"]:
        assert checks["recompute survives"].passed, checks["recompute survives"].detail
    # The weights of the choices are exchanged in every layer, [N, k] in the router's dtype.
    kind = "all_gather" if request.parallel["sequence_parallel_enabled"] else "all_reduce"
    width = 8 if "fp64" in str(moe) else 4
    sent = Collective(
        kind, 2 * 32 * config["num_experts_per_tok"] * width, request.parallel["tensor_model_parallel_size"]
    )
    assert certified.survivals[3].baseline.collectives[sent] >= 3


@pytest.mark.parametrize(
    ("moe", "least"),
    [pytest.param(PADDED, 0.7, id="padded"), pytest.param(BLOCKS, 0.7, id="blocks", marks=pytest.mark.slow)],
)
def test_the_saving_of_recomputed_experts_is_seen(moe, least, tmp_path):
    """Of a layer, the experts save more than half; without recomputation of them, nothing is saved."""
    recomputed = certificate(asked(tmp_path, MIXTRAL, (*moe, "moe_layer_recompute=true"))).survivals[3]
    assert recomputed.ratio < least and recomputed.extra_matmuls > 0
    kept = certificate(asked(tmp_path, MIXTRAL, moe)).survivals[3]
    assert kept.ratio == 1 and kept.extra_matmuls == 0


@pytest.mark.parametrize(
    ("config", "moe", "facts"),
    [
        (MIXTRAL, (), ["depend on the routing", "moe_expert_block_size", "moe_pad_expert_input_to_capacity"]),
        (MIXTRAL, ("moe_expert_block_size",), ["--moe 'moe_expert_block_size' is not KEY=VALUE"]),
        (MIXTRAL, ("moe_block_size=4",), ["unknown key 'moe_block_size'"]),
        (MIXTRAL, (*BLOCKS, "num_moe_experts=8"), ["num_moe_experts 8", "MixtralConfig", "4"]),
        (SIZES | {"model_type": "llama"}, BLOCKS, ["--moe moe_expert_block_size=16", "llama", "leave it out"]),
        (QWEN3 | {"decoder_sparse_step": 2}, BLOCKS, ["moe_layer_freq", "all have experts"]),
    ],
)
def test_refusals(config, moe, facts, tmp_path):
    assert_says(error_message(lambda: asked(tmp_path, config, moe)), *facts)
