"""The lock of an output directory: one run at a time writes to it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.runtime.distributed import is_rank_zero

NAME = "run.lock"
# Time that a start waits for a run that is just ending.
WAIT_S = 1.0


@contextmanager
def locked_output_directory(directory: str | Path) -> Iterator[None]:
    """Keep other runs out of ``directory`` inside the block. Every rank calls.

    Rank 0 holds an exclusive ``flock`` on ``run.lock``, which the kernel releases when the process
    ends, however it ends. Creates ``directory`` and its missing
    parents, and removes again what the block leaves empty.

    Raises:
        ValueError: on every rank, if another run uses the directory or it is not writable.
    """
    directory = Path(directory)
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    lock: FileLock | None = None
    with raise_together(f"locking {directory}"):
        if is_rank_zero():
            lock = _acquire(directory, created)
    try:
        yield
        # A barrier, so that no rank is still writing when rank 0 releases the lock. Skipped after an error: the
        # other ranks may be blocked in another collective.
        share_texts("")
    finally:
        if lock is not None:
            # Removed while it is held: filelock in a process that has opened the file notices that it was removed,
            # and tries again with a new file.
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
            _remove_empty(created)


def _acquire(directory: Path, created: list[Path]) -> FileLock:
    """Return the lock of ``directory``, held by this process, with a line that says by whom."""
    path = directory / NAME
    # No soft locks: where there is no flock, filelock would create a marker file that remains after a kill.
    lock = FileLock(path, timeout=WAIT_S, fallback_to_soft=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"output directory {directory} is in use by {_owner(path) or 'another run'}: choose another "
            "trainer.output_dir, or stop that process"
        ) from error
    except OSError as error:
        _remove_empty(created)
        raise ValueError(
            f"output directory {directory} is not writable, or its file system has no file locks (flock): {error}: "
            "change its permissions, or choose another"
        ) from error
    owner = _owner(path)
    if owner:
        print(f"taking over {path} of {owner}, which ended without removing it", flush=True)
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    path.write_text(f"process {os.getpid()} on host {socket.gethostname()}, started {since}\n", encoding="utf-8")
    return lock


def _owner(path: Path) -> str:
    """Return the line of the run that wrote the lock file; empty if a run that ended has just removed it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""


def _remove_empty(directories: list[Path]) -> None:
    """Remove directories, the innermost first, up to one that is not empty."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()
