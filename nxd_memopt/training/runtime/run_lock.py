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
    ends, however it ends. Creates ``directory``, and removes it again if the block leaves it empty.

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
        # A barrier: no rank still writes when rank 0 releases the lock. Not after an error: the
        # other ranks may wait in another collective.
        share_texts("")
    finally:
        if lock is not None:
            # Removed while it is held: a start that has opened this file finds that it has no name
            # any more, and tries again with a new one.
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
            _remove_empty(created)


def _acquire(directory: Path, created: list[Path]) -> FileLock:
    """Return the lock of ``directory``, held by this process, with a line that says by whom."""
    path = directory / NAME
    # The marker files that filelock uses where there is no flock outlive a run that is killed.
    lock = FileLock(path, timeout=WAIT_S, fallback_to_soft=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        owner = path.read_text(encoding="utf-8", errors="replace").strip()
        raise ValueError(
            f"output directory {directory} is in use by {owner or 'another run'}: choose another trainer.output_dir, "
            "or stop that process"
        ) from error
    except OSError as error:
        _remove_empty(created)
        raise ValueError(
            f"output directory {directory} is not writable, or its file system has no file locks (flock): {error}: "
            "change its permissions, or choose another"
        ) from error
    owner = path.read_text(encoding="utf-8", errors="replace").strip()
    if owner:
        print(f"taking over {path}: {owner}, has ended without removing it", flush=True)
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    path.write_text(f"process {os.getpid()} on host {socket.gethostname()}, started {since}\n", encoding="utf-8")
    return lock


def _remove_empty(directories: list[Path]) -> None:
    """Remove directories, the innermost first, up to one that is not empty."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()
