"""Splits a batch over context-parallel ranks."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.config import require_divisible
from nxd_memopt.parallel_layers import parallel_state

_IGNORED_LABEL = -100


def get_batch_on_this_context_parallel_rank(batch: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """This rank's chunk of the sequence of every ``[B, S, ...]`` tensor; ``batch`` itself without context parallelism.

    ``labels`` are first shifted to the token that each position predicts, the last one to -100: a model must not shift
    them again.

    Raises:
        ValueError: when the context-parallel size does not divide S.
    """
    group, size = (
        parallel_state.get_context_model_parallel_group(),
        parallel_state.get_context_model_parallel_size(),
    )
    if size == 1:
        return batch
    chunk: dict[str, Tensor | None] = {}
    for name, value in batch.items():
        if value is not None and value.size(1) > 1:
            require_divisible(f"sequence length of {name}", value.size(1), "context_parallel_size", size)
            whole = F.pad(value[:, 1:], (0, 1), value=_IGNORED_LABEL) if name == "labels" else value
            value = backend.shard(whole, 1, group)
        chunk[name] = value
    return chunk
