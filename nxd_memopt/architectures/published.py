"""Sizes of published models by name, in any common spelling of the name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def _llama_3(context: int, rope_factor: float | None = None) -> dict[str, Any]:
    """Return the options that all sizes of a LLaMA 3 release have in common."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500000.0}
    # Releases from 3.1 on scale the frequencies for a context of 128k tokens.
    if rope_factor is not None:
        rope |= {"rope_type": "llama3", "factor": rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
    family = {"model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5}
    return family | {"max_position_embeddings": context, "rope_parameters": rope}


def sizes(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None = None, **others: Any
) -> dict[str, Any]:
    """Return sizes under the names that a ``config.json`` has for them."""
    found = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    if kv_heads is not None:
        found["num_key_value_heads"] = kv_heads
    return found | others


_TIED = {"tie_word_embeddings": True}
_LLAMA_2 = {"model_type": "llama", "vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
_MISTRAL = {"model_type": "mistral", "rms_norm_eps": 1e-5, "max_position_embeddings": 32768}
_MIXTRAL = {"model_type": "mixtral", "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "rope_theta": 1e6}
_EXPERTS_OF_2 = {"num_local_experts": 8, "num_experts_per_tok": 2}
# Tensors of the small sizes have 151,936 rows for 151,643 tokens, tensors of the large sizes 152,064.
_QWEN_25 = {"model_type": "qwen2", "rope_theta": 1e6, "max_position_embeddings": 131072}
_QWEN_25_SMALL = _QWEN_25 | {"vocab_size": 151936, "rms_norm_eps": 1e-6}
_QWEN_25_LARGE = _QWEN_25 | {"vocab_size": 152064, "rms_norm_eps": 1e-5}
_32K = {"max_position_embeddings": 32768}
_QWEN_3 = {"model_type": "qwen3", "vocab_size": 151936, "rms_norm_eps": 1e-6, "head_dim": 128}
_QWEN_3 |= {"rope_theta": 1e6, "max_position_embeddings": 40960}
_EXPERTS_OF_8 = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}

_PHI_3 = {"model_type": "phi3", "vocab_size": 32064, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
_GRANITE_33 = {"model_type": "granite", "vocab_size": 49159, "rms_norm_eps": 1e-5, "rope_theta": 1e7}
_GRANITE_33 |= {"max_position_embeddings": 131072, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}

# The numbers are hidden size, MLP width, layers, query heads and KV heads. The sizes of LLaMA, Mistral, Phi-3, Qwen and
# SmolLM2 equal litgpt's table (litgpt/config.py), which states the same facts for its own loader, and
# tests/planner/test_published.py compares the parameters that follow from them with the published numbers.
NAMED_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt-neox-20b": {"model_type": "gpt_neox", "max_position_embeddings": 2048, "rotary_pct": 0.25}
    | sizes(6144, 24576, 44, 64, vocab_size=50432),
    "granite-3.3-2b-instruct": _GRANITE_33
    | sizes(2048, 8192, 40, 32, 8, attention_multiplier=0.015625, logits_scaling=8.0)
    | _TIED,
    "granite-3.3-8b-instruct": _GRANITE_33
    | sizes(4096, 12800, 40, 32, 8, attention_multiplier=0.0078125, logits_scaling=16.0)
    | _TIED,
    "llama-2-7b": _LLAMA_2 | sizes(4096, 11008, 32, 32, 32),
    "llama-3-8b": _llama_3(8192) | sizes(4096, 14336, 32, 32, 8),
    "llama-3-70b": _llama_3(8192) | sizes(8192, 28672, 80, 64, 8),
    "llama-3.1-8b": _llama_3(131072, 8.0) | sizes(4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _llama_3(131072, 8.0) | sizes(8192, 28672, 80, 64, 8),
    "llama-3.2-1b": _llama_3(131072, 32.0) | sizes(2048, 8192, 16, 32, 8, head_dim=64) | _TIED,
    "llama-3.2-3b": _llama_3(131072, 32.0) | sizes(3072, 8192, 28, 24, 8, head_dim=128) | _TIED,
    "llama-3.3-70b": _llama_3(131072, 8.0) | sizes(8192, 28672, 80, 64, 8),
    "mistral-7b-v0.1": _MISTRAL | sizes(4096, 14336, 32, 32, 8, vocab_size=32000, sliding_window=4096, rope_theta=1e4),
    "mistral-7b-v0.3": _MISTRAL | sizes(4096, 14336, 32, 32, 8, vocab_size=32768, sliding_window=None, rope_theta=1e6),
    "mixtral-8x7b": _MIXTRAL | sizes(4096, 14336, 32, 32, 8, vocab_size=32000, sliding_window=None) | _EXPERTS_OF_2,
    "phi-3-mini-4k-instruct": _PHI_3
    | sizes(3072, 8192, 32, 32, 32, sliding_window=2047, max_position_embeddings=4096, pad_token_id=32000),
    "qwen2.5-0.5b": _QWEN_25_SMALL | sizes(896, 4864, 24, 14, 2) | _TIED | _32K,
    "qwen2.5-1.5b": _QWEN_25_SMALL | sizes(1536, 8960, 28, 12, 2) | _TIED,
    "qwen2.5-3b": _QWEN_25_SMALL | sizes(2048, 11008, 36, 16, 2) | _TIED | _32K,
    "qwen2.5-7b": _QWEN_25_LARGE | sizes(3584, 18944, 28, 28, 4, rms_norm_eps=1e-6),
    "qwen2.5-14b": _QWEN_25_LARGE | sizes(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _QWEN_25_LARGE | sizes(5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _QWEN_25_LARGE | sizes(8192, 29568, 80, 64, 8),
    "qwen3-0.6b": _QWEN_3 | sizes(1024, 3072, 28, 16, 8) | _TIED,
    "qwen3-1.7b": _QWEN_3 | sizes(2048, 6144, 28, 16, 8) | _TIED,
    "qwen3-4b": _QWEN_3 | sizes(2560, 9728, 36, 32, 8) | _TIED,
    "qwen3-8b": _QWEN_3 | sizes(4096, 12288, 36, 32, 8),
    "qwen3-14b": _QWEN_3 | sizes(5120, 17408, 40, 40, 8),
    "qwen3-32b": _QWEN_3 | sizes(5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": _QWEN_3 | {"model_type": "qwen3_moe"} | sizes(2048, 6144, 48, 32, 4) | _EXPERTS_OF_8,
    "smollm2-135m": _SMOLLM2 | sizes(576, 1536, 30, 9, 3, rope_theta=1e5) | _TIED,
}
"""Published model configurations, with the keys of the models' ``config.json``."""

_UNVERSIONED = {"mistral-7b": "mistral-7b-v0.1", "mixtral-8x7b-v0.1": "mixtral-8x7b"}


def spelled(name: str, names: Iterable[str]) -> str | None:
    """Return which of ``names`` a name spells, whatever its case and separators; None if it is none of them.

    A repository of the Hugging Face Hub spells its last part: ``meta-llama/Llama-3.1-8B`` is ``llama-3.1-8b``.
    """
    by_letters = {_letters(each): each for each in names}
    return by_letters.get(_letters(name))


def published_name(name: str) -> str | None:
    """Return the key of ``NAMED_CONFIGS`` that a name spells, or None."""
    found = spelled(name, [*NAMED_CONFIGS, *_UNVERSIONED])
    return _UNVERSIONED.get(found or "", found)


def _letters(name: str) -> str:
    last = name.lower().rpartition("/")[2].removeprefix("meta-")
    # LLaMA's chat models have all sizes of their base models. Qwen's have another context.
    if last.startswith("llama"):
        last = re.sub(r"-(instruct|chat|hf)(?=-|$)", "", last)
    return re.sub(r"[-_. ]", "", last)
