"""Applies ``model.config_overrides`` to a Hugging Face configuration; refuses unknown names and wrong types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from nxd_memopt.architectures.config_options import reads
from nxd_memopt.checkpoint.huggingface.hf_config import config_errors
from nxd_memopt.options import nearest

OWN_OPTIONS = ("num_query_groups",)
"""Options that this library's models read and that are no fields of transformers' configurations."""

# Older names that transformers still converts when a configuration is constructed: of all models, and of one.
OLDER_NAMES = ("rope_scaling", "torch_dtype")
OLDER_NAMES_OF = {
    "gpt_neox": ("rotary_emb_base", "rotary_pct"),
    "phi3": ("rope_theta", "partial_rotary_factor"),
}
LENGTH = "original_max_position_embeddings"
# Older names for entries of rope_parameters, which transformers ignores next to rope_parameters.
ROPE_ENTRIES = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "partial_rotary_factor": "partial_rotary_factor",
}


def config_from_overrides(model_type: str, overrides: Mapping[str, Any]) -> PretrainedConfig:
    """Return the configuration of ``model_type`` with the values of ``overrides``.

    Raises:
        ValueError: a name is unknown, a value has the wrong type, or the values do not fit each
            other.
    """
    require_known_names(model_type, overrides)
    return _construct(model_type, dict(overrides))


def override_config(config: PretrainedConfig, overrides: Mapping[str, Any]) -> PretrainedConfig:
    """Return a copy of a pretrained model's ``config`` with the values of ``overrides``.

    Raises:
        ValueError: as for ``config_from_overrides``.
    """
    if not overrides:
        return config
    require_known_names(config.model_type, overrides)
    # Under the name that to_dict() uses: two names of one value would both be in the mapping.
    changed = {config.attribute_map.get(name, name): value for name, value in overrides.items()}
    values = config.to_dict() | changed
    values["rope_parameters"] = _rope_parameters(config, changed)
    for name in ("rope_scaling", *ROPE_ENTRIES):
        values.pop(name, None)
    # transformers prefers an entry at the file's top level to the new one in rope_parameters.
    if LENGTH in (changed.get("rope_parameters") or changed.get("rope_scaling") or ()):
        values.pop(LENGTH, None)
    # Constructed again instead of assigned to: values that transformers derives from others are
    # derived again, unless the file or the overrides set them otherwise.
    for name, derived in _derived(config).items():
        if name not in changed and getattr(config, name, None) == derived:
            values.pop(name, None)
    result = _construct(config.model_type, values)
    result._name_or_path = config._name_or_path
    return result


def _rope_parameters(config: PretrainedConfig, overrides: Mapping[str, Any]) -> Any:
    """Return ``rope_parameters`` after ``overrides``, which may have an older name for a part of it."""
    before = dict(getattr(config, "rope_parameters", None) or {})
    rope: Any = before
    if "rope_parameters" in overrides or "rope_scaling" in overrides:
        rope = overrides.get("rope_parameters", overrides.get("rope_scaling"))
        if rope is None:
            rope = {}
    # Not a mapping: transformers' check has the message.
    if not isinstance(rope, Mapping):
        return rope
    # The base frequency and the rotated fraction belong to the weights, whatever scaling is set.
    kept = {name: before[name] for name in set(ROPE_ENTRIES.values()) if name in before}
    older = {entry: overrides[name] for name, entry in ROPE_ENTRIES.items() if name in overrides}
    return kept | dict(rope) | older


def _derived(config: PretrainedConfig) -> dict[str, int]:
    """Return the values that a configuration without them gets from other values."""
    heads = config.num_attention_heads
    values = {"num_key_value_heads": heads, "head_dim": config.hidden_size // heads}
    # Mixtral and Qwen3-MoE have a number of KV heads of their own as the default.
    defaults = {field.name: field.default for field in dataclasses.fields(type(config))}
    return {name: value for name, value in values.items() if defaults.get(name) is None}


def require_known_names(model_type: str, overrides: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a name that the configuration class does not have.

    transformers accepts every name: it would store a misspelt one and use the default.
    """
    cls = CONFIG_MAPPING[model_type]
    fields = [field.name for field in dataclasses.fields(cls)]
    older = (*OLDER_NAMES, *OLDER_NAMES_OF.get(model_type, ("rope_theta",)))
    known = ["model_type", *fields, *cls.attribute_map, *older, *OWN_OPTIONS]
    # Some models read head_dim although it is no field of their configuration.
    if reads({"model_type": model_type}, "head_dim"):
        known.append("head_dim")
    for name in overrides:
        if name in known:
            continue
        remedy = nearest(name, known) or f": leave it out, or name an option of {cls.__name__}"
        raise ValueError(f"unknown key {name!r} in model.config_overrides, model_type {model_type!r}{remedy}")


def _construct(model_type: str, values: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration of ``values``, with transformers' errors as ``ValueError``."""
    values.pop("model_type", None)
    with config_errors("model.config_overrides"):
        return CONFIG_MAPPING[model_type](**values)
