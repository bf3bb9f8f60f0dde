"""Reads from a Hugging Face config the sizes that the formulas need."""

from __future__ import annotations

from typing import Any

import torch

from nxd_memopt.certify.theory import StepShape
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.parallel_layers.fused_loss.chunks import chunk_ranges
from nxd_memopt.parallel_layers.fused_loss.linear_cross_entropy import DEFAULT_LOGITS_BYTES


def step_shape(
    config: Any,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    *,
    sequence_length: int,
    micro_batch_size: int,
    dtype: torch.dtype,
) -> StepShape:
    """Return the sizes of a training step of LLaMA or GPT-NeoX.

    Args:
        config: Hugging Face's ``LlamaConfig`` or ``GPTNeoXConfig``.
        parallel: T, sequence parallelism and the dtype of reductions.
        memory: parts of a layer that are recomputed separately.
        sequence_length: S, tokens per sequence.
        micro_batch_size: B, sequences per micro-batch.
        dtype: dtype of parameters and activations.
    """
    # With T greater than the number of KV heads g, r = T / g ranks have a replica of each KV head
    # and all-reduce its gradients. GPT-NeoX has no grouped-query attention, so r = 1.
    size, element_bytes = parallel.tensor_model_parallel_size, dtype.itemsize
    is_llama = config.model_type == "llama"
    kv_heads = _kv_heads(config) if is_llama else size
    replicas = max(1, size // kv_heads)
    return StepShape(
        num_layers=config.num_hidden_layers,
        blocks_per_layer=1 if not is_llama and _merges_branches(config, memory) else 2,
        hidden_size=config.hidden_size,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        element_bytes=element_bytes,
        tensor_model_parallel_size=size,
        sequence_parallel_enabled=parallel.sequence_parallel_enabled,
        reduce_dtype_bytes=4 if parallel.reduce_dtype == "float32" else element_bytes,
        kv_replicas=replicas,
        kv_gradient_bytes=_kv_gradients(config, element_bytes) if replicas > 1 else (),
        tagged_gradient_bytes=tuple(
            config.hidden_size * element_bytes for _ in range(_tagged_vectors(config, is_llama=is_llama))
        ),
        head_chunks=_head_chunks(config, parallel, sequence_length * micro_batch_size, dtype),
        row_output_dropout=not is_llama and config.hidden_dropout > 0,
    )


def _merges_branches(config: Any, memory: MemoryConfig) -> bool:
    """Return whether GPT-NeoX layers run attention and MLP as one merged block."""
    # The conditions of models/gpt_neox.py in training: parallel residual, no dropout after the
    # branches, and no separate recomputation of a branch.
    recomputed_apart = {"attn", "mlp"} & set(memory.recompute_modules or ())
    return config.use_parallel_residual and config.hidden_dropout == 0 and not recomputed_apart


def _head_chunks(config: Any, parallel: ParallelConfig, tokens: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the tokens of each chunk of the fused loss, of all ranks whose tokens are gathered."""
    size = parallel.tensor_model_parallel_size
    gathered = size if parallel.sequence_parallel_enabled else 1
    ranges = chunk_ranges(
        tokens // gathered,
        gathered=gathered,
        vocab=-(-config.vocab_size // size),
        exchanged=3 * config.hidden_size if size > 1 else 0,
        logits_bytes=DEFAULT_LOGITS_BYTES,
        element_bytes=dtype.itemsize,
    )
    return tuple((stop - start) * gathered for start, stop in ranges)


def _kv_heads(config: Any) -> int:
    """Return the number of key/value heads."""
    return getattr(config, "num_query_groups", None) or config.num_key_value_heads or config.num_attention_heads


def _kv_gradients(config: Any, element_bytes: int) -> tuple[int, ...]:
    """Return the bytes of each K and V gradient on a rank with a replicated KV head.

    The rank has one head: weights ``[d, H]`` of K and of V, and biases ``[d]``.
    """
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    biases = [head_dim * element_bytes] if config.attention_bias else []
    return tuple(2 * [head_dim * config.hidden_size * element_bytes, *biases])


def _tagged_vectors(config: Any, *, is_llama: bool) -> int:
    """Return the number of parameters ``[H]`` whose gradients are of one sequence shard.

    They are the weights (and biases) of norms and the biases of row-parallel layers.
    """
    # Two norms per layer and the final norm. LLaMA's RMSNorm has a weight, GPT-NeoX's LayerNorm a
    # weight and a bias.
    norms = 2 * config.num_hidden_layers + 1
    row_biases = (
        int(bool(config.attention_bias)) + int(bool(config.mlp_bias)) if is_llama else 1 + int(config.attention_bias)
    )
    return norms * (1 if is_llama else 2) + config.num_hidden_layers * row_biases
