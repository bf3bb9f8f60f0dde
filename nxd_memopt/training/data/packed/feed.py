"""Gives every rank the packed tokens while they are written: rank 0 writes, or watches the process that does."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.data.packed.sequences import PackedSequences, WindowFiles
from nxd_memopt.training.data.packed.writer import Progress, TokenJob, TokenProcess, write_tokens
from nxd_memopt.training.data.sources.corpora import Corpus
from nxd_memopt.training.data.tokenize.windows import SPLITS
from nxd_memopt.training.runtime.distributed import is_first_of_host, is_rank_zero

# Work of rank 0 before it starts a process: a small corpus needs none. A process takes 3 s to start.
FOREGROUND_S = 5.0
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
    """Packed tokens of a source, which are written while the run trains. Every rank makes the same calls.

    A window exists when its file does. Ranks that wait exchange, again and again, how many files
    they see and whether they have received a signal: the answers are the same on every rank, so that
    all of them read up to the same window and stop in the same call.

    Args:
        job: what is tokenized.
        corpus: documents, on rank 0.
        foreground_share: part of ``FOREGROUND_S`` in which rank 0 tokenizes this source itself.
    """

    def __init__(
        self,
        job: TokenJob,
        corpus: Corpus | None,
        *,
        foreground_share: float = 1.0,
    ) -> None:
        self.fingerprint = job.fingerprint
        self.corpus_fingerprint = job.corpus_fingerprint
        self.notes = list(corpus.notes) if corpus else []
        self.interrupted: Callable[[], int | None] = lambda: None
        self.windows = {name: WindowFiles(job.directory, name, job.fingerprint) for name in SPLITS}
        self._job = job
        self._corpus = corpus
        self._foreground_s = FOREGROUND_S * foreground_share
        self._process: TokenProcess | None = None
        self._work = "opening the data"
        self._written = dict.fromkeys(SPLITS, 0)
        self._written_s = self._reported_s = time.monotonic()

    def wait(self, name: str, rows: int) -> None:
        """Return when a split has ``rows`` sequences, or all of its text.

        Raises:
            ValueError: on every rank, if rank 0 cannot tokenize the text, or a host does not show its files.
            WaitStoppedError: on every rank, if one has received a signal.
            RuntimeError: rank 0 has not answered for the timeout of the process group.
        """
        windows = self.windows[name]
        if windows.has(rows):
            return
        self._reported_s = time.monotonic()
        while True:
            self._exchange(name)
            if windows.has(rows):
                return
            with raise_together("preparing the data"):
                if is_rank_zero():
                    self._advance(name, rows)
            self._report()

    def open(self, name: str) -> PackedSequences:
        """Return the packed sequences of a split."""
        return PackedSequences(self.windows[name], seed=self._job.seed, wait=lambda rows: self.wait(name, rows))

    def wanted(self, name: str) -> int:
        """Return how many sequences of a split the run reads."""
        return self._job.wanted[name]

    def close(self) -> None:
        """End the process in the background, if there is one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _exchange(self, name: str) -> None:
        """Take over the windows that every rank sees, or stop together."""
        windows = self.windows[name]
        found = windows.count
        if is_rank_zero():
            found = windows.written()
        elif self._written[name] > found and windows.path(self._written[name] - 1).exists():
            # Never asked for before rank 0 has written it: NFS would remember for a minute that it is absent.
            found = self._written[name]
        answers = [json.loads(text) for text in share_texts(json.dumps([found, self.interrupted(), self._work]))]
        # All ranks have the same answers, so all of them raise here or none does. A rank that raised alone would leave
        # the others waiting for it in the next exchange.
        for _, number, _ in answers:
            if number is not None:
                raise WaitStoppedError(number)
        # The other hosts may take VISIBLE_S from here on: rank 0 may have waited for minutes for this window.
        if answers[0][0] > self._written[name]:
            self._written_s = time.monotonic()
        self._written[name], _, self._work = answers[0]
        # The smallest number: a rank that saw more windows than another one would divide the rows into epochs in
        # another way.
        windows.count = min(found for found, *_ in answers)

    def _advance(self, name: str, rows: int) -> None:
        """Write for some seconds, or watch the process that does, on rank 0."""
        windows = self.windows[name]
        if self._written[name] > windows.count:
            if time.monotonic() - self._written_s > VISIBLE_S:
                raise ValueError(
                    f"{windows.path(self._written[name] - 1)}, written by rank 0, is not visible on every host: use "
                    "an output_dir that all hosts share"
                )
        elif self._foreground_s:
            self._write_in_foreground()
            return
        elif self._process is None:
            self._process = TokenProcess(self._job)
        else:
            # Asked for first: if the process has ended by now, its error and its last window are found below.
            has_ended = self._process.has_ended
            self._process.require_running()
            if has_ended and windows.written() == windows.count:
                raise ValueError(
                    f"tokenizing has ended with {windows.last.rows} sequences of {name} text, and {rows} are needed: "
                    "start the same command again"
                )
            self._work = self._process.progress
        time.sleep(POLL_S)

    def _write_in_foreground(self) -> None:
        """Tokenize in this process, in this source's part of ``FOREGROUND_S``; a small corpus is then complete."""
        end_s = time.monotonic() + self._foreground_s

        def pauses(progress: Progress) -> bool:
            self._work = str(progress)
            self._report()
            return time.monotonic() > end_s or self.interrupted() is not None

        assert self._corpus is not None
        self._foreground_s = 0.0
        write_tokens(self._job, self._corpus, pauses)

    def _report(self) -> None:
        """Say every 30 s what is waited for, once on each host."""
        now = time.monotonic()
        if is_first_of_host() and now - self._reported_s >= REPORT_S:
            print(f"waiting for tokens: {self._work}", file=sys.stderr, flush=True)
            self._reported_s = now
