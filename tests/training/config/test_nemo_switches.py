"""Tests switches of NeMo and Megatron that repeat what another option says: which options they set, or the error."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nxd_memopt.training.config.parsing import config_from_mapping

# A section, the options of it and of NeMo's switches, and the options that are set or the error.
SWITCHED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | str]] = {
    "offload without a number": (
        "memory",
        {"cpu_offloading": True},
        "memory.cpu_offloading_num_layers is not given: set",
    ),
    "offload": (
        "memory",
        {"cpu_offloading": True, "cpu_offloading_num_layers": 2},
        {"cpu_offloading_num_layers": 2},
    ),
    "offload of checkpoints": (
        "memory",
        {"cpu_offloading": True, "cpu_offloading_activations": True, "recompute_granularity": "full"},
        {"cpu_offloading_num_layers": 0, "cpu_offloading_activations": True},
    ),
    "no offload": (
        "memory",
        {"cpu_offloading": False, "cpu_offloading_num_layers": 2, "cpu_offloading_weights": True},
        {"cpu_offloading_num_layers": 0, "cpu_offloading_weights": False},
    ),
    "states": ("optimizer", {"optimizer_cpu_offload": True}, {"optimizer_offload_fraction": 1.0}),
    "null": (
        "optimizer",
        {"optimizer_cpu_offload": None, "optimizer_offload_fraction": 0.5},
        {"optimizer_offload_fraction": 0.5},
    ),
    "a word": ("optimizer", {"optimizer_cpu_offload": "yes"}, "optimizer_cpu_offload must be true or false, got 'yes'"),
    "bias": ("moe", {"moe_router_enable_expert_bias": True}, {"moe_router_bias_update_rate": 1e-3}),
    "no bias": (
        "moe",
        {"moe_router_enable_expert_bias": False, "moe_router_bias_update_rate": 1e-3},
        {"moe_router_bias_update_rate": None},
    ),
    "dropping without a capacity": ("moe", {"moe_token_dropping": True}, "moe.moe_expert_capacity_factor is not given"),
    "recompute": ("moe", {"moe_layer_recompute": True}, "write memory.recompute_granularity: selective, "),
    "width": ("moe", {"moe_ffn_hidden_size": 12}, "moe_ffn_hidden_size 12 is an option of the model"),
    "selective recompute": (
        "memory",
        {"selective_activation_checkpointing_is_enabled": True},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    ),
    "two kinds of recompute": (
        "memory",
        {"selective_activation_checkpointing_is_enabled": True, "recompute_granularity": "full"},
        "sets memory.recompute_granularity a second time",
    ),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_switches(name: str) -> None:
    """In a model section, as NeMo's."""
    section, options, expected = SWITCHED[name]
    values = {"model": {"pretrained": "d", **options}}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            config_from_mapping(values)
        return
    found = getattr(config_from_mapping(values), section)
    assert {each: getattr(found, each) for each in expected} == expected
