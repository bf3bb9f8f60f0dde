"""Reads what a training checkpoint says about the run that wrote it, without reading its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_memopt.checkpoint.plain import decode
from nxd_memopt.checkpoint.sharded.index import INDEX, Index


@dataclass(frozen=True)
class StoredRun:
    """Configuration and progress that a complete training checkpoint records.

    Args:
        directory: directory of the checkpoint.
        step: optimizer steps done.
        config: the ``config`` that was saved, by dotted name, with JSON values.
        sizes: ``world_size``, ``tensor_model_parallel_size`` and ``data_parallel_size``.
        shared: ``TrainingState.shared`` of the saved state.
        base: its ``TrainingState.base``.
    """

    directory: Path
    step: int
    config: Mapping[str, Any]
    sizes: Mapping[str, int]
    shared: Mapping[str, Any]
    base: Mapping[str, Any] | None = None


def read_stored_run(checkpoint: str | Path) -> StoredRun:
    """Return what the checkpoint in the directory ``checkpoint`` records. Only JSON is read.

    Raises:
        ValueError: the directory holds no complete checkpoint, or its index is damaged.
    """
    directory = Path(checkpoint)
    if not (directory / INDEX).is_file():
        raise ValueError(
            f"{directory} holds no complete training checkpoint: it has no {INDEX}: name another directory"
        )
    index = Index(directory)
    shared = decode(index.content["shared"], index.plain_tensor)
    return StoredRun(directory, index.step, index.content["config"], index.sizes, shared, index.base)
