"""Finds, replaces and removes the checkpoints of a run: one directory per step, complete or absent."""

from __future__ import annotations

import re
from pathlib import Path

from nxd_memopt.checkpoint.directories import remove_directory, restore_interrupted
from nxd_memopt.checkpoint.sharded.index import INDEX
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts

_STEP = re.compile(r"step_(\d{8,})")
_REPLACED_STEP = re.compile(r"\.step_(\d{8,})\.replaced")
# The second form is left by an interrupted ``prune``.
_INCOMPLETE_STEP = re.compile(r"step_\d{8,}\.tmp|\.step_\d{8,}\.replaced\.tmp")


def step_directory(directory: str | Path, step: int) -> Path:
    """Return the directory of the complete checkpoint of ``step``."""
    return Path(directory) / f"step_{step:08d}"


def incomplete_directory(directory: str | Path, step: int) -> Path:
    """Return the directory in which the checkpoint of ``step`` is written."""
    return Path(directory) / f"step_{step:08d}.tmp"


def require_writable(directory: str | Path) -> None:
    """Create ``directory`` and write a file from every rank.

    Every rank calls, before training starts.

    Raises:
        ValueError: on every rank, if one cannot write.
    """
    probe = Path(directory) / f".writable_{parallel_state.get_global_rank()}"
    with raise_together(f"writing to {directory}"):
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"\0")
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"output directory {directory} is not writable: {error}: choose another or change its permissions"
            ) from error


def complete_steps(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step, in ascending order.

    A checkpoint is complete if it has an index, which is written last. Of an interrupted
    replacement the previous version is returned while the new one is not in place.
    """
    if not directory.is_dir():
        return {}
    found: dict[int, Path] = {}
    for path in directory.iterdir():
        renamed = _STEP.fullmatch(path.name)
        match = renamed or _REPLACED_STEP.fullmatch(path.name)
        # Both versions may be there, in any order: a kill during the removal of the previous one
        # leaves it next to the new one. It counts only while the new one is not in place.
        if match and (path / INDEX).is_file() and (renamed or int(match[1]) not in found):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def find_latest(directory: str | Path) -> Path | None:
    """Return the last complete checkpoint that rank 0 sees, or None. Every rank calls."""
    latest = ""
    with raise_together(f"searching {directory}"):
        if parallel_state.is_global_rank_zero():
            paths = list(complete_steps(Path(directory)).values())
            if paths:
                latest = paths[-1].name
    # Rank 0's answer for all ranks: a network file system may show a rename to some hosts late.
    latest = share_texts(latest)[0]
    if not latest:
        return None
    return Path(directory) / latest


def prepare_step(parent: Path, step: int, keep: int) -> None:
    """Remove the remains of interrupted saves and create the directory to write into. Rank 0
    calls.

    Raises:
        ValueError: ``step`` or ``keep`` is out of range, or ``parent`` has a later step.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step must be at least 0 and keep at least 1, got step {step} and keep {keep}")
    # A later step belongs to another run or to a run that was resumed from an earlier checkpoint:
    # saving here would make ``find_latest`` return the wrong one.
    later = [other for other in complete_steps(parent) if other > step]
    if later:
        raise ValueError(
            f"{parent} holds step {later[-1]}, later than step {step}: "
            "resume from it, delete it, or choose another directory"
        )
    _clean(parent)
    incomplete_directory(parent, step).mkdir(parents=True)


def _clean(parent: Path) -> None:
    """Remove incomplete checkpoints and undo interrupted replacements."""
    parent.mkdir(parents=True, exist_ok=True)
    for path in list(parent.iterdir()):
        match = _REPLACED_STEP.fullmatch(path.name)
        if _INCOMPLETE_STEP.fullmatch(path.name):
            remove_directory(path)
        elif match:
            restore_interrupted(step_directory(parent, int(match[1])))


def prune(parent: Path, keep: int, keep_step: int | None = None) -> None:
    """Remove all complete checkpoints but the newest ``keep`` and the one of ``keep_step``."""
    for step, path in list(complete_steps(parent).items())[:-keep]:
        if step == keep_step:
            continue
        # Rename first: a kill during the removal must not leave a directory that looks complete.
        incomplete = path.with_name(f"{path.name}.tmp")
        path.rename(incomplete)
        remove_directory(incomplete)
