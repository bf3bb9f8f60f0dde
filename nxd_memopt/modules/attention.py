"""The parameter-free attention core, and the layout of heads around it."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.ops.attention import attention_dtype, attention_implementation, core_attention, select_attention
from nxd_memopt.ops.cuda.support import unavailable_reason
from nxd_memopt.ops.packed import PackedDocuments
from nxd_memopt.parallel_layers.base_linear import bypassed_layer
from nxd_memopt.parallel_layers.fusion import FusedPath, FusibleModule
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear
from nxd_memopt.parallel_layers.random import get_rng_tracker

RopeTables = tuple[Tensor, Tensor]
"""Cosine and sine, ``[B, S, rotary_dim]`` or ``[1, S, rotary_dim]`` each."""
AttentionMask = Tensor | PackedDocuments | None
"""Mask in addition to causality: padding ``[B, 1, S, S]``, packed documents, or None."""


class CoreAttention(FusibleModule):
    """Causal attention on this rank's heads.

    Selective recompute (arXiv:2205.05198) recomputes this module.

    Args:
        attention_backend: ``attention_backend`` of ``MemoryConfig``.
        head_dim: d.
        dropout: probability of dropping an attention weight.
        sharded: heads are split over ranks, so each rank draws its own dropout mask.
        window: a query sees at most this many keys, its own included; None for all before it.
        scale: factor of the scores; None for ``1 / sqrt(d)``.
    """

    def __init__(
        self,
        *,
        attention_backend: str,
        head_dim: int,
        dropout: float,
        sharded: bool,
        window: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.implementation = select_attention(attention_backend, dropout, head_dim=head_dim, window=window)
        self.window = window
        self.scale = scale
        self.attention_backend = attention_backend
        self.dropout = dropout
        self.sharded = sharded

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        """Attend from ``[B, h/T, S, d]`` to keys and values ``[B, g/T, S, d]``."""
        dropout_p = self.dropout if self.training else 0.0
        window = self.window_of(query.size(2))
        # Selected in each call: shapes, dtype and mask decide which kernels can run, and a model
        # may be called with several of them.
        implementation, _ = attention_implementation(
            query.shape,
            key.size(1),
            dtype=attention_dtype(query),
            masked=isinstance(mask, Tensor),
            packed=isinstance(mask, PackedDocuments),
            dropout_p=dropout_p,
            attention_backend=self.attention_backend,
            window=window,
        )
        # Ranks have different heads, which need different masks: draw from this rank's stream.
        stream = get_rng_tracker().fork() if self.sharded and dropout_p > 0 else nullcontext()
        with stream:
            return core_attention(
                query,
                key,
                value,
                implementation=implementation,
                mask=mask,
                dropout_p=dropout_p,
                window=window,
                scale=self.scale,
            )

    def window_of(self, sequence_length: int) -> int | None:
        """Return the window of a sequence; None if the sequence fits it, which runs on any kernel."""
        return None if self.window is None or sequence_length <= self.window else self.window


def split_heads(x: Tensor, head_dim: int, *, sequence_first: bool) -> Tensor:
    """View ``[B, S, h*d]`` (``[S, B, h*d]`` if ``sequence_first``) as ``[B, h, S, d]``."""
    # Views only: attention kernels accept strides, and the last dimension stays contiguous.
    heads = x.unflatten(-1, (-1, head_dim))
    if sequence_first:
        return heads.permute(1, 2, 0, 3)
    return heads.transpose(1, 2)


def merge_heads(x: Tensor, *, sequence_first: bool) -> Tensor:
    """Merge ``[B, h, S, d]`` into ``[B, S, h*d]`` or ``[S, B, h*d]``; undo ``split_heads``."""
    # A view if the kernel wrote its output in this layout, else flatten copies once.
    if sequence_first:
        return x.permute(2, 0, 1, 3).flatten(-2)
    return x.transpose(1, 2).flatten(-2)


def in_place_rope_path(owner: FusibleModule, *projections: str) -> FusedPath:
    """Return the fused path that rotates queries and keys in place, in the memory of ``projections``' outputs.

    Nothing else may read q, k, v or their gradients, which are overwritten too: a hook on a
    projection or on ``core_attn`` could keep them.
    """
    # core_attn is not bypassed, but it reads q, k and v: a hook on it would see, or keep, tensors
    # that are overwritten later.
    observers: dict[str, type[nn.Module]] = {"core_attn": CoreAttention}
    for name in projections:
        observers |= bypassed_layer(owner, name, ColumnParallelLinear)
    return FusedPath(
        owner, "in-place RoPE", observers, cost="q, k and v are copied", unavailable=unavailable_reason(backend.device)
    )
