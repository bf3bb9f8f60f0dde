"""A thread that writes one rank's part of a checkpoint, and the ranks' agreement on its outcome."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nxd_memopt.parallel_layers.coordination import share_texts

STALL_S = 60.0
"""How long a program that ends waits for a save without progress, before the save is abandoned."""
_LOWEST_PRIORITY = 19
_BUSY, _DONE = "busy", "done"


class AbandonedError(Exception):
    """The program ends: what is written is left incomplete, and the last complete checkpoint stays."""


class Worker:
    """One save under way. The thread runs no collective and asks no rank; the main threads agree in ``poll``.

    A program that ends while the save is under way waits for it as long as it makes progress.

    Args:
        target: what is saved, for messages.
        work: runs in the thread; it calls ``heartbeat`` or ``require_wanted`` every now and then.
        report_failure: called in the thread with the message of an error.
    """

    def __init__(self, target: Path, work: Callable[[Worker], None], report_failure: Callable[[str], None]) -> None:
        self._target, self._work, self._report_failure = target, work, report_failure
        self._error: Exception | None = None
        self._reports: list[str] = []
        self._progress = 0
        self._stop = threading.Event()
        # A daemon, for which the interpreter does not wait: rank 0 may be waiting for ranks that have died.
        self._thread = threading.Thread(target=self._run, name=f"save {target.name}", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def _run(self) -> None:
        try:
            self._work(self)
        except Exception as error:
            self._error = error
            self._report(error)

    def _report(self, error: Exception) -> None:
        try:
            self._report_failure(str(error))
        except OSError as second:  # a full disk, mostly: the ranks learn of the failure in ``poll``
            error.add_note(f"rank 0 could not be told: {second}")

    def heartbeat(self) -> None:
        """Count progress. Called by the work.

        Raises:
            AbandonedError: the program ends.
        """
        self._progress += 1
        self.require_wanted()

    def require_wanted(self) -> None:
        """As ``heartbeat``, without progress: while the work waits for something."""
        if self._stop.is_set():
            raise AbandonedError("the program ended before the save was complete")

    def _status(self) -> str:
        if self._thread.is_alive():
            return _BUSY
        return _DONE if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def poll(self) -> bool:
        """Return whether the save has ended on all ranks; the same on all ranks. Every rank calls."""
        self._reports = share_texts(self._status())
        return _BUSY not in self._reports

    def finish(self) -> None:
        """Wait until the save has ended on all ranks; an interrupt (Ctrl-C) gets through. Every rank calls."""
        while self._thread.is_alive():
            self._thread.join(timeout=1.0)
        self.poll()  # all ranks have waited for their own threads

    def raise_failure(self) -> None:
        """Raise on every rank when the save failed on one, after ``poll`` returned True or ``finish``.

        Raises:
            ValueError: another rank failed; names it and its message. A failing rank raises its own exception.
        """
        atexit.unregister(self._at_exit)
        if self._error is not None:
            raise self._error
        for rank, report in enumerate(self._reports):
            if report != _DONE:
                raise ValueError(f"saving {self._target} failed on rank {rank}: {report}")

    def end(self, stall_s: float, error: BaseException | None = None) -> None:
        """Wait while there is progress, then abandon the save; ask no rank, which may not answer any more.

        Args:
            stall_s: seconds without progress.
            error: why the program ends; gets a note when the save did not complete.
        """
        atexit.unregister(self._at_exit)
        before = -1
        while self._thread.is_alive() and self._progress != before:
            before = self._progress
            self._thread.join(timeout=stall_s)
        self._stop.set()
        self._thread.join(timeout=stall_s)
        status = self._status()
        if error is not None and status != _DONE:
            error.add_note(f"the save of {self._target} under way did not complete: {status}")

    def _at_exit(self) -> None:
        self.end(STALL_S)


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Collect no cyclic garbage meanwhile: what describes a checkpoint has thousands of small objects.

    Making them would set off a collection of all objects of the program, which stops every thread for tenths of a
    second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def lower_priority() -> None:
    """Let the calling thread run where others leave a core idle; Linux has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
