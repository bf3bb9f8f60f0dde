"""Translates the sizes of a NeMo ``model`` section with layer norms, which is a GPT-NeoX under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Values that such a section may have, instead of the LLaMA family's values.
ONLY: dict[str, tuple[Any, ...]] = {
    "normalization": ("layernorm",),
    "activation": ("gelu", None),
    "bias": (True, None),
    "has_bias": (True, None),
    "transformer_block_type": ("pre_ln", "gpt_j"),
}
# Options that are translated into the config, so that they may have any value.
CONFIGURED = ("hidden_dropout", "rotary_percentage")


def is_gpt_neox(model: Mapping[str, Any]) -> bool:
    """Return whether the section has NeMo's layer norms with biases."""
    return model.get("normalization") == "layernorm"


def gpt_neox_sizes(model: Mapping[str, Any], sizes: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return ``sizes``, which have LLaMA's names, as overrides of a GPT-NeoX config.

    Args:
        model: NeMo's section.
        sizes: Hugging Face's names for its sizes.
        problems: gets a text for each option that GPT-NeoX does not have.
    """
    sizes = dict(sizes)
    heads, hidden = sizes.get("num_attention_heads"), sizes.get("hidden_size")
    groups, width = sizes.pop("num_key_value_heads", None), sizes.pop("head_dim", None)
    if groups not in (None, heads):
        problems.append(
            f"model.num_query_groups {groups!r} is not supported with normalization 'layernorm': GPT-NeoX has as many "
            f"key heads as query heads, {heads!r}"
        )
    if width is not None and heads is not None and width * heads != hidden:
        problems.append(
            f"model.kv_channels {width!r} is not supported with normalization 'layernorm': {heads!r} heads of it are "
            f"not hidden_size {hidden!r}"
        )
    rotary = model.get("rotary_percentage")
    if rotary is None:
        rotary = 1.0
    if not 0 < rotary <= 1:
        problems.append(f"model.rotary_percentage {rotary!r} is not supported: GPT-NeoX rotates above 0 to 1 of a head")
    for name, theirs in (("rms_norm_eps", "layer_norm_eps"), ("rope_theta", "rotary_emb_base")):
        if name in sizes:
            sizes[theirs] = sizes.pop(name)
    # NeMo's gpt_j block adds attention and MLP of the same input, each after its own norm.
    # NeMo's fused kernel for bias and activation, its default, approximates GeLU by tanh.
    is_fused = model.get("bias_activation_fusion", True)
    return sizes | {
        "model_type": "gpt_neox",
        "use_parallel_residual": model.get("transformer_block_type") == "gpt_j",
        "rotary_pct": rotary,
        "hidden_act": "gelu_pytorch_tanh" if is_fused else "gelu",
        "hidden_dropout": model.get("hidden_dropout"),
    }
