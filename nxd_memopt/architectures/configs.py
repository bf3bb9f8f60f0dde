"""Hugging Face configs without transformers: files, names, and the defaults of missing options."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nxd_memopt.architectures.config_options import GPT_NEOX_TYPES, MULTIPLIERS
from nxd_memopt.architectures.layers import GPT_NEOX_MOE
from nxd_memopt.architectures.model_spec import moe_layers, num_kv_heads, rope_options, shared_expert
from nxd_memopt.architectures.published import NAMED_CONFIGS, published_name, sizes
from nxd_memopt.lora_config import require_no_adapters
from nxd_memopt.options import require_one_of

# The values that several of transformers' config classes have in common. LLaMA and GPT-NeoX have as many KV heads as
# query heads unless a config says otherwise, so that their defaults name none; Qwen2 and Qwen3 have 32 of them,
# whatever the number of query heads is.
_DENSE: dict[str, Any] = {"attention_dropout": 0.0, "hidden_act": "silu", "tie_word_embeddings": False}
_ROUTER: dict[str, Any] = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
_EIGHT_EXPERTS = _ROUTER | {"num_experts_per_tok": 2, "num_local_experts": 8}
_QWEN = _DENSE | {"sliding_window": 4096, "use_sliding_window": False, "vocab_size": 151936}
_QWEN_DENSE = _QWEN | sizes(4096, 22016, 32, 32, 32)
_QWEN_MOE = _QWEN | _ROUTER | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False}
_GPT_NEOX = _DENSE | sizes(6144, 24576, 44, 64)
_GPT_NEOX |= {"attention_bias": True, "hidden_act": "gelu", "hidden_dropout": 0.0, "vocab_size": 50432}
_GPT_NEOX |= {"use_parallel_residual": True}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt_neox": _GPT_NEOX,
    GPT_NEOX_MOE: _GPT_NEOX | _EIGHT_EXPERTS,
    "llama": _DENSE | sizes(4096, 11008, 32, 32) | {"attention_bias": False, "mlp_bias": False, "vocab_size": 32000},
    "granite": _DENSE
    | sizes(4096, 11008, 32, 32, attention_bias=False, mlp_bias=False, vocab_size=32000)
    | dict.fromkeys(MULTIPLIERS, 1.0),
    "phi3": _DENSE
    | sizes(3072, 8192, 32, 32, vocab_size=32064, pad_token_id=32000, resid_pdrop=0.0)
    | {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "sliding_window": None},
    "mistral": _DENSE | sizes(4096, 14336, 32, 32, 8, sliding_window=4096, vocab_size=32000),
    "mixtral": _DENSE | _EIGHT_EXPERTS | sizes(4096, 14336, 32, 32, 8, vocab_size=32000),
    "qwen2": _QWEN_DENSE,
    "qwen3": _QWEN_DENSE | {"attention_bias": False, "head_dim": 128},
    "qwen2_moe": _QWEN_MOE
    | sizes(2048, 5632, 24, 16, 16, moe_intermediate_size=1408, shared_expert_intermediate_size=5632)
    | {"num_experts": 60, "num_experts_per_tok": 4, "qkv_bias": True},
    "qwen3_moe": _QWEN_MOE
    | sizes(2048, 6144, 24, 32, 4, moe_intermediate_size=768)
    | {"attention_bias": False, "num_experts": 128, "num_experts_per_tok": 8},
}
"""transformers' values of options that a config leaves out, by model type."""
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
    # Models have many keys that nothing here reads. One that is nearly the name of a key that is read is most likely
    # a misspelling, and would silently leave the default in place.
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
    # A directory of adapters has an adapter_config.json instead: the message then says which model it needs.
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
