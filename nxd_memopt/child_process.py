"""Runs another program: it ends with this process, and signals that end this process reach it first."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def death_signal(number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Return a ``preexec_fn`` for new processes, to which the kernel sends ``number`` when this process ends."""
    # Without it, ranks whose agent is killed would train on, and keep their output directory.
    # The library is loaded here: between fork and exec nothing may be loaded.
    parent = os.getpid()
    prctl = None
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, number)
            if os.getppid() != parent:  # it ended before the call
                os._exit(1)

    return prepare


def run_child(
    command: Sequence[str], env: Mapping[str, str], *, capture_output: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end.

    The signals of ``FORWARDED`` are sent on, and the program is waited for: it may save its state before it ends.

    Args:
        command: the program and its arguments.
        env: its environment.
        capture_output: return what it prints as text.

    Raises:
        SystemExit: with 128 + the number of a signal that has ended the program and would have ended this process.
        OSError: the program cannot be started.
    """
    output = subprocess.PIPE if capture_output else None
    # Not SIGKILL: the program may be a launcher, which has to end its ranks.
    dies_with_parent = death_signal(signal.SIGTERM)
    # Blocked while the program starts: a signal would end this process, or be lost, in between.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)

    def prepare() -> None:
        dies_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    try:
        process = subprocess.Popen(
            list(command), env=dict(env), preexec_fn=prepare, stdout=output, stderr=output, text=True
        )
        with _forwarded_to(process) as received:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            printed, errors = process.communicate()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    if -process.returncode in received:
        raise SystemExit(128 - process.returncode)
    return subprocess.CompletedProcess(process.args, process.returncode, printed, errors)


def describe_exit(status: int, *, remedy: str) -> str:
    """Return how a process that this one has started ended; ``remedy`` is what to do if it had too little memory."""
    if status == -signal.SIGKILL:  # as the kernel ends processes when memory is full
        return f"exit status {status}: if the host's memory was full, {remedy}"
    return f"exit status {status}: its own error is printed above"


@contextmanager
def _forwarded_to(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Send the signals of this process to another one inside the block; yield the numbers of those received."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        del frame
        received.append(number)
        # A terminal sends Ctrl-C to the program too: a second one could interrupt its cleanup.
        if number != signal.SIGINT or not _is_in_foreground():
            process.send_signal(number)

    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield received
        return
    handlers = {number: signal.signal(number, handle) for number in FORWARDED}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # one that Python has not installed cannot be restored
                signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Return whether this process is in the foreground of a terminal."""
    try:
        with Path("/dev/tty").open(encoding="utf-8") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
