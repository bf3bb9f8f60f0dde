"""Describes one attention call, by which a device decides which implementations can run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionCall:
    """Properties of a causal attention call that decide which implementations can run it.

    Args:
        query_shape: ``[B, h, S, d]``.
        kv_heads: g, the number of KV heads.
        masked: there is a mask in addition to causality.
        dropout_p: probability of dropping an attention weight.
        dtype: of query, key and value.
        packed: rows contain several documents, and attention is within each document.
        window: a query sees at most this many keys, its own included; None for all before it.
    """

    query_shape: tuple[int, ...]
    kv_heads: int
    masked: bool
    dropout_p: float
    dtype: torch.dtype
    packed: bool = False
    window: int | None = None

    @property
    def sequence_length(self) -> int:
        return self.query_shape[2]

    @property
    def head_dim(self) -> int:
        return self.query_shape[3]

    def unsuited(
        self,
        kernel: str,
        *,
        max_head_dim: int,
        head_dim_multiple: int = 1,
        sequence_multiple: int = 1,
        max_batch_heads: int | None = None,
        packs: bool = False,
    ) -> str | None:
        """Return why a flash kernel without mask and dropout cannot run the call, or None.

        Args:
            kernel: name for the message.
            max_head_dim: largest d.
            head_dim_multiple: d must be a multiple of this number.
            sequence_multiple: S must be a multiple of this number.
            max_batch_heads: largest B * h; None for no limit.
            packs: the kernel supports packed documents.
        """
        if self.dropout_p > 0:
            return f"{kernel} has no dropout, got {self.dropout_p}"
        if self.masked:
            return f"{kernel} takes no mask"
        if self.window is not None:
            return f"{kernel} takes no attention window of {self.window}, and a mask would materialise S x S scores"
        if self.packed and not packs:
            return f"{kernel} takes no packed documents"
        if self.head_dim > max_head_dim:
            return f"head size {self.head_dim} exceeds {kernel}'s {max_head_dim}"
        if self.head_dim % head_dim_multiple:
            return f"head size {self.head_dim} is not a multiple of {kernel}'s {head_dim_multiple}"
        batch, heads = self.query_shape[:2]
        if max_batch_heads is not None and batch * heads > max_batch_heads:
            return f"{batch} sequences of {heads} heads exceed {kernel}'s {max_batch_heads}: lower the micro-batch size"
        if self.sequence_length % sequence_multiple:
            padded = -(-self.sequence_length // sequence_multiple) * sequence_multiple
            return (
                f"sequence length {self.sequence_length} is not divisible by {kernel}'s "
                f"{sequence_multiple}: pad to {padded} to use it"
            )
        return None
