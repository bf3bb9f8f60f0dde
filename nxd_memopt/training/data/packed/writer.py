"""Tokenizes the text of a run and writes it, in rank 0's process or in one of its own in the background."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from nxd_memopt.child_process import describe_exit
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.tokenize.workers import end_with_parent
from nxd_memopt.training.runtime.distributed import host_only

PROGRESS_BYTES = 256
ALL_SEQUENCES = 2**62
"""Number of wanted sequences that no text has."""
NICE = 10  # the ranks' own work comes first


@dataclass(frozen=True)
class TokenJob:
    """What is tokenized.

    Args:
        directory: directory of the packed tokens.
        fingerprint: fingerprint of text, tokenizer and options.
        corpus_fingerprint: fingerprint of the documents.
        config: data options.
        vocabulary: ``Vocabulary`` of the run.
        seed: seed of the order of documents and sequences.
        wanted: sequences of each split, at least; a split's last window is written as a whole.
        is_validation: whether all documents are held out, and not those of the corpus's own split.
    """

    directory: Path
    fingerprint: str
    corpus_fingerprint: str
    config: DataConfig
    vocabulary: Any
    seed: int
    wanted: Mapping[str, int]
    is_validation: bool = False


class Progress(NamedTuple):
    """How much of a split is tokenized.

    Args:
        name: of the split, ``train`` or ``held_out``.
        sequences: sequences that are written.
        wanted: sequences that are wanted; ``ALL_SEQUENCES`` for all of the text.
        documents: documents that were read.
        tokens: tokens of the documents that this call of ``write_tokens`` has read.
        share: about which part of the work is done.
    """

    name: str
    sequences: int
    wanted: int
    documents: int
    tokens: int
    share: float

    def __str__(self) -> str:
        sequences = f"{self.sequences:,}"
        if self.wanted != ALL_SEQUENCES:
            sequences += f" of {self.wanted:,}"
        return (
            f"tokenizing {self.name.replace('_', '-')} text: {sequences} sequences are complete, "
            f"{self.documents:,} documents are read"
        )


def write_tokens(job: TokenJob, corpus: Any, pauses: Callable[[Progress], bool], *, workers: Any = None) -> bool:
    """Write the windows of each split until those wanted exist; return whether they do.

    Goes on after the windows that are on the disk.

    Args:
        job: what is tokenized.
        corpus: ``Corpus`` of the run.
        pauses: called after each call of the tokenizer; True stops there.
        workers: ``TokenWorkers``, or None to tokenize in this process.

    Raises:
        ValueError: a split has no complete sequence, a row is bad, or a window was altered.
        OSError: a file cannot be written.
    """
    # Imported here: the process in the background first chooses its backend.
    from nxd_memopt.training.data.packed.sequences import WindowFiles
    from nxd_memopt.training.data.sources.corpora import HELD_OUT_SEQUENCES, WINDOW_SEQUENCES
    from nxd_memopt.training.data.tokenize.windows import (
        MIN_WINDOW_SEQUENCES,
        WINDOW_TOKENS,
        PackedWindows,
        window_sequences,
    )

    held_out, held_out_window = corpus.held_out, corpus.held_out_window
    if job.is_validation:
        held_out, held_out_window = corpus.train, HELD_OUT_SEQUENCES
    # Best fit has no row before a window of documents is full, and a run waits for its held-out rows before the first
    # step: windows of training's size would be millions of tokens that nobody evaluates.
    if job.config.packing == "best_fit":
        held_out_window = MIN_WINDOW_SEQUENCES
    with _only_writer(job.directory), _named_write_errors(job.directory):
        # Held-out text first: it is evaluated before the first step.
        for name, stream, most, first_tokens in (
            ("held_out", held_out, held_out_window, MIN_WINDOW_SEQUENCES * job.config.seq_length),
            ("train", corpus.train, WINDOW_SEQUENCES, WINDOW_TOKENS),
        ):
            files, wanted = WindowFiles(job.directory, name, job.fingerprint), job.wanted[name]
            files.count = files.written()
            if files.has(wanted):
                continue
            size = window_sequences(job.config.seq_length, most)
            windows = PackedWindows(
                stream, job.vocabulary, job.config, job.seed, files.restart(), workers, first_tokens
            )
            # A window that is not complete is lost when this function stops: its documents are read and tokenized
            # again.
            for window in windows.windows(size):
                if window is not None:
                    files.write(window)
                rows = files.last.rows
                share = min(max(rows / wanted, windows.share), 1.0)
                is_paused = pauses(Progress(name, rows, wanted, windows.documents, windows.tokens, share))
                if files.has(wanted):
                    break
                if is_paused:
                    return False
    return True


class TokenProcess:
    """A process that runs ``write_tokens``; it ends with the process that started it.

    Args:
        job: what is tokenized.
    """

    def __init__(self, job: TokenJob) -> None:
        # Not forked: threads of the device and of the tokenizer do not survive a fork.
        context = multiprocessing.get_context("spawn")
        # The line of progress is in shared memory: it needs no thread that reads, and a run that never asks costs
        # nothing.
        self._progress: Any = context.Array("c", PROGRESS_BYTES)
        self._receiving, sending = context.Pipe(duplex=False)
        self._process = context.Process(target=_main, args=(job, self._progress, sending), daemon=True, name="tokens")
        with host_only():
            self._process.start()
        sending.close()

    @property
    def progress(self) -> str:
        """The newest line of progress."""
        return self._progress.value.decode(errors="ignore") or "starting to tokenize"

    def require_running(self) -> None:
        """Raise the error that the process has ended with, if it has."""
        if self._receiving.poll():
            # The end of the pipe, if the process has ended without an error.
            with suppress(EOFError):
                kind, message = self._receiving.recv()
                raise kind(message)
        if not self._process.is_alive() and self._process.exitcode:
            reason = describe_exit(self._process.exitcode, remedy="close other programs")
            raise ValueError(f"the process that tokenizes ended with {reason}; start the same command to continue")

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended: it has written all that it was asked for."""
        return not self._process.is_alive()

    def close(self) -> None:
        """End the process; what it has written completely stays."""
        self._process.terminate()
        self._process.join()
        self._receiving.close()


