"""Which options of a Hugging Face config each architecture reads, as its config class in transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxd_memopt.architectures.layers import GPT_NEOX_MOE, QWEN2_MOE

GPT_NEOX_TYPES = ("gpt_neox", GPT_NEOX_MOE)
"""Architectures with GPT-NeoX's attention, norms and biases."""
MODELS_WITH_EXPERTS = ("mixtral", QWEN2_MOE, "qwen3_moe", GPT_NEOX_MOE)
_QWENS_WITH_EXPERTS = (QWEN2_MOE, "qwen3_moe")
_QWENS = ("qwen2", "qwen3", *_QWENS_WITH_EXPERTS)
_LLAMAS = ("llama", "mistral", "mixtral", "granite", "phi3", *_QWENS)
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
"""Granite's constant factors."""

_READERS: dict[str, tuple[str, ...]] = {
    "attention_bias": ("llama", "granite", "qwen3", "qwen3_moe", *GPT_NEOX_TYPES),
    "decoder_sparse_step": _QWENS_WITH_EXPERTS,
    "head_dim": _LLAMAS,
    "hidden_dropout": GPT_NEOX_TYPES,
    "layer_types": ("qwen2", "qwen3", QWEN2_MOE),
    "max_window_layers": ("qwen2", "qwen3", QWEN2_MOE),
    "mlp_bias": ("llama", "granite"),
    "mlp_only_layers": _QWENS_WITH_EXPERTS,
    "moe_intermediate_size": _QWENS_WITH_EXPERTS,
    "norm_topk_prob": _QWENS_WITH_EXPERTS,
    "num_experts": MODELS_WITH_EXPERTS,
    "num_experts_per_tok": MODELS_WITH_EXPERTS,
    "num_key_value_heads": _LLAMAS,
    "num_local_experts": ("mixtral", "qwen3_moe", GPT_NEOX_MOE),
    "output_router_logits": MODELS_WITH_EXPERTS,
    "qkv_bias": (QWEN2_MOE,),
    "router_aux_loss_coef": MODELS_WITH_EXPERTS,
    "router_jitter_noise": ("mixtral",),
    "rotary_pct": GPT_NEOX_TYPES,
    # Qwen2-MoE's own; the others have it from this library's options (``hf_options.with_shared_expert``).
    "shared_expert_gate": ("mixtral", "qwen3_moe", GPT_NEOX_MOE),
    "shared_expert_intermediate_size": MODELS_WITH_EXPERTS,
    "resid_pdrop": ("phi3",),
    "sliding_window": ("mistral", "mixtral", "phi3", *_QWENS),
    "use_parallel_residual": GPT_NEOX_TYPES,
    "use_sliding_window": _QWENS,
    **dict.fromkeys(MULTIPLIERS, ("granite",)),
}
"""Option -> architectures that read it; all architectures read options that are not listed.

A config.json may have options of other architectures, which transformers stores and ignores.
"""


def reads(config: Any, name: str) -> bool:
    """Return whether the architecture of ``config`` reads the option ``name``."""
    return name not in _READERS or raw_option(config, "model_type") in _READERS[name]


def option(config: Any, name: str) -> Any:
    """Return an option of a config, or None if it has none of this name or its architecture does not read it.

    Args:
        config: Hugging Face's config, as an object or as the content of a ``config.json``.
        name: option.
    """
    return raw_option(config, name) if reads(config, name) else None


def raw_option(config: Any, name: str) -> Any:
    """Return an option of a config whether or not its architecture reads it; None if it has none of this name."""
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)
