"""Gives every rank the packed tokens while they are written: rank 0 writes, or watches the process that does."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from nxd_memopt.parallel_layers.coordination import share_texts
from nxd_memopt.training.data.packed.files import GrowingTokenFile
from nxd_memopt.training.data.packed.log import TokenLog
from nxd_memopt.training.data.packed.writer import TokenJob, TokenProcess, write_tokens
from nxd_memopt.training.data.sources.corpora import Corpus
from nxd_memopt.training.data.tokenize.windows import SPLITS
from nxd_memopt.training.runtime.distributed import is_first_of_host, is_rank_zero

# Work of rank 0 before it starts a process: a small corpus needs none. A process takes 3 s to start.
FOREGROUND_S = 5.0
BEAT_S = 1.0
POLL_S = 0.05
REPORT_S = 30.0
VISIBLE_S = 60.0  # how long a shared file system may take to show what another host has written


class WaitStoppedError(Exception):
    """A signal stops the run while it waits for tokens; raised on every rank in the same call.

    Args:
        number: signal number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class TokenFeed:
    """Packed tokens of a run, which grow while it trains. Every rank makes the same calls.

    Rank 0 alone knows how far the files are written, and says so through the store of the
    rendezvous, together with a heartbeat that names its work: a rank waits as long as there is one.
    The other ranks use only what rank 0 has published: each rank then waits in the same call.

    Args:
        job: what is tokenized.
        fingerprint: fingerprint of text, tokenizer and options.
        corpus: documents, on rank 0.
        clock: monotonic time in seconds.
        foreground_share: part of ``FOREGROUND_S`` in which rank 0 tokenizes this source itself.
    """

    def __init__(
        self,
        job: TokenJob,
        fingerprint: str,
        corpus: Corpus | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        foreground_share: float = 1.0,
    ) -> None:
        self.fingerprint = fingerprint
        self.notes = list(corpus.notes) if corpus else []
        self.interrupted: Callable[[], int | None] = lambda: None
        self._job = job
        self._corpus = corpus
        self._clock = clock
        self._foreground_share = foreground_share
        self._process: TokenProcess | None = None
        self._is_foreground_over = False
        self._logs: dict[str, TokenLog] = {
            name: TokenLog(job.directory, name, job.config.seq_length) for name in SPLITS
        }
        self._known: dict[str, tuple[int, bool]] = {name: (0, False) for name in SPLITS}  # noqa: C420
        self._status: dict[str, Any] = {"beat": 0, "work": "opening the data"}
        self._published_s = self._reported_s = clock()
        self._store: Any = None
        if dist.is_initialized() and dist.get_backend() != "fake" and dist.get_world_size() > 1:
            self._store = dist.distributed_c10d._get_default_store()
        # One store may serve several runs after each other, whose keys must differ.
        self._key = f"nxd_memopt/tokens/{share_texts(secrets.token_hex(8))[0]}"

    def wait(self, name: str, rows: int) -> None:
        """Return when a split has ``rows`` sequences, or all of its text.

        Raises:
            ValueError: on every rank, if rank 0 cannot tokenize the text.
            WaitStoppedError: on every rank, if one has received a signal.
            RuntimeError: rank 0 has given no sign for the timeout of the process group.
        """
        if self._has(name, rows):
            return
        self._reported_s = self._clock()
        if is_rank_zero():
            try:
                self._wait_as_writer(name, rows)
            except (ValueError, OSError) as error:
                self._publish(error=str(error) or type(error).__name__)
                raise
        else:
            self._wait_for_rank_zero(name, rows)

    def open(self, name: str) -> GrowingTokenFile:
        """Return the packed sequences of a split."""
        return GrowingTokenFile(
            self._logs[name], self._job.config.seq_length, seed=self._job.seed, wait=lambda rows: self.wait(name, rows)
        )

    def wanted(self, name: str) -> int:
        """Return how many sequences of a split the run reads."""
        return self._job.wanted[name]

    def wants(self, name: str) -> bool:
        """Return whether the run reads sequences of a split."""
        return self.wanted(name) > 0

    def log(self, name: str) -> TokenLog:
        """Return the log of a split, as far as this rank knows it."""
        return self._logs[name]

    def close(self) -> None:
        """End the process in the background, if there is one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _has(self, name: str, rows: int) -> bool:
        known, ended = self._known[name]
        return ended or known >= rows

    def _wait_as_writer(self, name: str, rows: int) -> None:
        """Write, or watch the process that does, until the split has ``rows`` sequences."""
        while True:
            self._refresh()
            if self._has(name, rows):
                self._publish()
                return
            number = self._signal()
            if number is not None:
                self._publish(stop=number)
                raise WaitStoppedError(number)
            if not self._is_foreground_over:
                self._write_in_foreground()
                continue
            if self._process is None:
                self._process = TokenProcess(self._job)
            has_ended = self._process.has_ended
            self._process.require_running()
            if has_ended:
                self._refresh()
                if not self._has(name, rows):
                    raise ValueError(
                        f"tokenizing has ended with {self._known[name][0]} sequences of {name} text, and {rows} are "
                        "needed: start the same command again"
                    )
                continue
            self._beat(self._process.progress)
            time.sleep(POLL_S)

    def _write_in_foreground(self) -> None:
        """Tokenize in this process, in this source's part of ``FOREGROUND_S``; a small corpus is then complete."""
        end_s = self._clock() + FOREGROUND_S * self._foreground_share

        def pauses(line: str) -> bool:
            self._beat(line)
            return self._clock() > end_s or self._signal() is not None

        assert self._corpus is not None
        write_tokens(self._job, self._corpus, pauses)
        self._is_foreground_over = True

    def _refresh(self) -> None:
        """Read what is written, on rank 0."""
        for name, log in self._logs.items():
            log.refresh()
            self._known[name] = (log.last.rows, log.last.ended)

    def _signal(self) -> int | None:
        """Return the signal that a rank has received, on rank 0."""
        number = self.interrupted()
        received = f"{self._key}/received"
        if number is None and self._store is not None and self._store.check([received]):
            number = int(self._store.get(received))
        return number

    def _beat(self, work: str) -> None:
        """Publish what rank 0 does, at most once a second, and report it every 30 s."""
        now = self._clock()
        if now - self._published_s >= BEAT_S:
            self._publish(work=work)
        self._report(f"waiting for tokens: {work}")

    def _publish(self, **changes: Any) -> None:
        """Set the status that the other ranks read."""
        self._status |= {"beat": self._status["beat"] + 1, "known": self._known} | changes
        self._published_s = self._clock()
        if self._store is not None:
            self._store.set(self._key, json.dumps(self._status))

    def _wait_for_rank_zero(self, name: str, rows: int) -> None:
        """Follow rank 0's status until the split has ``rows`` sequences, and this host shows them."""
        status: dict[str, Any] = {"beat": -1, "work": "opening the data"}
        changed_s = self._clock()
        is_signaled = False
        while not self._has(name, rows):
            found = json.loads(self._store.get(self._key)) if self._store.check([self._key]) else status
            if found["beat"] != status["beat"]:
                status, changed_s = found, self._clock()
                self._known = {split: tuple(known) for split, known in status["known"].items()}
                if "error" in status:
                    raise ValueError(f"preparing the data failed on rank 0: {status['error']}")
                if "stop" in status:
                    raise WaitStoppedError(status["stop"])
                continue
            number = self.interrupted()
            if number is not None and not is_signaled:
                self._store.set(f"{self._key}/received", str(number))
                is_signaled = True
            silent_s = self._clock() - changed_s
            if silent_s > self._store.timeout.total_seconds():
                raise RuntimeError(
                    f"rank {dist.get_rank()} waited {silent_s:.0f} s for tokens without a sign of rank 0, which was "
                    f"{status['work']}: look for its error, or raise trainer.distributed_timeout_minutes"
                )
            self._report(f"rank {dist.get_rank()} is waiting for rank 0: {status['work']}")
            time.sleep(POLL_S)
        self._require_visible()

    def _require_visible(self) -> None:
        """Read this host's logs until they have what rank 0 has published, of every split."""
        # Also of splits that nobody waits for now: a later wait asks for what is published only.
        begin_s = self._clock()
        while True:
            is_visible = True
            for name, log in self._logs.items():
                log.refresh()
                known, ended = self._known[name]
                is_visible &= log.last.rows >= known and log.last.ended >= ended
            if is_visible:
                return
            if self._clock() - begin_s > VISIBLE_S:
                raise ValueError(
                    f"{self._job.directory}, written by rank 0, is not visible here: use an output_dir that all hosts "
                    "share"
                )
            time.sleep(POLL_S)

    def _report(self, line: str) -> None:
        """Say every 30 s what is waited for, once on each host."""
        now = self._clock()
        if is_first_of_host() and now - self._reported_s >= REPORT_S:
            print(line, file=sys.stderr, flush=True)
            self._reported_s = now
