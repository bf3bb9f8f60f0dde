"""A thread that writes one rank's part of a checkpoint, and the ranks' agreement on its outcome."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from nxd_memopt.checkpoint.sharded.markers import AbandonedError, report_failure
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import share_texts

STALL_S = 60.0
"""Seconds without progress after which an ending program abandons a save."""
JOIN_S = 1.0
"""Seconds that ``finish`` waits for this rank's thread between checks for failures of other
ranks.
"""
_LOWEST_PRIORITY = 19
_BUSY = "busy"
_DONE = "done"


class Worker:
    """A running save.

    The thread runs no collectives; the main threads agree on the result in ``poll``.

    A program that ends during the save waits for it as long as it makes progress.

    Args:
        target: the checkpoint, for messages.
        incomplete: the directory that is written, in which rank 0 looks for reports of failures.
        work: runs in the thread and regularly calls ``heartbeat`` or ``check_cancelled``.
    """

    def __init__(self, target: Path, incomplete: Path, work: Callable[[Worker], None]) -> None:
        self._target = target
        self._incomplete = incomplete
        self._rank = parallel_state.get_global_rank()
        self._work = work
        self._error: Exception | None = None
        self._reports: list[str] = []
        self._progress = 0
        self._stop = threading.Event()
        self._stop_reason = "the program ended before the save was complete"
        # A daemon thread, because the interpreter must not wait for it: rank 0 may be waiting for
        # dead ranks.
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
        """Try to tell rank 0 about an error by a file."""
        try:
            report_failure(self._incomplete, self._rank, str(error))
        # Usually a full disk. ``poll`` tells the other ranks and stops rank 0's wait.
        except OSError as second:
            error.add_note(f"rank 0 could not be told: {second}")

    def heartbeat(self) -> None:
        """Count progress. The work calls it.

        Raises:
            AbandonedError: the program ends, or another rank has failed.
        """
        self._progress += 1
        self.check_cancelled()

    def check_cancelled(self) -> None:
        """Raise ``AbandonedError`` like ``heartbeat``, without counting progress.

        Call it in waiting loops.
        """
        if self._stop.is_set():
            raise AbandonedError(self._stop_reason)

    def _status(self) -> str:
        """Return this rank's status: busy, done, or its error."""
        if self._thread.is_alive():
            return _BUSY
        if self._error is None:
            return _DONE
        return f"{type(self._error).__name__}: {self._error}"

    def poll(self) -> bool:
        """Return whether the save has ended on all ranks; the same on all ranks. Every rank
        calls.

        A failure on one rank stops the writers of all ranks: rank 0 would otherwise wait forever
        for the failed rank's files.
        """
        self._reports = share_texts(self._status())
        # Every rank computes this from the same shared reports.
        failed = self._first_failure()
        if failed is not None:
            self._stop_reason = f"rank {failed} failed: {self._reports[failed]}"
            self._stop.set()
        return _BUSY not in self._reports

    def _first_failure(self) -> int | None:
        """Return the first rank with an error of its own, else the first stopped rank, or None.

        A rank that was stopped because of another rank reports ``AbandonedError``.
        """
        abandoned: int | None = None
        for rank, report in enumerate(self._reports):
            if report in (_BUSY, _DONE):
                continue
            # The reports are texts: ``_status`` puts the type of the error first.
            if not report.startswith(AbandonedError.__name__):
                return rank
            if abandoned is None:
                abandoned = rank
        return abandoned

    def finish(self) -> None:
        """Wait until the save has ended on all ranks.

        Ctrl-C interrupts the wait. Every rank calls.
        """
        while True:
            # Short joins: another rank may fail while this thread still writes.
            self._thread.join(timeout=JOIN_S)
            if self.poll():
                return

    def raise_failure(self) -> None:
        """Raise on every rank if the save failed on one.

        Call it after ``poll`` returned True, or after ``finish``.

        Raises:
            ValueError: another rank failed; the message has its rank and error. A failing rank
                raises its own exception.
        """
        atexit.unregister(self._at_exit)
        if self._error is not None and not isinstance(self._error, AbandonedError):
            raise self._error
        failed = self._first_failure()
        if failed is not None:
            raise ValueError(f"saving {self._target} failed on rank {failed}: {self._reports[failed]}")

    def end(self, stall_s: float, error: BaseException | None = None) -> None:
        """Wait while there is progress, then abandon the save.

        Runs no collectives, because other ranks may not take part.

        Args:
            stall_s: seconds without progress.
            error: the reason why the program ends; gets a note if the save did not complete.
        """
        atexit.unregister(self._at_exit)
        # One round lasts up to ``stall_s``; a round without a heartbeat ends the wait. A save on
        # a slow disk thus completes, and a save that waits for dead ranks does not.
        progress_before = -1
        while self._thread.is_alive() and self._progress != progress_before:
            progress_before = self._progress
            self._thread.join(timeout=stall_s)
        # The thread raises ``AbandonedError`` at its next heartbeat and returns its memory.
        self._stop.set()
        self._thread.join(timeout=stall_s)
        status = self._status()
        if error is not None and status != _DONE:
            error.add_note(f"the save of {self._target} under way did not complete: {status}")

    def _at_exit(self) -> None:
        self.end(STALL_S)


def lower_priority() -> None:
    """Give the calling thread the lowest priority. Only Linux has priorities per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
