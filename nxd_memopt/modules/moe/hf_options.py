"""Reads the options of MoE layers from a Hugging Face config, and compares given ones with it."""

from __future__ import annotations

import dataclasses
from typing import Any

from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.planner.architectures import moe_layers, sizes

# What transformers' Mixtral and Qwen3-MoE cannot express: an exported model would be another function.
_FIXED = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
}

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(MoEConfig)}


def fixed_options(config: Any) -> dict[str, Any]:
    """Return the options that follow from Hugging Face's ``config`` of Mixtral or Qwen3-MoE."""
    letters = sizes(config)
    is_moe = moe_layers(config)
    return {
        **_FIXED,
        "num_moe_experts": letters["E"],
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": letters["M"],
        # Mixtral's weights are a softmax over the chosen experts, as Qwen3's with norm_topk_prob.
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_layer_freq": 1 if all(is_moe) else tuple(int(each) for each in is_moe),
    }


def options_of(config: Any) -> MoEConfig:
    """Return the options of Hugging Face's ``config``, with its balancing loss if it outputs the routers' logits."""
    coeff = config.router_aux_loss_coef if config.output_router_logits else 0.0
    return MoEConfig(
        **fixed_options(config),
        moe_router_load_balancing_type="hf_aux_loss" if coeff else "none",
        moe_aux_loss_coeff=coeff,
        moe_input_jitter_eps=getattr(config, "router_jitter_noise", 0.0) or None,
    )


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
    if moe.moe_router_load_balancing_type == "sinkhorn":
        raise ValueError(
            f"moe_router_load_balancing_type 'sinkhorn' weighs experts otherwise than {type(config).__name__}'s "
            "models: use 'aux_loss'"
        )
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
