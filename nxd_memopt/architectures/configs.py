"""Hugging Face configs without transformers: files, names, and the defaults of missing options."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nxd_memopt.architectures.config_options import GPT_NEOX_TYPES
from nxd_memopt.architectures.layers import GPT_NEOX_MOE
from nxd_memopt.architectures.model_spec import moe_layers, num_kv_heads, rope_options, shared_expert
from nxd_memopt.architectures.published import NAMED_CONFIGS, published_name
from nxd_memopt.lora_config import require_no_adapters
from nxd_memopt.options import require_one_of

_QWEN: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,  # whatever the number of heads is
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout": 0.0,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 64,
        "num_hidden_layers": 44,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "vocab_size": 50432,
    },
    "llama": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "mistral": {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "mixtral": {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"attention_bias": False, "head_dim": 128},
    "qwen2_moe": {
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "mlp_only_layers": [],
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "qkv_bias": True,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_moe": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
"""transformers' values of options that a config leaves out, by model type."""
DEFAULTS[GPT_NEOX_MOE] = DEFAULTS["gpt_neox"] | {
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
_GPT_NEOX_ROTARY_FRACTION = 0.25
_WITH_EXPERTS = {"llama": "mixtral", "gpt_neox": GPT_NEOX_MOE}
"""The architecture with experts by the dense one."""


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with transformers' values of the options that it leaves out.

    Raises:
        ValueError: the model type is not supported, or is missing.
    """
    model_type = config.get("model_type")
    require_one_of("model_type", model_type, tuple(DEFAULTS))
    complete = DEFAULTS[str(model_type)] | dict(config)
    has_fraction = complete.get("rotary_pct") is not None or "partial_rotary_factor" in rope_options(complete)
    if model_type in GPT_NEOX_TYPES and not has_fraction:
        complete["rotary_pct"] = _GPT_NEOX_ROTARY_FRACTION
    return complete


_MOST_LAYERS = 10_000
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OTHER_SIZES = ("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings")


def require_sizes(config: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the sizes of a model are positive integers; some may be None or missing."""
    for name in (*_SIZES, *_OTHER_SIZES):
        value = config.get(name)
        if value is None and name in _OTHER_SIZES:
            continue
        # type(), not isinstance(): a bool is an int too
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} of the model must be a positive integer, got {value!r}: correct its config.json")
    if config.get("head_dim") is None and config["hidden_size"] % config["num_attention_heads"]:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        raise ValueError(
            f"hidden_size {width} of the model is not divisible by num_attention_heads {heads}: correct its config.json"
        )
    if config["num_hidden_layers"] > _MOST_LAYERS:
        layers = config["num_hidden_layers"]
        raise ValueError(f"num_hidden_layers of the model must be at most {_MOST_LAYERS}, got {layers}")


def require_known_keys(option: str, keys: Iterable[str]) -> None:
    """Raise ``ValueError`` for a key of a model's config that is almost one that is read: others have no effect here.

    Args:
        option: option with the keys, for the message.
        keys: keys of a config.json, of which models have many more than are read.
    """
    known = {*_SIZES, *_OTHER_SIZES}.union(*DEFAULTS.values(), *NAMED_CONFIGS.values())
    for key in keys:
        close = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.8)
        if key not in known and close:
            raise ValueError(f"unknown key {key!r} in {option}: did you mean {close[0]!r}?")


def with_experts(config: Mapping[str, Any], moe: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the experts that the options ``moe`` add to it (``checkpoint/huggingface/upcycling.py``).

    A gated shared expert stays an option of Mixtral here: it has the sizes of Qwen2-MoE's.

    Args:
        config: complete config, ``with_defaults``.
        moe: options of the section ``moe`` that are set.

    Raises:
        ValueError: the model cannot have experts, or is a LLaMA with biases.
    """
    result = dict(config)
    experts = moe.get("num_moe_experts")
    model_type = config["model_type"]
    if experts is not None and not any(moe_layers(config)):
        require_one_of("moe.num_moe_experts: model_type", model_type, tuple(_WITH_EXPERTS))
        biases = [name for name in ("attention_bias", "mlp_bias") if model_type == "llama" and config.get(name)]
        if biases:
            raise ValueError(f"num_moe_experts {experts} makes a Mixtral, which has no biases, and {biases} are true")
        result["model_type"] = _WITH_EXPERTS[model_type]
        result |= {"num_local_experts": experts, "num_experts_per_tok": moe.get("moe_router_topk") or 2}
        # Defaults of the model with experts that the dense one has otherwise.
        result |= {"num_key_value_heads": num_kv_heads(config), "router_aux_loss_coef": 0.0}
    width = moe.get("moe_shared_expert_intermediate_size")
    if width is not None and shared_expert(config)[0] is None:
        result["shared_expert_intermediate_size"] = width
        result["shared_expert_gate"] = bool(moe.get("moe_shared_expert_gate"))
    return result


def load_model_config(model: str) -> dict[str, Any]:
    """Return a Hugging Face model configuration as a dictionary.

    Args:
        model: spelling of a name from ``NAMED_CONFIGS``, path of a ``config.json``, or a directory with one.

    Raises:
        ValueError: the name is unknown, or the file is no configuration.
    """
    name = published_name(model)
    # A file wins: a directory may be called as a published model is.
    if name is not None and not Path(model).exists():
        return dict(NAMED_CONFIGS[name])
    return _read_config(model)


def _read_config(model: str) -> dict[str, Any]:
    """Return the JSON of a configuration file, or raise ``ValueError`` with the known names."""
    file = Path(model)
    if file.is_dir():
        file = file / "config.json"
        if not file.is_file():
            require_no_adapters(Path(model))
            raise ValueError(f"{model} has no config.json: name the directory of a Hugging Face model")
    # Neither a name nor a file: most likely a misspelt name, so the message lists the known ones.
    if not file.is_file():
        require_one_of("model", model, tuple(NAMED_CONFIGS))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not a config.json: {error}: pass the file of a Hugging Face model") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{file} has no model_type: pass the config.json of a Hugging Face model")
    return config
