"""A thread that writes one rank's part of a checkpoint, and the ranks' agreement on its outcome."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from nxd_memopt.checkpoint.markers import AbandonedError
from nxd_memopt.parallel_layers.coordination import share_texts

STALL_S = 60.0
"""How long a program that ends waits for a save without progress, before the save is abandoned."""
JOIN_S = 1.0
"""How long ``finish`` waits for this rank's thread before it looks whether another rank has failed."""
_LOWEST_PRIORITY = 19
_BUSY, _DONE = "busy", "done"


class Worker:
    """One save under way. The thread runs without collectives; the main threads agree in ``poll``.

    A program that ends while the save is under way waits for it as long as it makes progress.

    Args:
        target: what is saved, for messages.
        work: runs in the thread; it calls ``heartbeat`` or ``check_cancelled`` every now and then.
        report_failure: called in the thread with the message of an error.
    """

    def __init__(self, target: Path, work: Callable[[Worker], None], report_failure: Callable[[str], None]) -> None:
        self._target, self._work, self._report_failure = target, work, report_failure
        self._error: Exception | None = None
        self._reports: list[str] = []
        self._progress = 0
        self._stop = threading.Event()
        self._why_stopped = "the program ended before the save was complete"
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
        except OSError as second:  # a full disk, mostly: ``poll`` tells the other ranks, and stops rank 0's wait
            error.add_note(f"rank 0 could not be told: {second}")

    def heartbeat(self) -> None:
        """Count progress. Called by the work.

        Raises:
            AbandonedError: the program ends, or another rank has failed.
        """
        self._progress += 1
        self.check_cancelled()

    def check_cancelled(self) -> None:
        """As ``heartbeat``, without progress: while the work waits for something."""
        if self._stop.is_set():
            raise AbandonedError(self._why_stopped)

    def _status(self) -> str:
        if self._thread.is_alive():
            return _BUSY
        return _DONE if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def poll(self) -> bool:
        """Return whether the save has ended on all ranks; the same on all ranks. Every rank calls.

        A failure on one rank stops the others' writers: rank 0 would wait for the failed rank's files for ever.
        """
        self._reports = share_texts(self._status())
        failed = self._first_failure()
        if failed is not None:
            self._why_stopped = f"rank {failed} failed: {self._reports[failed]}"
            self._stop.set()
        return _BUSY not in self._reports

    def _first_failure(self) -> int | None:
        """The rank whose own error ended the save: one that was stopped reports ``AbandonedError``."""
        failed = [rank for rank, report in enumerate(self._reports) if report not in (_BUSY, _DONE)]
        own_errors = [rank for rank in failed if not self._reports[rank].startswith(AbandonedError.__name__)]
        return next(iter([*own_errors, *failed]), None)

    def finish(self) -> None:
        """Wait until the save has ended on all ranks; an interrupt (Ctrl-C) gets through. Every rank calls."""
        while True:
            self._thread.join(timeout=JOIN_S)
            if self.poll():
                return

    def raise_failure(self) -> None:
        """Raise on every rank when the save failed on one, after ``poll`` returned True or ``finish``.

        Raises:
            ValueError: another rank failed; names it and its message. A failing rank raises its own exception.
        """
        atexit.unregister(self._at_exit)
        if self._error is not None and not isinstance(self._error, AbandonedError):
            raise self._error
        failed = self._first_failure()
        if failed is not None:
            raise ValueError(f"saving {self._target} failed on rank {failed}: {self._reports[failed]}")

    def end(self, stall_s: float, error: BaseException | None = None) -> None:
        """Wait while there is progress, then abandon the save; without collectives, which other ranks may not answer.

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


def lower_priority() -> None:
    """Let the calling thread run where others leave a core idle; Linux has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
