"""Reads the options of MoE layers from a Hugging Face config, and compares given ones with it."""

from __future__ import annotations

import dataclasses
from typing import Any

from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.planner.architectures import GPT_NEOX_MOE, moe_layers
from nxd_memopt.planner.moe_sizes import fixed_options
from nxd_memopt.planner.moe_sizes import options_of as options_of

# What transformers' Mixtral and Qwen3-MoE cannot express. Such a model is trained and saved in
# checkpoints; an exported one would be another function.
_TRAINED_ONLY = {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(MoEConfig)}


def resolve_moe(moe: MoEConfig | None, config: Any) -> MoEConfig:
    """Return the options of a model with Hugging Face's ``config``.

    Args:
        moe: options of the caller; None takes ``options_of(config)``.
        config: Hugging Face config.

    Raises:
        ValueError: ``moe`` differs from ``config`` in an option that ``config`` fixes.
    """
    if moe is None:
        return options_of(config)
    fixed = fixed_options(config)
    # Width and layers may be left out: they are those of the config. A list of all layers is the
    # same choice as a frequency.
    for name in ("moe_ffn_hidden_size", "moe_layer_freq"):
        if getattr(moe, name) == _DEFAULTS[name]:
            moe = dataclasses.replace(moe, **{name: fixed[name]})
    if moe.is_moe_layer(config.num_hidden_layers) == moe_layers(config):
        moe = dataclasses.replace(moe, moe_layer_freq=fixed["moe_layer_freq"])
    for name, value in fixed.items():
        given = getattr(moe, name)
        if given != value:
            raise ValueError(
                f"{name} {given!r} contradicts {type(config).__name__}, which says {value!r}: leave it out, or "
                "change the config"
            )
    return moe


def trained_only(moe: MoEConfig, model_type: str) -> tuple[str, Any] | None:
    """Return the first option that transformers' model cannot express, and its value, or None."""
    if model_type == GPT_NEOX_MOE:
        return "num_moe_experts", moe.num_moe_experts
    for name, value in _TRAINED_ONLY.items():
        if getattr(moe, name) != value:
            return name, getattr(moe, name)
    # Its weights are not those of the choice by logits, and it chooses otherwise in training.
    if moe.moe_router_load_balancing_type == "sinkhorn":
        return "moe_router_load_balancing_type", "sinkhorn"
    return None


def transformers_type(config: Any) -> str:
    """Return the ``model_type`` in transformers of a model, without experts if transformers has it only so."""
    return "gpt_neox" if config.model_type == GPT_NEOX_MOE else config.model_type


def require_exportable(model: Any) -> None:
    """Raise ``ValueError`` if transformers' model of the same config would compute something else."""
    moe = getattr(model, "moe", None)
    found = trained_only(moe, model.config.model_type) if isinstance(moe, MoEConfig) else None
    if found is not None:
        raise ValueError(
            f"{found[0]} {found[1]!r} is unknown to transformers' {transformers_type(model.config)}, which would "
            "compute something else with these weights: use save_training_state"
        )
