"""The tensors of one forward and backward: token ids, labels, document bounds and the loss's divisor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.modules.causal_lm import IGNORE_INDEX
from nxd_memopt.ops.packed import PackedDocuments
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packing import DOCUMENT_START, ID_MASK, NOT_TRAINED, PADDING, Tokens, trained_tokens


class Sequences(Protocol):
    """Packed sequences of training: ``PackedSequences``, ``MixedSequences``."""

    @property
    def documents_per_row(self) -> int: ...

    def rows(self, positions: range) -> Tokens: ...


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one forward pass; shapes and dtypes are the same in every step.

    Args:
        ids: token ids, ``[B, S]``, int64.
        labels: ``ids``, or ``IGNORE_INDEX`` where a token is not predicted, ``[B, S]``, int64.
        divisor: the sum of the token losses is divided by it, ``[1]``, fp32. A tensor of one
            dimension: torch_xla makes a number, and a 0-dim tensor, a constant of the graph.
        documents: isolated documents, or None if tokens attend to all of their row.
        token_mask: ``[B, S]`` bool, False for padding, which routers of experts do not count; None
            if there is none.
    """

    ids: Tensor
    labels: Tensor
    divisor: Tensor
    documents: PackedDocuments | None = None
    token_mask: Tensor | None = None

    @classmethod
    def of(
        cls, rows: Tokens, *, divisor: float, num_boundaries: int | None = None, has_padding: bool = False
    ) -> MicroBatch:
        """Create on the host from packed rows.

        Args:
            rows: ``[B, S]``, with the flags of ``packing``.
            divisor: of the sum of token losses.
            num_boundaries: documents per batch + 1 at most; None if documents are not isolated.
            has_padding: whether rows may have padding, so that the batch has a token mask.
        """
        records = torch.from_numpy(rows.astype(np.int64))
        ids = records & ID_MASK
        # Ids and flags share one number: a row can never have the flags of another one.
        starts = (records & DOCUMENT_START) != 0
        ignored = (records & NOT_TRAINED) != 0
        # Questions of a conversation are not trained either, but they are tokens.
        token_mask = (records & PADDING) == 0 if has_padding else None
        documents = None
        if num_boundaries is not None:
            documents = PackedDocuments.from_starts(starts, num_boundaries)
            # The last token of a document does not predict the first one of the next.
            ignored = ignored | starts
        labels = ids.masked_fill(ignored, IGNORE_INDEX)
        return cls(ids, labels, torch.tensor([divisor], dtype=torch.float32), documents, token_mask)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on ``device``."""
        documents = None
        if self.documents is not None:
            documents = self.documents.to(device)
        token_mask = None
        if self.token_mask is not None:
            token_mask = self.token_mask.to(device)
        return MicroBatch(self.ids.to(device), self.labels.to(device), self.divisor.to(device), documents, token_mask)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors of a dense model, for a CUDA graph; ``from_tensors`` is the inverse."""
        if self.documents is None:
            return self.ids, self.labels, self.divisor
        documents = self.documents
        return self.ids, self.labels, self.divisor, documents.boundaries, documents.ids, documents.positions()

    @classmethod
    def from_tensors(cls, ids: Tensor, labels: Tensor, divisor: Tensor, *documents: Tensor) -> MicroBatch:
        """Return the micro-batch of ``tensors()``."""
        if not documents:
            return cls(ids, labels, divisor)
        return cls(ids, labels, divisor, PackedDocuments(*documents))

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of a forward of any of the models; the loss is a sum divided by ``divisor``."""
        return {
            "input_ids": self.ids,
            "labels": self.labels,
            "cu_seqlens": self.documents,
            "num_items_in_batch": self.divisor,
        }

    def loss(self, model: Callable[..., object]) -> Tensor:
        """Return the sum of the token losses divided by ``divisor``, 0-dim, fp32; 0 without trained tokens."""
        return model(**self.inputs()).loss  # pyright: ignore[reportAttributeAccessIssue]


def micro_batches(data: DataConfig, tokens: Sequences, first: int) -> list[MicroBatch]:
    """Return this data-parallel rank's micro-batches of one step, on the device.

    Their losses, averaged over the data-parallel ranks as gradients are, add up to the sum of the
    step's token losses divided by the step's trained tokens.

    Args:
        data: sizes, and whether documents are isolated.
        tokens: rows of training.
        first: rows of the stream that earlier steps have consumed.
    """
    # Every rank counts the trained tokens of all ranks' rows, on the host: no collective, and no
    # wait for the device. Gradients are averaged over D ranks, so the divisor is N / D.
    replicas = parallel_state.get_data_parallel_size()
    step_rows = tokens.rows(range(first, first + data.global_batch_size))
    trained = trained_tokens(step_rows, isolated=data.isolate_documents)
    divisor = max(trained, 1) / replicas
    # Tensor-parallel ranks of one replica have the same data-parallel rank, so they read the same
    # sequences from the file and need no broadcast.
    rank = parallel_state.get_data_parallel_rank()
    num_boundaries = boundaries_per_batch(data, tokens)
    batches = []
    for micro_step in range(data.accumulation_steps(replicas)):
        rows = step_rows[micro_batch_rows(data, micro_step=micro_step, rank=rank, replicas=replicas)]
        batch = MicroBatch.of(
            rows, divisor=divisor, num_boundaries=num_boundaries, has_padding=data.packing == "best_fit"
        )
        batches.append(batch.to(backend.device))
    return batches


def boundaries_per_batch(data: DataConfig, tokens: Sequences) -> int | None:
    """Return the length of the document boundaries of every batch, or None without isolation.

    It is the same for every batch of a file, so that shapes do not change; batches with fewer
    documents have empty ones.
    """
    if not data.isolate_documents:
        return None
    return data.micro_batch_size * tokens.documents_per_row + 1


def micro_batch_rows(data: DataConfig, *, micro_step: int, rank: int, replicas: int) -> slice:
    """Return the rows of a step's global batch that one forward pass has.

    A step has the same global batch for every number of data-parallel replicas D: micro-step m of
    rank r has the rows [(m * D + r) * B, (m * D + r + 1) * B).

    Args:
        data: size of the micro-batch B.
        micro_step: forward passes done before in this step.
        rank: data-parallel rank.
        replicas: D, the number of data-parallel ranks.
    """
    # Micro-steps are outermost, so changing D or B reorders micro-batches within a step only.
    first = (micro_step * replicas + rank) * data.micro_batch_size
    return slice(first, first + data.micro_batch_size)
