"""Sizes of the models that benchmarks train, as transformers' configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, GPTNeoXConfig, LlamaConfig

from nxd_memopt.architectures.published import NAMED_CONFIGS


def _published(name: str, **changes: Any) -> Any:
    """Return the config of a published model, with other values for ``changes``."""
    values = NAMED_CONFIGS[name] | changes
    return AutoConfig.for_model(**values)


# The tiny ones are for trying the program out on a CPU.
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-tiny": lambda: LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=256,
    ),
    "neox-tiny": lambda: GPTNeoXConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=8, vocab_size=256
    ),
    "qwen3-moe-tiny": lambda: _published(
        "qwen3-30b-a3b",
        num_hidden_layers=2,
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=8,
        head_dim=8,
        vocab_size=256,
    ),
    "llama-110m": lambda: LlamaConfig(
        num_hidden_layers=12, hidden_size=768, intermediate_size=2048, num_attention_heads=12
    ),
    "smollm2-135m": lambda: _published("smollm2-135m"),
    "llama3.2-1b": lambda: _published("llama-3.2-1b"),
    "llama3.2-3b": lambda: _published("llama-3.2-3b"),
    "llama3-8b": lambda: _published("llama-3-8b"),
    "llama3-70b": lambda: _published("llama-3-70b"),
    "llama3-8b-1l": lambda: _published("llama-3-8b", num_hidden_layers=1),
    "gpt-neox-20b": lambda: _published("gpt-neox-20b"),
    # Layers of Qwen3-30B-A3B and Mixtral 8x7B, as many as one GPU trains.
    "qwen3-moe-12l": lambda: _published("qwen3-30b-a3b", num_hidden_layers=12),
    "mixtral-4l": lambda: _published("mixtral-8x7b", num_hidden_layers=4),
}
