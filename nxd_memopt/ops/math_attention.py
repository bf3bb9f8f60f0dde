"""Reference attention, which materialises S x S scores, and boolean masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    scale: float | None = None,
) -> Tensor:
    """Return attention from materialised ``[B, h, S, S]`` scores; softmax in fp32, or fp64 for fp64.

    Arguments as in ``ops.attention.core_attention``; ``mask`` is boolean, or None for causality alone.
    """
    repeats = query.size(1) // key.size(1)
    key = key.repeat_interleave(repeats, dim=1)
    value = value.repeat_interleave(repeats, dim=1)
    if mask is None:
        mask = causal_mask(query.size(2), query.device)
    scores = scaled_scores(query, key, query.dtype, scale)
    # the least number, not -inf: a row that is masked everywhere would be NaN
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    # A bf16 sum over S exponentials would lose the small ones. With NEURON_FUSE_SOFTMAX, torch-neuronx
    # replaces F.softmax, and not torch.softmax, by one operation of its compiler.
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = F.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    return F.dropout(weights, dropout_p) @ value


def scaled_scores(query: Tensor, key: Tensor, dtype: torch.dtype, scale: float | None = None) -> Tensor:
    """Return ``scale Q K^t``, or ``Q K^t / sqrt(d)``, in ``dtype``, of ``[..., S, d]`` and ``[..., S_k, d]``."""
    key = key.transpose(-1, -2)
    if scale is None:
        scale = float(query.size(-1) ** -0.5)
    if query.dtype == torch.float16:
        # The product alone exceeds the largest fp16 number, 65,504, at scores of 5,800 for d = 128.
        root = scale**0.5
        return ((query * root) @ (key * root)).to(dtype)
    return (query @ key).to(dtype) * scale


def causal_mask(sequence_length: int, device: torch.device) -> Tensor:
    """Boolean ``[S, S]``, True where key position <= query position."""
    return torch.ones(sequence_length, sequence_length, dtype=torch.bool, device=device).tril()


def window_mask(sequence_length: int, window: int | None, device: torch.device) -> Tensor:
    """``causal_mask`` whose queries see the last ``window`` keys, their own included; None for all."""
    mask = causal_mask(sequence_length, device)
    return mask if window is None else mask.triu(1 - window)


def padding_and_causal_mask(attention_mask: Tensor) -> Tensor:
    """Boolean ``[B, 1, S, S]`` from a padding mask ``[B, S]`` (non-zero: keep).

    A padded query sees itself, so that no row is empty; its output is to be ignored.
    """
    keep = attention_mask.bool()[:, None, None, :]
    causal = causal_mask(attention_mask.size(1), attention_mask.device)
    itself = torch.eye(attention_mask.size(1), dtype=torch.bool, device=attention_mask.device)
    # [B, 1, 1, S] & [S, S] -> [B, 1, S, S]
    return (keep & causal) | itself
