"""MoEConfig: Megatron's defaults, and that every refusal states relation, values and remedy."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from nxd_memopt.config import ParallelConfig
from nxd_memopt.moe_config import MoEConfig
from tests.reference import assert_says, error_message

REFUSALS = {
    "no expert": ({"num_moe_experts": 0}, ["num_moe_experts", "at least 1", "0"]),
    "experts as text": ({"num_moe_experts": "8"}, ["num_moe_experts must be int", "'8'"]),
    "top-k of zero": ({"moe_router_topk": 0}, ["moe_router_topk", "at least 1"]),
    "top-k above the experts": ({"moe_router_topk": 9}, ["moe_router_topk 9", "num_moe_experts 8", "lower it"]),
    "balancing": (
        {"moe_router_load_balancing_type": "aux"},
        ["moe_router_load_balancing_type", "'aux'", "aux_loss", "sinkhorn"],
    ),
    "dispatcher": ({"moe_token_dispatcher_type": "all2all"}, ["all2all", "did you mean 'alltoall'"]),
    "policy": ({"moe_token_drop_policy": "prob"}, ["moe_token_drop_policy", "did you mean 'probs'"]),
    "score function": ({"moe_router_score_function": "tanh"}, ["moe_router_score_function", "tanh", "sigmoid"]),
    "router dtype": ({"moe_router_dtype": "float32"}, ["moe_router_dtype", "float32", "fp32"]),
    "negative coefficient": ({"moe_aux_loss_coeff": -0.1}, ["moe_aux_loss_coeff", "at least 0", "-0.1"]),
    "negative z-loss": ({"moe_z_loss_coeff": -1}, ["moe_z_loss_coeff", "at least 0", "-1"]),
    "coefficient that is no number": ({"moe_aux_loss_coeff": float("nan")}, ["moe_aux_loss_coeff", "nan"]),
    "negative update rate": ({"moe_router_bias_update_rate": -1.0}, ["moe_router_bias_update_rate", "-1.0"]),
    "jitter of 1": ({"moe_input_jitter_eps": 1.0}, ["moe_input_jitter_eps", "below 1", "1.0"]),
    "negative jitter": ({"moe_input_jitter_eps": -0.1}, ["moe_input_jitter_eps", "at least 0", "-0.1"]),
    "capacity of zero": ({"moe_expert_capacity_factor": 0}, ["moe_expert_capacity_factor", "above 0", "got 0"]),
    "negative capacity": ({"moe_expert_capacity_factor": -1.0}, ["moe_expert_capacity_factor", "above 0", "-1.0"]),
    "policy without capacity": (
        {"moe_token_drop_policy": "position"},
        ["moe_token_drop_policy 'position'", "moe_expert_capacity_factor is None", "leave the policy out"],
    ),
    "blocks of zero rows": ({"moe_expert_block_size": 0}, ["moe_expert_block_size", "at least 1", "0"]),
    "blocks and capacity": (
        {"moe_expert_block_size": 64, "moe_expert_capacity_factor": 1.0},
        ["moe_expert_block_size 64", "moe_expert_capacity_factor is 1.0", "leave one out"],
    ),
    "padding without capacity": (
        {"moe_pad_expert_input_to_capacity": True},
        ["moe_pad_expert_input_to_capacity", "moe_expert_capacity_factor", "None"],
    ),
    "coefficient without a loss": (
        {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.01},
        ["moe_aux_loss_coeff 0.01", "'none'", "aux_loss"],
    ),
    "coefficient with sinkhorn": (
        {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.01},
        ["moe_aux_loss_coeff 0.01", "'sinkhorn'"],
    ),
    "sinkhorn with sigmoid": (
        {"moe_router_load_balancing_type": "sinkhorn", "moe_router_score_function": "sigmoid"},
        ["sinkhorn", "moe_router_score_function"],
    ),
    "pre-softmax of sigmoid": (
        {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True},
        ["moe_router_pre_softmax", "softmax", "sigmoid"],
    ),
    "bias with softmax": (
        {"moe_router_bias_update_rate": 1e-3},
        ["moe_router_bias_update_rate 0.001", "sigmoid", "softmax"],
    ),
    "transformers' loss with sigmoid": (
        {"moe_router_load_balancing_type": "hf_aux_loss", "moe_router_score_function": "sigmoid"},
        ["hf_aux_loss", "softmax", "sigmoid"],
    ),
    "frequency of zero": ({"moe_layer_freq": 0}, ["moe_layer_freq", "at least 1", "0"]),
    "frequency as text": ({"moe_layer_freq": "1"}, ["moe_layer_freq", "'1'"]),
    "pattern of other numbers": ({"moe_layer_freq": [1, 2]}, ["moe_layer_freq", "[1, 2]"]),
    "pattern without a MoE layer": ({"moe_layer_freq": [0, 0]}, ["moe_layer_freq", "1 for MoE layers", "[0, 0]"]),
    "switch as a number": ({"moe_per_layer_logging": 1}, ["moe_per_layer_logging must be bool", "true or false", "1"]),
    "width of zero": ({"moe_ffn_hidden_size": 0}, ["moe_ffn_hidden_size", "at least 1"]),
    "shared width as text": (
        {"moe_shared_expert_intermediate_size": "8"},
        ["moe_shared_expert_intermediate_size must be int"],
    ),
}


def test_defaults_are_megatrons():
    config = MoEConfig(num_moe_experts=8)
    assert (config.moe_router_topk, config.moe_router_load_balancing_type) == (2, "aux_loss")
    assert (config.moe_aux_loss_coeff, config.moe_z_loss_coeff, config.moe_input_jitter_eps) == (0.0, None, None)
    assert (config.moe_token_dispatcher_type, config.moe_token_drop_policy) == ("allgather", "probs")
    assert config.moe_expert_capacity_factor is None and not config.has_aux_loss


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MoEConfig(8).num_moe_experts = 4  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(what):
    options, facts = REFUSALS[what]
    assert_says(error_message(lambda: MoEConfig(**{"num_moe_experts": 8, **options})), *facts)


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(1, (True, True, True, True)), (2, (True, False, True, False)), ([0, 1, 1, 0], (False, True, True, False))],
)
def test_layers_with_experts(frequency, expected):
    assert MoEConfig(4, moe_layer_freq=frequency).is_moe_layer(4) == expected


def test_a_pattern_of_another_length_is_refused():
    config = MoEConfig(4, moe_layer_freq=(1, 0))
    assert_says(error_message(lambda: config.is_moe_layer(3)), "moe_layer_freq", "2", "3")


def test_expert_parallel_size():
    assert ParallelConfig().expert_model_parallel_size == 1
    message = error_message(lambda: ParallelConfig(expert_model_parallel_size=0))
    assert_says(message, "expert_model_parallel_size", "at least 1", "0")


def test_routers_without_a_gradient_are_warned_of():
    chosen = {"num_moe_experts": 4, "moe_router_topk": 1, "moe_aux_loss_coeff": 0.0}
    with pytest.warns(UserWarning, match="routers are not trained"):
        MoEConfig(**chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MoEConfig(**chosen | {"moe_router_load_balancing_type": "none"}, moe_z_loss_coeff=0.1)
        MoEConfig(**chosen, moe_router_pre_softmax=True)
        MoEConfig(**chosen | {"moe_router_topk": 2})
