"""Receives SIGINT, SIGTERM and SIGUSR1: at once, or after the current step; a second signal ends the process."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nxd_memopt.training.runtime.distributed import is_rank_zero

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SECOND_AFTER_S = 2.0
"""A signal within this time after the first one is the same one.

A terminal delivers it to every process of its group, and the agent that started the ranks forwards
it to them again.
"""
MAIN_THREAD_S = 5.0
"""Time that the main thread has to leave a phase in which the first signal stops the run at once."""


def exit_status(number: int) -> int:
    """Return the exit status of a process that signal ``number`` has stopped, as shells have it."""
    return 128 + number


def final_status(status: int) -> int:
    """Return ``status`` for ``sys.exit``; ignore repetitions of the signal that stopped the process."""
    if status > exit_status(0):
        # Ignored, not only blocked: threads of libraries have masks of their own, and the end of
        # the interpreter gives every other handler back its default, which ends the process.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    return status


class Interrupted(BaseException):
    """The run stops because of a signal.

    It is no ``Exception``, like ``KeyboardInterrupt``: code that handles failures must not handle it.

    Args:
        number: signal number.
        message: what was saved and how to continue, one line.
        is_agreed: whether every rank raises at the same point, so that all of them can destroy
            their process groups together.
    """

    def __init__(self, number: int, message: str, *, is_agreed: bool = False) -> None:
        super().__init__(message)
        self.number = number
        self.message = message
        self.is_agreed = is_agreed

    def line(self) -> str:
        """Return the line that the run ends with."""
        return f"stopped by {signal.Signals(self.number).name} {self.message}"


class Interrupts:
    """Signals that this process has received.

    The first signal raises ``Interrupted`` in the main thread. Inside ``deferred`` it is recorded
    only, in ``first``. A second signal, more than ``SECOND_AFTER_S`` after the first one, ends the
    process at once. Without ``handled`` no signal is received, and ``first`` stays None.

    Args:
        clock: monotonic time in seconds.
        leave: ends the process with an exit status, without any cleanup.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.first: int | None = None
        self.message = "before training: nothing is lost; start the same command to continue"
        self._first_s: float | None = None
        self._lock = threading.RLock()
        self._clock = clock
        self._leave = leave
        self._is_deferred = False
        self._is_raised = False
        self._is_leaving = False
        self._is_closed = False
        self._process: int | None = None

    @contextmanager
    def handled(self) -> Iterator[Interrupts]:
        """Receive the signals inside the block, and restore the previous handlers after it.

        Only the main thread of a process can handle signals: in another one the block runs without.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        # A Python handler runs only when the main thread executes Python code, which it does not
        # inside a collective or while it waits for the device. The interpreter's C handler writes
        # the signal's number to the wakeup descriptor at once, and a thread reads it.
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        # Blocked while the handlers change. The agent starts ranks with the signals blocked: one that is pending
        # raises when it is unblocked, before the block.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._process = os.getpid()
        os.register_at_fork(after_in_child=self._forget_in_child)
        previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        previous_writing = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True)
        watcher.start()
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            yield self
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            self._is_closed = True
            signal.set_wakeup_fd(previous_writing)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._process = None
            os.write(writing, b"\0")
            watcher.join()
            os.close(reading)
            os.close(writing)
            # A repetition of the first signal that arrives now must not reach the old handlers.
            while self.first is not None and signal.sigtimedwait(SIGNALS, 0) is not None:
                pass
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Record the first signal inside the block instead of raising; raise it after the block."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self.first is not None:
            self._is_raised = True
            raise Interrupted(self.first, self.message)

    def receive(self, number: int) -> None:
        """Record a signal that was delivered, or end the process if it is the second one."""
        now = self._clock()
        if self._first_s is None:
            self._first_s = now
        self._record(number)
        if now - self._first_s > SECOND_AFTER_S and not self._is_leaving:
            self._is_leaving = True
            self._say(f"stopped at once by a second {signal.Signals(number).name}: the last checkpoint is complete")
            self._leave(exit_status(number))

    def _record(self, number: int) -> None:
        """Set ``first`` to ``number`` unless a signal is recorded already."""
        # Both the main thread's handler and the watching thread call this.
        with self._lock:
            is_first = self.first is None
            if is_first:
                self.first = number
        if is_first and self._is_deferred:
            self._say(f"{signal.Signals(number).name}: the run stops after this step; again: at once")

    def _handle(self, number: int, frame: Any) -> None:
        """Raise the first signal in the main thread, unless it is deferred."""
        del frame
        # Recorded here too: the watching thread may be later than the end of ``deferred``. Only that thread
        # counts signals: this handler runs when the main thread returns from C, seconds after the signal perhaps.
        if self._is_deferred:
            self._record(number)
        elif not self._is_raised:
            self._is_raised = True
            raise Interrupted(number, self.message)

    def _watch(self, descriptor: int) -> None:
        """Read the numbers of received signals until ``handled`` ends; run in a thread."""
        while not self._is_closed:
            timeout_s = None
            if self.first is not None and not self._is_deferred:
                timeout_s = MAIN_THREAD_S
            if not select.select([descriptor], [], [], timeout_s)[0]:
                if not self._is_deferred:
                    self._leave_stuck()
                continue
            for number in os.read(descriptor, 64):
                if number in SIGNALS:
                    self.receive(number)

    def _leave_stuck(self) -> None:
        """End the process, whose main thread has not left for ``MAIN_THREAD_S`` seconds."""
        if self.first is not None and not self._is_closed:
            self._say(Interrupted(self.first, self.message).line())
            self._leave(exit_status(self.first))

    def _forget_in_child(self) -> None:
        """Leave the signals of a forked child to their default actions."""
        # The child inherits the handlers and the wakeup descriptor: SIGTERM, with which a pool ends
        # its processes, would be recorded as a signal to this process.
        if self._process is not None:
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            self._process = None

    def _say(self, text: str) -> None:
        if is_rank_zero():
            print(text, file=sys.stderr, flush=True)