def _main(job: TokenJob, progress: Any, sending: Connection) -> None:
    """Run ``write_tokens`` in the background; send the error of a user."""
    # A terminal sends SIGINT to all of its processes: the run decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    with suppress(OSError):
        os.nice(NICE)
    from nxd_memopt.training.data.sources.corpora import open_corpus

    def report(done: Progress) -> bool:
        progress.value = str(done).encode()[: PROGRESS_BYTES - 1]
        return False

    try:
        corpus = open_corpus(job.config, job.seed)
        if corpus.fingerprint != job.corpus_fingerprint:
            raise ValueError(f"dataset {job.config.dataset!r} has changed since the run started: start it again")
        write_tokens(job, corpus, report)
    except ValueError as error:
        sending.send((ValueError, str(error)))
        raise SystemExit(1) from error
    except OSError as error:
        sending.send((OSError, str(error)))
        raise SystemExit(1) from error


@contextmanager
def _only_writer(directory: Path) -> Iterator[None]:
    """Wait until no other process writes to ``directory``: that of a killed run ends within moments."""
    with (directory / "writer.lock").open("a") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _named_write_errors(directory: Path) -> Iterator[None]:
    """Say in an error of writing what was written, and what to do."""
    try:
        yield
    except OSError as error:
        # An error in writing names no file, or one of ours; the others are of reading the data.
        if error.filename is not None and directory not in Path(error.filename).parents:
            raise
        raise OSError(
            f"could not write the tokens to {directory}: {error}: free disk space or choose another trainer.output_dir"
        ) from error
