"""Resolves a model's name, file or directory to a Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxd_memopt.config import require_one_of

NAMED_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt-neox-20b": {
        "model_type": "gpt_neox",
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "vocab_size": 50432,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "llama-2-7b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
}
"""Published model configurations, with the keys of the models' ``config.json``."""


def load_model_config(model: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a Hugging Face model configuration as a dictionary.

    Args:
        model: name from ``NAMED_CONFIGS``, path of a ``config.json``, or a directory with one.
        overrides: changes ``KEY=VALUE``; a value is parsed as JSON, or taken as text otherwise.

    Raises:
        ValueError: the name is unknown, or an override has no ``=``.
    """
    if model in NAMED_CONFIGS:
        # A copy, because the overrides must not change the table.
        config = dict(NAMED_CONFIGS[model])
    else:
        config = _read_config(model)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"--override {override!r} is not KEY=VALUE, such as num_hidden_layers=4")
        # JSON first, so that numbers, true and null have their types; a bare word is text.
        config[key] = _value(value)
    return config


def _read_config(model: str) -> dict[str, Any]:
    """Return the JSON of a configuration file, or raise ``ValueError`` with the known names."""
    file = Path(model)
    if file.is_dir():
        file = file / "config.json"
    # Neither a name nor a file: most likely a misspelt name, so the message lists the known ones.
    if not file.is_file():
        require_one_of("model", model, tuple(NAMED_CONFIGS))
    return json.loads(file.read_text(encoding="utf-8"))


def _value(text: str) -> Any:
    """Return ``text`` parsed as JSON, or ``text`` itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
