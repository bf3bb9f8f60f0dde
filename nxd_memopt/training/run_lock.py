"""The lock of an output directory: one run at a time writes to it.

Rank 0 writes ``run.lock``, which names its process, and every rank holds a shared ``flock`` on
that file. A lock is stale if its process has ended and no rank holds the ``flock``: the next run
takes it over. All changes of the file are made under its exclusive ``flock``, so of several
processes that find a stale lock exactly one takes it over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.distributed import is_rank_zero
from nxd_memopt.training.processes import Process, is_running, this_process

NAME = "run.lock"
# Time that a start waits for another start which is taking over the same stale lock, and that the
# end of a failed run waits for its other ranks. Both usually take milliseconds.
WAIT_S = 2.0
POLL_S = 0.02
# What flock returns where it is not supported: some network file systems.
NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Owner:
    """The run that a lock file names: rank 0's process, and its start as local time (ISO 8601)."""

    process: Process
    since: str


@contextmanager
def locked_output_directory(directory: str | Path) -> Iterator[None]:
    """Keep other runs out of ``directory`` inside the block. Every rank calls.

    Creates ``directory``, and removes it again if the block leaves it empty.

    Raises:
        ValueError: on every rank, if another run uses the directory, or if this cannot be found
            out.
    """
    directory = Path(directory)
    lock: RunLock | None = None
    with raise_together(f"locking {directory}"):
        if is_rank_zero():
            lock = RunLock(directory)
    shared: int | None = None
    try:
        if lock is None:
            shared = _open_shared(directory / NAME)
        yield
        # A barrier: no rank still writes when rank 0 removes the lock. Not after an error: the
        # other ranks may wait in another collective.
        _close(shared)
        shared = None
        share_texts("")
    finally:
        _close(shared)
        if lock is not None:
            lock.release()


