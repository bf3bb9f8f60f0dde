"""Tokenizes documents and packs them into windows of shuffled sequences, from the beginning or a recorded place."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packing import BestFit, Concatenation, Tokens
from nxd_memopt.training.data.sources.corpora import Document, DocumentStream, Position
from nxd_memopt.training.data.sources.rows import BadRows, Place
from nxd_memopt.training.data.tokenize.chat import Encoded
from nxd_memopt.training.data.tokenize.encoding import DocumentEncoder
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.data.tokenize.workers import WORKER_CHARACTERS, TokenWorkers

Origin = tuple[Position, Place | None]
"""Position in the stream after a document, and the place of its row, if it has one."""

SPLITS: tuple[str, ...] = ("train", "held_out")
# Tokens of a window of long sequences: the first window exists after some seconds.
WINDOW_TOKENS = 2**20
MIN_WINDOW_SEQUENCES = 16
DOCUMENTS_PER_CALL = 32  # documents that a fast tokenizer encodes in parallel
CALL_CHARACTERS = 2**22  # of their text: four pieces of a long text file


@dataclass(frozen=True)
class Window:
    """Shuffled sequences that are written together.

    Args:
        rows: ``[<= window_sequences(S), S]`` with the flags of ``packing``; the last window may be empty.
        restart: state from which ``PackedWindows`` yields the next windows, as JSON values.
        documents: documents that were read for these rows and all before them.
        ended: whether there is no further window.
        outcomes: of them, how many conversations were cut, dropped or skipped.
    """

    rows: Tokens
    restart: Mapping[str, Any]
    documents: int
    ended: bool
    outcomes: Mapping[str, int] = field(default_factory=dict)


class _Row(NamedTuple):
    """A row that is not written yet.

    Args:
        tokens: ``[S]``, with the flags of ``packing``.
        before: the last place before it from which packing can go on.
        documents: documents that were read when it was complete.
        outcomes: of them, conversations that were cut, dropped or skipped.
    """

    tokens: Tokens
    before: _Point
    documents: int
    outcomes: Mapping[str, int]


@dataclass(frozen=True)
class _Point:
    """Place between two documents from which packing can go on.

    Args:
        produced: rows that the documents before it have completed.
        position: place in the stream of documents.
        documents: documents before it.
        packer: state of the packer.
        outcomes: conversations before it that were cut, dropped or skipped.
    """

    produced: int
    position: Position | None
    documents: int
    packer: Mapping[str, Any] | None
    outcomes: Mapping[str, int] = field(default_factory=dict)


def window_sequences(seq_length: int, most: int) -> int:
    """Return the number of sequences that are shuffled and written together, at most ``most``."""
    return min(most, max(MIN_WINDOW_SEQUENCES, WINDOW_TOKENS // seq_length))


class PackedWindows:
    """The windows of a split in the order of training: documents become rows, and rows become shuffled windows.

    The windows after ``restart`` are those that follow it without an interruption, and do not depend
    on who tokenizes.

    Args:
        stream: documents of the split.
        vocabulary: tokenizer.
        config: S, the packing and the names in messages.
        seed: seed of the order of sequences.
        restart: ``Window.restart`` of the last window that was written.
        workers: processes that tokenize; None for this one alone.
        first_tokens: tokens that best fit arranges first.
    """

    def __init__(
        self,
        stream: DocumentStream,
        vocabulary: Vocabulary,
        config: DataConfig,
        seed: int,
        restart: Mapping[str, Any] | None = None,
        workers: TokenWorkers | None = None,
        first_tokens: int = WINDOW_TOKENS,
    ) -> None:
        self._stream = stream
        self._workers = workers
        self._encoder = DocumentEncoder(vocabulary, config)
        self._bad_rows = BadRows(config)
        self._config = config
        self._shuffle = np.random.default_rng([seed, 1])
        self._point = _Point(0, None, 0, None)
        self._written = 0
        if restart is not None:
            self._point = _Point(**restart["point"])
            self._written = restart["written"]
            self._shuffle.bit_generator.state = restart["shuffle"]
        self._start = self._point.position
        self._packer = _packer(config, vocabulary, seed, self._point.packer, first_tokens)
        # A document, or a window of best fit, may complete rows of several windows. Going on, its
        # first rows are those that are written already.
        self._written_again = self._written - self._point.produced
        self._produced = self._point.produced
        self._documents = self._point.documents
        self._outcomes = Counter(self._point.outcomes)
        self._pending: list[_Row] = []
        self.tokens = 0
        """Tokens of the documents that this object has read."""
        self._position = self._start

    @property
    def documents(self) -> int:
        """Documents that were read, and those before ``restart``."""
        return self._documents

    @property
    def share(self) -> float:
        """About which part of the documents was read."""
        return self._stream.share_of(self._position) if self._position else 0.0

    def windows(self, size: int) -> Iterator[Window | None]:
        """Yield windows of ``size`` sequences, and None after each call of the tokenizer that completes no window.

        The caller can stop at None.

        Raises:
            ValueError: the documents have no complete sequence, or a conversation cannot be rendered and
                ``data.on_bad_rows`` is ``error``.
        """
        for origins, encoded in self._encoded():
            self._add(origins, encoded)
            # A window is yielded when a further row exists. The last window of the text is then known to
            # be the last one, whatever the calls of the tokenizer are.
            if len(self._pending) <= size:
                yield None
            while len(self._pending) > size:
                yield self._window(size)
        self._take(self._packer.finish())
        while len(self._pending) > size:
            yield self._window(size)
        if not self._pending and not self._written:
            raise ValueError(_too_short(self._config, self.tokens, self._documents, self._outcomes))
        yield self._window(len(self._pending), ended=True)

    def _encoded(self) -> Iterator[tuple[list[Origin], list[Encoded]]]:
        """Yield the tokens of the documents of each call, with their origins."""
        waiting: deque[list[Origin]] = deque()

        def documents() -> Iterator[list[Document]]:
            for texts, origins in self._calls():
                waiting.append(origins)
                yield texts

        encoded = self._workers.encode(documents()) if self._workers else map(self._encoder.encode, documents())
        for tokens in encoded:
            yield waiting.popleft(), tokens

    def _calls(self) -> Iterator[tuple[list[Document], list[Origin]]]:
        """Yield the documents of each call of the tokenizer, with their origins."""
        texts: list[Document] = []
        origins: list[Origin] = []
        size = 0
        for document, position, place in self._stream.read(self._start):
            texts.append(document)
            origins.append((position, place))
            size += len(document)
            most = WORKER_CHARACTERS if self._workers and not self._workers.is_alone else CALL_CHARACTERS
            if len(texts) == DOCUMENTS_PER_CALL or size >= most:
                yield texts, origins
                texts, origins, size = [], [], 0
        if texts:
            yield texts, origins

    def _add(self, origins: list[Origin], encoded: list[Encoded]) -> None:
        """Pack the tokens of documents."""
        for (tokens, outcome, problem), (position, place) in zip(encoded, origins, strict=True):
            self._documents += 1
            self.tokens += len(tokens)
            self._position = position
            if problem:
                self._bad_rows.leave_out("not renderable", f"{place}, {problem}")
            if outcome != "complete":
                self._outcomes[outcome] += 1
            if not len(tokens):
                continue
            self._take(self._packer.add(tokens))
            # The state costs a copy, so it is asked for where a row was completed: only the last point
            # before a row is of use.
            state = self._packer.state() if self._produced > self._point.produced else None
            if state is not None:
                outcomes = dict(self._outcomes)
                self._point = _Point(self._produced, position, self._documents, state, outcomes)

    def _take(self, rows: Sequence[Tokens]) -> None:
        """Add rows that are not written yet to those of the next windows."""
        self._produced += len(rows)
        again = min(self._written_again, len(rows))
        self._written_again -= again
        outcomes = dict(self._outcomes)
        self._pending += [_Row(tokens, self._point, self._documents, outcomes) for tokens in rows[again:]]

    def _window(self, size: int, *, ended: bool = False) -> Window:
        """Return the next ``size`` rows, shuffled."""
        # Neighbouring sequences come from one document; shuffling spreads them over a window.
        rows = np.empty((size, self._config.seq_length), dtype=np.int32)
        for place, index in enumerate(self._shuffle.permutation(size)):
            rows[place] = self._pending[index].tokens
        # The state to go on from is that before the first row that is not written. Documents from there on are read and
        # tokenized again, and the rows that are written already are left out.
        written, self._pending = self._pending[:size], self._pending[size:]
        self._written += size
        # Going on reads the documents again that have rows in later windows.
        next_row = self._pending[0] if self._pending else written[-1]
        restart = {
            "point": vars(next_row.before),
            "written": self._written,
            "shuffle": self._shuffle.bit_generator.state,
        }
        # The last documents may have completed no row.
        if ended:
            return Window(rows, restart, self._documents, ended, dict(self._outcomes))
        return Window(rows, restart, written[-1].documents, ended, written[-1].outcomes)


def _packer(
    config: DataConfig, vocabulary: Vocabulary, seed: int, state: Mapping[str, Any] | None, first_tokens: int
) -> BestFit | Concatenation:
    """Return the packer of ``data.packing``."""
    if config.packing == "best_fit":
        padding_id = vocabulary.end_of_text
        return BestFit(config.seq_length, padding_id=padding_id, seed=seed, state=state, first_tokens=first_tokens)
    return Concatenation(config.seq_length, state)


def _too_short(config: DataConfig, tokens: int, count: int, outcomes: Mapping[str, int]) -> str:
    """Return the message for a split that has no complete sequence."""
    if sum(outcomes.values()):
        return (
            f"a split of dataset {config.dataset!r} is empty: of its {count} conversations {described(outcomes)}: "
            "raise data.seq_length, or correct them"
        )
    if not tokens:
        return (
            f"a split of dataset {config.dataset!r} is empty: none of its {count} documents has any text, or "
            f"data.held_out_every {config.held_out_every} leaves nothing of it: lower held_out_every, or give it text"
        )
    remedies = "shorten data.seq_length, or give it more text"
    if config.eval_sequences:
        remedies += "; without held-out text (data.eval_sequences 0) all of it is trained"
    return (
        f"the {count} documents of a split of {config.dataset!r} have {tokens} tokens, fewer than data.seq_length "
        f"{config.seq_length}: {remedies}"
    )


def described(outcomes: Mapping[str, int]) -> str:
    """Return how many conversations were cut, dropped and skipped, in words."""
    reasons = {"cut": "longer than data.seq_length", "dropped": "too long", "skipped": "not renderable"}
    return ", ".join(f"{outcomes.get(name, 0):,} were {name} ({reason})" for name, reason in reasons.items())
