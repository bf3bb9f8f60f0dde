"""Reads the options of MoE layers from a Hugging Face config, and compares given ones with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nxd_memopt.config import MoEConfig

# What transformers' Mixtral and Qwen3-MoE cannot express: an exported model would be another function.
_FIXED = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
}

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(MoEConfig)}


def resolve_moe(moe: MoEConfig | None, config: Any, fixed: Mapping[str, Any], *, jitter_eps: float = 0.0) -> MoEConfig:
    """Return the options of a model with Hugging Face's ``config``.

    Args:
        moe: options of the caller; None takes those of ``config``, with transformers' balancing loss
            if ``config.output_router_logits`` is set.
        config: Hugging Face config.
        fixed: options that follow from ``config``, by name.
        jitter_eps: ``moe_input_jitter_eps`` of ``config``.

    Raises:
        ValueError: ``moe`` differs from ``config`` in an option that ``config`` fixes.
    """
    fixed = {**_FIXED, "moe_router_topk": config.num_experts_per_tok, **fixed}
    if moe is None:
        coeff = config.router_aux_loss_coef if config.output_router_logits else 0.0
        return MoEConfig(
            **fixed,
            moe_router_load_balancing_type="hf_aux_loss" if coeff else "none",
            moe_aux_loss_coeff=coeff,
            moe_input_jitter_eps=jitter_eps or None,
        )
    if moe.moe_router_load_balancing_type == "sinkhorn":
        raise ValueError(
            f"moe_router_load_balancing_type 'sinkhorn' weighs experts otherwise than {type(config).__name__}'s "
            "models: use 'aux_loss'"
        )
    # Width and layers may be left out: they are those of the config.
    for name in ("moe_ffn_hidden_size", "moe_layer_freq"):
        if getattr(moe, name) == _DEFAULTS[name]:
            moe = dataclasses.replace(moe, **{name: fixed[name]})
    for name, value in fixed.items():
        given = getattr(moe, name)
        if given != value:
            raise ValueError(
                f"{name} {given!r} contradicts {type(config).__name__}, which says {value!r}: leave it out, or "
                "change the config"
            )
    return moe
