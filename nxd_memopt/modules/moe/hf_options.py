"""Reads the options of MoE layers from a Hugging Face config, and compares given ones with it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from nxd_memopt.architectures.experts import fixed_options, require_option_of
from nxd_memopt.architectures.experts import options_of as options_of
from nxd_memopt.architectures.layers import GPT_NEOX_MOE, QWEN2_MOE
from nxd_memopt.architectures.model_spec import model_spec, shared_expert
from nxd_memopt.moe_config import MoEConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What transformers' Mixtral and Qwen3-MoE cannot express. Such a model is trained and saved in
# checkpoints; an exported one would be another function.
_TRAINED_ONLY = {"moe_router_score_function": "softmax", "has_expert_bias": False}

# Options that default to the values of the config -> options that are then taken from the config too.
_OF_CONFIG: dict[str, tuple[str, ...]] = {
    "moe_ffn_hidden_size": (),
    "moe_layer_freq": (),
    "moe_shared_expert_intermediate_size": ("moe_shared_expert_gate",),
}

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
    spec = model_spec(config)
    fixed = fixed_options(spec)
    # What follows from the sizes of the config may be left out. A list of all layers is the same choice as a
    # frequency.
    for name in _OF_CONFIG:
        if getattr(moe, name) == _DEFAULTS[name]:
            moe = dataclasses.replace(moe, **{each: fixed[each] for each in (name, *_OF_CONFIG[name])})
    if moe.is_moe_layer(spec.num_layers) == spec.moe_layers:
        moe = dataclasses.replace(moe, moe_layer_freq=fixed["moe_layer_freq"])
    for name in fixed:
        remedy = "leave it out, or change the config"
        if name.startswith("moe_shared_expert"):
            remedy = "leave it out, or build the model with hf_options.with_shared_expert(config, width, gate=...)"
        require_option_of(config, name, getattr(moe, name), remedy)
    return moe


def with_shared_expert(config: PretrainedConfig, width: int, *, gate: bool) -> PretrainedConfig:
    """Return the config of the model with ``config`` and a shared expert in each layer with experts.

    A Mixtral whose shared expert has a gate is a Qwen2-MoE, which transformers has. Other models get the options
    ``shared_expert_intermediate_size`` and ``shared_expert_gate``, which transformers' models do not have: they are
    trained without export.

    Args:
        config: config of a model with experts.
        width: W, width of all shared experts together.
        gate: scale their output by a sigmoid of the token.

    Raises:
        ValueError: the model has another shared expert already, or the width is not positive.
    """
    if width < 1:
        raise ValueError(f"moe_shared_expert_intermediate_size must be at least 1, got {width}: leave it out for none")
    found, has_gate = shared_expert(config)
    if found is not None:
        if (found, has_gate) == (width, gate):
            return config
        raise ValueError(
            f"moe_shared_expert_intermediate_size {width} with moe_shared_expert_gate {gate} contradicts "
            f"{type(config).__name__}, which says {found} and {has_gate}: leave them out"
        )
    values = config.to_dict()
    for name in ("model_type", "transformers_version"):
        values.pop(name, None)
    if config.model_type == "mixtral" and gate:
        return _as_qwen2_moe(values, width)
    values |= {"shared_expert_intermediate_size": width, "shared_expert_gate": gate}
    return type(config)(**values)


def _as_qwen2_moe(values: dict[str, Any], width: int) -> PretrainedConfig:
    """Return the config of the Qwen2-MoE that computes what the Mixtral of ``values`` does, with a shared expert."""
    from transformers import Qwen2MoeConfig

    experts = values.pop("num_local_experts")
    window = values.get("sliding_window")
    if window is not None:
        # Qwen2-MoE's own rule gives windows to every second layer.
        windowed = ["sliding_attention"] * values["num_hidden_layers"]
        values |= {"use_sliding_window": True, "layer_types": windowed}
    jitter = values.pop("router_jitter_noise", None)
    if jitter:
        raise ValueError(
            f"moe_shared_expert_gate True makes a Qwen2-MoE of Mixtral, and router_jitter_noise is {jitter}, which "
            "Qwen2-MoE does not read: set it to 0, and moe_input_jitter_eps instead"
        )
    # Without values of None: Qwen2-MoE takes head_dim from the config whenever the attribute exists, even if it is
    # None.
    kept = {name: value for name, value in values.items() if value is not None and name != "architectures"}
    # A softmax over the chosen experts is a softmax over all, divided by the sum of the chosen ones.
    return Qwen2MoeConfig(
        **kept,
        num_experts=experts,
        moe_intermediate_size=values["intermediate_size"],
        shared_expert_intermediate_size=width,
        norm_topk_prob=True,
        qkv_bias=False,
    )


def trained_only(moe: MoEConfig, model_type: str) -> tuple[str, Any] | None:
    """Return the first option that transformers' model cannot express, and its value, or None."""
    if model_type == GPT_NEOX_MOE:
        return "num_moe_experts", moe.num_moe_experts
    if moe.moe_shared_expert_intermediate_size is not None and model_type != QWEN2_MOE:
        return "moe_shared_expert_intermediate_size", moe.moe_shared_expert_intermediate_size
    for name, value in _TRAINED_ONLY.items():
        if getattr(moe, name) != value:
            return name, getattr(moe, name)
    # Its weights differ from the weights of a choice by logits, and it chooses otherwise in training.
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
