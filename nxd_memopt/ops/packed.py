"""Packed sequences: several documents in one row, separated in attention without a mask tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedDocuments:
    """Boundaries of the documents of a batch.

    Args:
        boundaries: ``[N + 1]``, int32: the start of each of N documents in the batch's B * S
            tokens, row after row, and B * S at the end. Equal neighbours are empty documents, which
            can pad the tensor to a fixed length.
        ids: ``[B, S]``, the number of each token's document.
        position_ids: ``[B, S]``, int64, the position of each token in its document; None computes
            it on the device.
    """

    boundaries: Tensor
    ids: Tensor
    position_ids: Tensor | None = None

    @classmethod
    def of(cls, cu_seqlens: Tensor, batch_size: int, sequence_length: int) -> PackedDocuments:
        """Create from cumulative lengths, as in FlashAttention's ``cu_seqlens``.

        Args:
            cu_seqlens: ``[N + 1]`` integers.
            batch_size: B.
            sequence_length: S.

        Raises:
            ValueError: ``cu_seqlens`` is not one-dimensional integers. On the CPU also if the
                numbers do not divide the rows into documents; on other devices this check would
                stall the device.
        """
        if cu_seqlens.dim() != 1 or cu_seqlens.size(0) < 2 or cu_seqlens.is_floating_point():
            got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            raise ValueError(f"cu_seqlens must be integers [N + 1], got {got}")
        total = batch_size * sequence_length
        if cu_seqlens.device.type == "cpu":
            _check(cu_seqlens, total, sequence_length)
        # [B * S + 1]: the last element is for documents that end with the batch
        starts = torch.zeros(total + 1, dtype=torch.int64, device=cu_seqlens.device)
        ends = cu_seqlens[1:].to(torch.int64)
        # A token's document number is the number of documents that ended before it. index_add
        # counts documents that end at the same token (empty ones), so their numbers are skipped.
        ids = starts.index_add(0, ends, torch.ones_like(ends)).cumsum(0)[:total]
        return cls(cu_seqlens.to(torch.int32).contiguous(), ids.view(batch_size, sequence_length))

    @classmethod
    def from_starts(cls, starts: Tensor, num_boundaries: int) -> PackedDocuments:
        """Create on the host, with all tensors computed: the device runs no scan and no scatter.

        Args:
            starts: boolean ``[B, S]``, True at the first token of each document; the first token
                of a row always starts one.
            num_boundaries: length of ``boundaries``, the same for every batch, so that shapes do
                not change: at least the number of documents + 1.

        Raises:
            ValueError: there are more documents.
        """
        starts = starts.clone()
        starts[:, 0] = True
        flat = starts.view(-1)
        first_tokens = flat.nonzero().view(-1)
        if len(first_tokens) >= num_boundaries:
            raise ValueError(f"{len(first_tokens)} documents need as many boundaries + 1, got {num_boundaries}")
        boundaries = torch.full((num_boundaries,), flat.numel(), dtype=torch.int32)
        boundaries[: len(first_tokens)] = first_tokens
        ids = flat.cumsum(0) - 1
        positions = torch.arange(flat.numel()) - first_tokens[ids]
        return cls(boundaries, ids.view_as(starts), positions.view_as(starts))

    def to(self, device: torch.device) -> PackedDocuments:
        """Return a copy on ``device``."""
        positions = self.position_ids
        if positions is not None:
            positions = positions.to(device)
        return PackedDocuments(self.boundaries.to(device), self.ids.to(device), positions)

    def positions(self) -> Tensor:
        """Return the position of each token in its document, ``[B, S]``."""
        if self.position_ids is not None:
            return self.position_ids
        tokens = torch.arange(self.ids.numel(), device=self.ids.device).view_as(self.ids)
        return tokens - self.boundaries[self.ids]

    def mask(self) -> Tensor:
        """Return a boolean mask ``[B, 1, S, S]``, True for two tokens of one document.

        The mask is symmetric, without causality. The reference implementation uses it.
        """
        return (self.ids.unsqueeze(-1) == self.ids.unsqueeze(-2)).unsqueeze(1)


def packed_documents(
    cu_seqlens: Tensor | PackedDocuments,
    input_ids: Tensor,
    attention_mask: Tensor | None,
) -> PackedDocuments:
    """Return the documents of a model's arguments.

    Raises:
        ValueError: ``attention_mask`` is given too, or the documents are of another batch shape.
    """
    if attention_mask is not None:
        raise ValueError("cu_seqlens and attention_mask exclude each other: make the padding a document of its own")
    if not isinstance(cu_seqlens, PackedDocuments):
        return PackedDocuments.of(cu_seqlens, *input_ids.shape)
    if cu_seqlens.ids.shape != input_ids.shape:
        shapes = f"{list(cu_seqlens.ids.shape)}, input_ids {list(input_ids.shape)}"
        raise ValueError(f"the packed documents have shape {shapes}: must agree")
    return cu_seqlens


def _check(cu_seqlens: Tensor, total: int, sequence_length: int) -> None:
    """Raise ``ValueError`` unless the numbers divide each row of the batch into documents."""
    first = int(cu_seqlens[0])
    last = int(cu_seqlens[-1])
    if first != 0 or last != total:
        raise ValueError(f"cu_seqlens must go from 0 to the batch's {total} tokens, got {first} to {last}")
    if bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must not decrease, got {cu_seqlens.tolist()}")
    # the first token of each row must be a boundary
    rows = torch.arange(0, total, sequence_length, dtype=cu_seqlens.dtype)
    crossed = rows[~torch.isin(rows, cu_seqlens)].tolist()
    if crossed:
        raise ValueError(f"a document crosses the start of a row, token {crossed[0]}: cu_seqlens must have it")


def varlen_attention() -> Callable[..., Any] | None:
    """Return PyTorch's flash attention for packed documents, or None before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention within each document, with the kernel for variable lengths.

    Args:
        query: ``[B, h, S, d]``.
        key: ``[B, g, S, d]``.
        value: ``[B, g, S, d]``.
        documents: of the batch.
        scale: factor of the scores; None for ``1 / sqrt(d)``.

    Returns:
        ``[B, h, S, d]``.
    """
    attend = varlen_attention()
    assert attend is not None
    # torch 2.10 has is_causal, later versions have windows. Causal is a window without limit to
    # the left and of 0 to the right.
    known = inspect.signature(attend).parameters
    options: dict[str, Any] = {"is_causal": True}
    if "window_size" in known:
        options = {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = query.size(1) != key.size(1)
    if "scale" in known:
        options["scale"] = scale
    elif scale is not None:
        query = query * (scale * query.size(-1) ** 0.5)  # torch 2.10's kernel divides by sqrt(d)
    # the batch's rows become one row of B * S tokens with N documents
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [B * S, heads, d]
    longest = query.size(2)
    output = attend(*flat, documents.boundaries, documents.boundaries, longest, longest, **options)
    return output.unflatten(0, (query.size(0), longest)).transpose(1, 2)


def attention_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Call ``attend`` for each document separately; for the CPU, where lengths are known.

    Args:
        query: ``[B, h, S, d]``.
        key: ``[B, g, S, d]``.
        value: ``[B, g, S, d]``.
        documents: of the batch.
        attend: takes query, key and value of one document, ``[1, heads, length, d]``.

    Returns:
        ``[B, h, S, d]``.
    """
    sequence_length = query.size(2)
    # No document crosses a row, so each row's outputs concatenate along S in the order of its
    # documents. The work is the sum of length^2 over the documents, not B * S^2.
    outputs: list[list[Tensor]] = [[] for _ in range(query.size(0))]
    for start, stop in pairwise(documents.boundaries.tolist()):
        if stop <= start:
            continue  # an empty document, which pads the boundaries
        row, first = divmod(start, sequence_length)
        document = [x[row : row + 1].narrow(2, first, stop - start) for x in (query, key, value)]
        outputs[row].append(attend(*document))
    return torch.cat([torch.cat(row_outputs, dim=2) for row_outputs in outputs])
