"""Steps that the tests of certify measure: 4 layers, S=1024, H=256, and smaller ones."""

from __future__ import annotations

from typing import Any

from nxd_memopt.certify.request import Request
from nxd_memopt.config import MemoryConfig, ParallelConfig

LLAMA = {"model_type": "llama", "num_key_value_heads": 4}
GPT_NEOX = {"model_type": "gpt_neox", "hidden_dropout": 0.0}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 509,  # prime: padded at every T above 1
}
FULL = {"recompute_granularity": "full"}
CORE_ATTN = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
MAX_RATIO = {"full": 0.42, "selective": 0.72}
"""Of the bytes held without recomputation, 4 layers of math attention at S=1024.

The largest measured with full recompute is 0.403; if recompute does not survive, it is about 1.
"""


def request(backend: str, config: dict[str, Any], memory: dict[str, Any], **changes: Any) -> Request:
    """T=1 in float32, S=1024, 2 and 4 layers, math attention; ``changes`` replace these, ``overrides`` the config."""
    modules = memory.get("recompute_modules")
    options: dict[str, Any] = {
        "config": {**SIZES, **config, **changes.pop("overrides", {})},
        "parallel": ParallelConfig(),
        "memory": MemoryConfig(
            **{"attention_backend": "math", **memory, "recompute_modules": modules and tuple(modules)}
        ),
        "sequence_length": 1024,
        "micro_batch_size": 1,
        "dtype": "float32",
        "backend": backend,
        "layer_counts": (2, 4),
    }
    return Request(**{**options, **changes})


def parallel(size: int, *, sequence: bool, **others: Any) -> ParallelConfig:
    return ParallelConfig(size, sequence, **others)
