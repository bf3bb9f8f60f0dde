"""Saves and loads training checkpoints that do not depend on T, D and the ZeRO stage, and resume exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint.directories import copy_entry
from nxd_memopt.checkpoint.plain import decode
from nxd_memopt.checkpoint.sharded.fingerprint import flat_config, parallel_sizes, require_same_config
from nxd_memopt.checkpoint.sharded.index import Index
from nxd_memopt.checkpoint.sharded.loading import load_model, load_optimizer
from nxd_memopt.checkpoint.sharded.logical import TrainingState
from nxd_memopt.checkpoint.sharded.saving import RankSave
from nxd_memopt.checkpoint.sharded.snapshot import HostReader
from nxd_memopt.checkpoint.sharded.steps import find_latest, prepare_step
from nxd_memopt.checkpoint.sharded.stored_optimizer import StoredOptimizer
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together


@dataclass(frozen=True)
class Restored:
    """The result of ``load_training_state`` apart from model and optimizer.

    Attributes:
        step: optimizer steps done.
        shared: ``TrainingState.shared`` of the saved state.
        per_rank: this rank's own values, or None if T or D differ from those of the run that
            wrote them.
        notes: messages about parts of the run that are not resumed exactly; empty for an exact
            resume.
    """

    step: int
    shared: dict[str, Any]
    per_rank: dict[str, Any] | None
    notes: list[str] = field(default_factory=list)


def save_training_state(
    directory: str | Path,
    step: int,
    *,
    state: TrainingState,
    config: Mapping[str, Any],
    keep: int = 2,
    keep_step: int | None = None,
) -> Path:
    """Write ``directory/step_XXXXXXXX`` and return its path.

    The checkpoint is complete on return. Every rank calls.

    Tensors are copied to the host and written one at a time, in chunks of bounded size. Rank 0
    writes the index last, renames the finished directory, and then removes all but the newest
    ``keep`` checkpoints. A kill at any moment leaves the last complete checkpoint. All ranks must
    see the same ``directory``.

    Args:
        directory: directory of the run; see ``require_writable``.
        step: optimizer steps done.
        state: the state to save.
        config: options that a resumed run must share; compared by ``load_training_state``.
        keep: number of complete checkpoints to keep, this one included; at least 1.
        keep_step: step of another checkpoint to keep, such as the best one.

    Raises:
        ValueError, OSError: on every rank, if one cannot write, or if ``directory`` has a later
            step.
    """
    save = begin_save(directory, step, state, config, keep, keep_step)
    task = f"saving {save.target}"
    reader = HostReader()
    # Every rank writes its file; only if all succeed, rank 0 writes the index.
    with raise_together(task):
        # No snapshot: the tensors are read directly, because training waits for the save.
        save.write(lambda i: reader.chunks(save.sources[i]))
    with raise_together(task):
        if parallel_state.is_global_rank_zero():
            save.complete()
    return save.target


def begin_save(
    directory: str | Path,
    step: int,
    state: TrainingState,
    config: Mapping[str, Any],
    keep: int,
    keep_step: int | None = None,
) -> RankSave:
    """Describe this rank's part of a checkpoint and create the directory to write into.

    Every rank calls.
    """
    backend.mark_step()  # torch_xla may return wrong values when pending results are read one by one
    with raise_together(f"saving step {step} to {directory}"):
        save = RankSave(directory, step, state, config, keep, keep_step)
        if parallel_state.is_global_rank_zero():
            prepare_step(Path(directory), step, keep)
            # One by one: copying the directory would also copy its mode, and a temporary one is closed to others.
            for path in sorted(state.files.iterdir()) if state.files is not None else ():
                copy_entry(path, save.incomplete / path.name)
    return save


def load_training_state(
    directory: str | Path, *, state: TrainingState, config: Mapping[str, Any], not_compared: Collection[str] = ()
) -> Restored:
    """Load the last complete checkpoint into the model and optimizer of ``state``.

    Every rank calls.

    T, D and ZeRO-1 may differ from the run that wrote it; parameters, masters and optimizer
    states are bit-identical.

    Args:
        directory: directory of the run.
        state: its model and optimizer are filled; all other fields are ignored.
        config: as passed to ``save_training_state``.
        not_compared: dotted names of fields of ``config`` that may differ.

    Raises:
        ValueError: on every rank, if there is no checkpoint, a file is missing, truncated or
            altered, or ``config`` differs; the message names every differing field.
    """
    latest = find_latest(directory)
    with raise_together(f"resuming from {directory}"):
        if latest is None:
            raise ValueError(f"{directory} has no complete checkpoint: start without resuming, or check the directory")
        index = Index(latest)
        require_same_config(latest, index.content["config"], flat_config(config), not_compared)
        return _load(index, state)


def load_checkpoint(checkpoint: Path, state: TrainingState) -> Restored:
    """Load the checkpoint in the directory ``checkpoint``. Every rank calls.

    The configurations are not compared: the caller has done so (``stored_run.read_stored_run``).

    Raises:
        ValueError: on every rank, if a file is missing, truncated or altered, or the model or the
            optimizer has other tensors.
    """
    with raise_together(f"resuming from {checkpoint}"):
        return _load(Index(checkpoint), state)


def _load(index: Index, state: TrainingState) -> Restored:
    """Fill the model and the optimizer of ``state`` from a checkpoint."""
    if state.optimizer is not None:
        # Updates that are left to the next forward would change what is loaded.
        StoredOptimizer(state.optimizer).finish_update()
    load_model(index, state.model)
    notes: list[str] = []
    if state.optimizer is not None:
        # After the model: masters that the checkpoint lacks are cut from the loaded parameters.
        notes = load_optimizer(index, state.optimizer, state.model)
    shared = decode(index.content["shared"], index.plain_tensor)
    # Values of one rank, such as random states, have no meaning at other parallel sizes.
    per_rank: dict[str, Any] | None = None
    if parallel_sizes() == index.sizes:
        rank = parallel_state.get_global_rank()
        per_rank = decode(index.content["per_rank"][rank], index.plain_tensor)
    return Restored(index.step, shared, per_rank, notes)