class RunLock:
    """The lock of an output directory, held from construction to ``release``.

    Args:
        directory: output directory; created if it does not exist.

    Raises:
        ValueError: another run holds the lock, or whether it does cannot be found out, or the
            directory is not writable.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._created: list[Path] = []
        self._descriptor = -1
        try:
            self._created = _create(directory)
            self._descriptor = self._acquire()
        except OSError as error:
            lacks_links = error.errno in NO_HARD_LINKS and os.access(directory, os.W_OK)
            _remove_empty(self._created)
            if lacks_links:
                raise ValueError(
                    f"output directory {directory} is on a file system without hard links ({error}), with which a run "
                    "locks its directory: choose one on another file system"
                ) from error
            raise ValueError(
                f"output directory {directory} is not writable: {error}: choose another or change its permissions"
            ) from error
        except BaseException:
            _remove_empty(self._created)
            raise
        _remove_leftovers(directory)

    def release(self) -> None:
        """Remove the lock, and the directories created for it if they are empty."""
        # Other ranks of a failed run may still write. If they take longer, the file stays: it is
        # stale as soon as they have ended.
        if not _wait_until_alone(self._descriptor):
            _close(self._descriptor)
            return
        if _is_file_at(self._descriptor, self._path):
            self._path.unlink()
        _close(self._descriptor)
        _remove_empty(self._created)

    def _acquire(self) -> int:
        """Return the descriptor of this run's lock file, under a shared ``flock``."""
        deadline = time.monotonic() + WAIT_S
        while True:
            descriptor = self._attempt(is_last=time.monotonic() > deadline)
            if descriptor is not None:
                # The exclusive flock becomes a shared one, for the other ranks to join. This is
                # not atomic: a process of another container may have taken the lock in between.
                _flock(descriptor, fcntl.LOCK_SH)
                if _is_file_at(descriptor, self._path):
                    return descriptor
                os.close(descriptor)
            time.sleep(POLL_S)

    def _attempt(self, *, is_last: bool) -> int | None:
        """Return the descriptor of this run's lock file, or None if another start intervened."""
        # The file is written and locked under a temporary name, and linked: run.lock is complete
        # and locked, or absent.
        temporary = self._path.with_name(f"{NAME}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        is_ours = False
        try:
            has_flock = _flock(descriptor, fcntl.LOCK_EX)
            owner = Owner(this_process(), datetime.now().astimezone().isoformat(timespec="seconds"))
            os.write(descriptor, json.dumps(asdict(owner), indent=2).encode() + b"\n")
            os.fsync(descriptor)
            is_ours = _link(temporary, self._path) or self._take_over(temporary, has_flock, is_last=is_last)
        except FileNotFoundError:
            pass  # another start took the temporary file for a remainder and removed it
        finally:
            temporary.unlink(missing_ok=True)
            if not is_ours:
                os.close(descriptor)
        return descriptor if is_ours else None

    def _take_over(self, temporary: Path, has_flock: bool, *, is_last: bool) -> bool:
        """Replace a stale lock by ``temporary``; return False if the file at the path has changed.

        Args:
            temporary: complete lock file of this run.
            has_flock: whether the file system supports ``flock``.
            is_last: whether to raise instead of waiting for another start.

        Raises:
            ValueError: the lock is not stale, or whether it is cannot be found out.
        """
        try:
            found = os.open(self._path, os.O_RDWR)
        except FileNotFoundError as error:
            if self._path.is_symlink():
                raise ValueError(self._foreign("a symbolic link to a file that does not exist")) from error
            return False  # released since
        except OSError as error:
            raise ValueError(self._foreign(str(error))) from error
        try:
            owner = self._read(found)
            self._require_known_host(owner)
            if _is_here(owner.process) and is_running(owner.process):
                raise ValueError(self._in_use(owner))
            if not has_flock:
                raise ValueError(self._unknown(owner, f"{self._path.parent} does not support file locks (flock)"))
            # The exclusive flock is not granted while a rank of the owner lives, or while another
            # start takes over. After it is granted, the path may name another file.
            if not _try_flock(found):
                if is_last:
                    raise ValueError(self._in_use(owner, others=True))
                return False
            if not _is_file_at(found, self._path):
                return False
            temporary.rename(self._path)
        finally:
            os.close(found)
        print(
            f"taking over {self._path}: process {owner.process.pid} on host {owner.process.host}, started "
            f"{owner.since}, has ended without removing it",
            flush=True,
        )
        return True

    def _read(self, descriptor: int) -> Owner:
        """Return the owner that a lock file names."""
        try:
            content: Any = json.loads(os.pread(descriptor, 65536, 0))
            process = Process(**content["process"])
            if not isinstance(process.pid, int):
                raise TypeError(f"process id {process.pid!r}")
            return Owner(process, str(content["since"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(self._foreign(f"{type(error).__name__}: {error}")) from error

    def _require_known_host(self, owner: Owner) -> None:
        """Raise ``ValueError`` if the owner is a process of another host."""
        here = this_process()
        same_host = owner.process.host == here.host and owner.process.machine == here.machine
        if here.boot:
            same_boot = owner.process.boot == here.boot
            # After a restart the host has another boot id, and no process of the time before. Host
            # names alone repeat, in particular those of containers.
            is_known = same_boot or (same_host and bool(here.machine))
        else:
            is_known = same_host
        if not is_known:
            raise ValueError(self._unknown(owner, f"it cannot be checked from host {here.host}"))

    def _in_use(self, owner: Owner, *, others: bool = False) -> str:
        state = ""
        if others:
            state = ", or another rank of that run"
        return (
            f"output directory {self._path.parent} is in use by process {owner.process.pid} on host "
            f"{owner.process.host}, started {owner.since}{state}: choose another trainer.output_dir, or stop that "
            "process"
        )

    def _unknown(self, owner: Owner, reason: str) -> str:
        return (
            f"output directory {self._path.parent} is locked by process {owner.process.pid} on host "
            f"{owner.process.host}, started {owner.since}, and {reason}: if that run has ended, delete {self._path}; "
            "if it still runs, choose another trainer.output_dir"
        )

    def _foreign(self, reason: str) -> str:
        return (
            f"{self._path} is not a readable lock of a run ({reason}): delete it if no run uses "
            f"{self._path.parent}, or choose another trainer.output_dir"
        )


def _is_here(process: Process) -> bool:
    """Return whether the process id of ``process`` has a meaning in this process."""
    here = this_process()
    return (process.boot, process.pid_namespace) == (here.boot, here.pid_namespace)


def _link(temporary: Path, path: Path) -> bool:
    """Give a complete lock file its name; return False if a file of that name exists."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    return True


def _open_shared(path: Path) -> int | None:
    """Return a descriptor of rank 0's lock file under a shared ``flock``, or None if not visible."""
    # On another host without a shared output directory there is no file, and on file systems
    # without flock no lock: rank 0's process alone counts.
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    _flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _flock(descriptor: int, operation: int) -> bool:
    """Wait for a ``flock``; return False if the file system does not support it."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return False
    return True


def _try_flock(descriptor: int) -> bool:
    """Return whether an exclusive ``flock`` was granted at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_until_alone(descriptor: int) -> bool:
    """Return whether no other process holds a ``flock`` of the file within ``WAIT_S``."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if _try_flock(descriptor):
                return True
        except OSError:
            return True  # not supported
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)


def _is_file_at(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` names the file that is open as ``descriptor``."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _create(directory: Path) -> list[Path]:
    """Create ``directory`` and its parents; return the created ones, the innermost first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(directories: list[Path]) -> None:
    """Remove directories, the innermost first, up to one that is not empty."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _remove_leftovers(directory: Path) -> None:
    """Remove the temporary lock files of starts that were killed while they wrote them."""
    for path in directory.glob(f"{NAME}.*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                if _try_flock(descriptor):
                    path.unlink()
            finally:
                os.close(descriptor)
