"""Splits a batch over context-parallel ranks."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.config import require_divisible
from nxd_memopt.parallel_layers import parallel_state

_IGNORED_LABEL = -100


def get_batch_on_this_context_parallel_rank(batch: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return this rank's sequence chunk of every ``[B, S, ...]`` tensor; without context
    parallelism ``batch`` itself.

    ``labels`` are first shifted: position s gets the token that it predicts, the last position
    gets -100. The model must not shift the labels again.

    Args:
        batch: tensors ``[B, S, ...]`` by name. None values and tensors with S = 1 are returned
            unchanged.

    Returns:
        Tensors ``[B, S / C, ...]`` by name, for C context-parallel ranks.

    Raises:
        ValueError: the context-parallel size does not divide S.
    """
    group = parallel_state.get_context_model_parallel_group()
    size = parallel_state.get_context_model_parallel_size()
    if size == 1:
        return batch
    chunks: dict[str, Tensor | None] = {}
    for name, value in batch.items():
        if value is not None and value.size(1) > 1:
            require_divisible(f"sequence length of {name}", value.size(1), "context_parallel_size", size)
            if name == "labels":
                # Shift before the split: the last label of a chunk is the first token of the next
                # chunk, which this rank does not have.
                value = F.pad(value[:, 1:], (0, 1), value=_IGNORED_LABEL)
            value = backend.shard(value, 1, group)
        chunks[name] = value
    return chunks
