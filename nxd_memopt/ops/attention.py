"""Owns core attention on local heads: the plain reference and PyTorch's fused kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.config import ATTENTION_BACKENDS, require_one_of


def select_attention(attention_backend: str) -> str:
    """The implementation that runs; ``"auto"`` is the device's first choice. ``ValueError`` for an unknown name."""
    require_one_of("attention_backend", attention_backend, ATTENTION_BACKENDS)
    return backend.attention_implementations[0] if attention_backend == "auto" else attention_backend


def core_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    implementation: str,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention, ``softmax(Q K^t / sqrt(d)) V``; query head i reads KV head ``i // (h/g)``.

    Args:
        query: ``[B, h, S, d]``.
        key: ``[B, g, S, d]``, g divides h.
        value: ``[B, g, S, d]``.
        implementation: ``"sdpa"``, or ``"math"``, which materialises ``[B, h, S, S]``.
        mask: boolean ``[B, 1, S, S]``, True where a query may look, causality included; ``None``: causal alone.
        dropout_p: probability of dropping an attention weight.

    Returns:
        ``[B, h, S, d]``.
    """
    if implementation == "math":
        return _reference_attention(query, key, value, mask, dropout_p)
    is_causal, gqa = mask is None, query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=gqa
    )


def _reference_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    repeats = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    if mask is None:
        mask = causal_mask(query.size(2), query.device)
    scores = query @ key.transpose(-1, -2) * query.size(-1) ** -0.5
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    return F.dropout(weights, dropout_p) @ value


def causal_mask(sequence_length: int, device: torch.device) -> Tensor:
    """Boolean ``[S, S]``, True where key position <= query position."""
    return torch.ones(sequence_length, sequence_length, dtype=torch.bool, device=device).tril()


def padding_and_causal_mask(attention_mask: Tensor) -> Tensor:
    """Boolean ``[B, 1, S, S]`` from a padding mask ``[B, S]`` (non-zero: keep).

    A padded query sees itself, so that no row is empty; its output is to be ignored.
    """
    keep = attention_mask.bool()[:, None, None, :]
    causal = causal_mask(attention_mask.size(1), attention_mask.device)
    itself = torch.eye(attention_mask.size(1), dtype=torch.bool, device=attention_mask.device)
    return (keep & causal) | itself
