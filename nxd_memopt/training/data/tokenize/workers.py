"""Processes that tokenize for ``nxd-memopt prepare``: their number changes the time, and not the tokens."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Self

from nxd_memopt.training.runtime.distributed import host_only, use_one_tokenizer_thread
from nxd_memopt.training.runtime.signals import SIGNALS

if TYPE_CHECKING:
    from nxd_memopt.training.data.sources.corpora import Document
    from nxd_memopt.training.data.tokenize.chat import Encoded
    from nxd_memopt.training.data.tokenize.encoding import DocumentEncoder

# Work of this process before it starts others, which takes them about 5 s: a small corpus needs none.
FOREGROUND_S = 5.0
# One call is in work and one waits for each worker. A longer queue would only hold more text.
CALLS_PER_WORKER = 2
# Text of a call: about 0.5 s of work. With 64 workers, the queue then has 128 MiB of it at most.
WORKER_CHARACTERS = 2**20


class TokenWorkers:
    """Processes that tokenize documents, whose tokens are returned in the order of the documents.

    Args:
        encoder: tokenizes documents; each process has a copy of it.
        count: number of processes; 1 is this one alone.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        encoder: DocumentEncoder,
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoder = encoder
        self._count = count
        self._clock = clock
        self._alone_until_s = clock() + FOREGROUND_S
        self._pool: ProcessPoolExecutor | None = None
        self._others: list[BaseProcess] = []

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes that were started."""
        if self._pool is None:
            return []
        return [process for process in multiprocessing.active_children() if process not in self._others]

    @property
    def is_alone(self) -> bool:
        """Whether the next call of the tokenizer is in this process."""
        return self._count == 1 or (self._pool is None and self._clock() < self._alone_until_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes at once: they write nothing."""
        for process in self.processes:
            process.kill()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def encode(self, calls: Iterator[Sequence[Document]]) -> Iterator[list[Encoded]]:
        """Yield the tokens of each call's documents, in the order of ``calls``.

        At most ``CALLS_PER_WORKER`` calls for each process are read ahead.

        Raises:
            ValueError: as ``DocumentEncoder.encode``, or a process was killed.
        """
        waiting: deque[Future[list[Encoded]]] = deque()
        try:
            for documents in calls:
                if self.is_alone:
                    yield self._encoder.encode(documents)
                    continue
                # Results are taken from the front, in the order of the calls. The queue is bounded, so a fast reader
                # holds no text of a whole corpus in memory.
                waiting.append(self._submit(documents))
                if len(waiting) >= CALLS_PER_WORKER * self._count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenExecutor as error:
            raise ValueError(
                "a process that tokenizes was killed: if the host's memory was full, use fewer --workers; start the "
                "same command to continue"
            ) from error

    def _submit(self, documents: Sequence[Document]) -> Future[list[Encoded]]:
        """Let a process tokenize documents; the first calls start the processes."""
        if self._pool is None:
            self._others = multiprocessing.active_children()
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._count, spawn, _start, (self._encoder,))
            # It unblocks signals when it starts, so it is started before they are blocked.
            resource_tracker.ensure_running()
        # A terminal sends SIGINT to all of its processes, and a batch system other signals: this
        # process decides when the others end. They inherit the mask, so that none ends while it
        # imports.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with host_only():
                return self._pool.submit(_encode, documents)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_encoder: DocumentEncoder


def _start(encoder: DocumentEncoder) -> None:
    """Prepare a process for ``_encode``."""
    # A process of a pool keeps what its tasks share in its module: the tokenizer has megabytes.
    # A task could carry the encoder instead, at the price of serializing it again for each call of 0.5 s.
    global _encoder
    _encoder = encoder
    use_one_tokenizer_thread()
    threading.Thread(target=end_with_parent, daemon=True).start()


def _encode(documents: Sequence[Document]) -> list[Encoded]:
    return _encoder.encode(documents)


def end_with_parent() -> None:
    """End this process when the one that started it has ended, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
