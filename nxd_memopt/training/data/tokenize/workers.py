"""Processes that tokenize for ``nxd-memopt prepare``: their number changes the time, and not the tokens."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Self

from nxd_memopt.child_process import describe_exit
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
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokens")
        self._processes: list[BaseProcess] = []
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that were started."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def is_alone(self) -> bool:
        """Whether the next call of the tokenizer is in this process."""
        return self._count == 1 or (not self._processes and self._clock() < self._alone_until_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, calls: Iterator[Sequence[Document]]) -> Iterator[list[Encoded]]:
        """Yield the tokens of each call's documents, in the order of ``calls``.

        At most ``CALLS_PER_WORKER`` calls for each process are read ahead.

        Raises:
            ValueError: as ``DocumentEncoder.encode``, or a process was killed.
        """
        waiting: deque[Future[list[Encoded]]] = deque()
        for documents in calls:
            if self.is_alone:
                yield self._encoder.encode(documents)
                continue
            if not self._processes:
                self.start()
            waiting.append(self._threads.submit(self._encode_in_worker, documents))
            if len(waiting) >= CALLS_PER_WORKER * self._count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def start(self) -> None:
        """Start the processes."""
        context = multiprocessing.get_context("spawn")
        # A terminal sends SIGINT to all of its processes, and a batch system other signals: this
        # process decides when the others end. They inherit the mask, so that none ends while it
        # imports. The resource tracker, which unblocks signals when it starts, is started before.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for _ in range(self._count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_main, args=(self._encoder, theirs), daemon=True, name="tokenizer")
                with host_only():
                    process.start()
                theirs.close()
                self._processes.append(process)
                self._free.put(_Worker(process, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def close(self) -> None:
        """End the processes at once: they write nothing."""
        for process in self._processes:
            process.kill()
        # The threads find that their processes have ended.
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.join()
        while not self._free.empty():
            self._free.get().connection.close()

    def _encode_in_worker(self, documents: Sequence[Document]) -> list[Encoded]:
        """Return what a free process answers; runs in a thread, of which there is one for each process."""
        worker = self._free.get()
        try:
            return worker.encode(documents)
        finally:
            self._free.put(worker)


class _Worker:
    """A process that tokenizes, and the connection to it."""

    def __init__(self, process: BaseProcess, connection: Any) -> None:
        self._process = process
        self.connection = connection

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Return the tokens of documents.

        Raises:
            ValueError: of the tokenizer, or the process has ended.
        """
        try:
            self.connection.send(documents)
            answer = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            assert self._process.exitcode is not None
            reason = describe_exit(self._process.exitcode, remedy="use fewer --workers")
            raise ValueError(
                f"a process that tokenizes ended with {reason}; start the same command to continue"
            ) from None
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer


def _main(encoder: DocumentEncoder, connection: Any) -> None:
    """Answer each call with the tokens of its documents, or the message of an error."""
    use_one_tokenizer_thread()
    while True:
        # The process that started this one has ended, even by SIGKILL, when its connection has.
        try:
            documents = connection.recv()
        except (EOFError, OSError):
            return
        answer: Any
        try:
            answer = encoder.encode(documents)
        except ValueError as error:
            answer = str(error)
        try:
            connection.send(answer)
        except OSError:
            return
