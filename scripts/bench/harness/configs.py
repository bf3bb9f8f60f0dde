"""Published sizes of the models that benchmarks train, as transformers' configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import GPTNeoXConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

# Published sizes of the models. The tiny ones are for trying the program out on a CPU.
LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
QWEN3_MOE: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_MOE_TINY: dict[str, Any] = QWEN3_MOE | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "head_dim": 8,
    "vocab_size": 256,
}
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
    "qwen3-moe-tiny": lambda: Qwen3MoeConfig(**QWEN3_MOE_TINY),
    "llama-110m": lambda: LlamaConfig(
        num_hidden_layers=12, hidden_size=768, intermediate_size=2048, num_attention_heads=12
    ),
    "smollm2-135m": lambda: LlamaConfig(
        num_hidden_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    ),
    "llama3.2-1b": lambda: LlamaConfig(
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "llama3.2-3b": lambda: LlamaConfig(
        num_hidden_layers=28,
        hidden_size=3072,
        intermediate_size=8192,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "llama3-8b": lambda: LlamaConfig(**LLAMA3, num_hidden_layers=32),
    "llama3-8b-1l": lambda: LlamaConfig(**LLAMA3, num_hidden_layers=1),
    "gpt-neox-20b": GPTNeoXConfig,
    # Layers of Qwen3-30B-A3B and Mixtral 8x7B, as many as one GPU trains.
    "qwen3-moe-12l": lambda: Qwen3MoeConfig(**QWEN3_MOE),
    "mixtral-4l": lambda: MixtralConfig(
        num_hidden_layers=4,
        hidden_size=4096,
        intermediate_size=14336,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
    ),
}
