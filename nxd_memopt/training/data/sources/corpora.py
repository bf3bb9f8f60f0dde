"""The documents of a run in the order of training: an exact permutation, or shuffled shards with a shuffled window."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packing import Tokens
from nxd_memopt.training.data.sources.documents import (
    Documents,
    Part,
    StoredTexts,
    is_digest_held_out,
    open_documents,
    text_digest,
)
from nxd_memopt.training.data.sources.indexed_tokens import SUFFIX, IndexedTokens, PermutedTokens, are_held_out
from nxd_memopt.training.data.sources.rows import Place, RowReader, Shard
from nxd_memopt.training.data.sources.shards import find_shards, is_streamed, refuse_conversations

Document = str | Tokens
"""Text, or token ids with the flags of ``packing``."""
Position = list[int]
"""Place between two documents of a stream, as JSON values."""

# Documents that are shuffled together: two neighbours of one file are then as far apart as files
# are. Their text is on disk, so the number costs no memory.
WINDOW_DOCUMENTS = 10_000
# For one held-out sequence, held_out_every sequences of text are read before the first step.
HELD_OUT_SEQUENCES = 64
# Sequences shuffled together, and written together, at most.
WINDOW_SEQUENCES = 1024


class DocumentStream(Protocol):
    """Documents of one split in the order of training."""

    def read(self, start: Position | None) -> Iterator[tuple[Document, Position, Place | None]]:
        """Yield the documents from ``start`` on; None is the beginning.

        Each has the position after it, and the place of its row, if it has one.
        """
        ...

    def share_of(self, position: Position) -> float:
        """Return about which part of the documents is before a position of ``read``."""
        ...


@dataclass(frozen=True)
class Corpus:
    """Training and held-out documents.

    Args:
        train: documents for training.
        held_out: documents for evaluation.
        fingerprint: hash of the documents, their split and what their order depends on, other
            than the seed.
        notes: lines about the order, for the start report.
        held_out_window: held-out sequences that are shuffled together at most.
    """

    train: DocumentStream
    held_out: DocumentStream
    fingerprint: str
    notes: tuple[str, ...] = ()
    held_out_window: int = WINDOW_SEQUENCES


def open_corpus(config: DataConfig, seed: int) -> Corpus:
    """Find the documents of ``config.source``, the options of one source (``DataConfig.of_source``).

    Those of a small corpus are all checked here, and ordered by an exact permutation. A large one
    (``data.streaming``) is read once, from beginning to end, while the run trains: the memory that
    this function needs does not depend on its size. It reads the first ``held_out_every`` documents, and
    more until the hash has put some on both sides. If it never does, the corpus is read as a small one.

    Raises:
        ValueError: as ``open_documents``; bad rows of a large corpus are found when they are read.
    """
    if Path(config.source).suffix == SUFFIX:
        return _open_indexed(config, seed)
    if not is_streamed(config):
        return _open_small(config, seed)
    every, reader = config.split_every, RowReader(config)

    def is_held_out(text: str) -> bool:
        return is_digest_held_out(text_digest(text), every)

    shards = find_shards(config, reader, streamed=True)
    if not _has_both_splits((is_held_out(text) for shard in shards for text, _ in shard.read(0)), every):
        corpus = _open_small(config, seed)
        note = f"order: all of {config.source!r} is read before training: it has too few documents to stream"
        return replace(corpus, notes=(note, *corpus.notes))
    facts = ["window", WINDOW_DOCUMENTS, every, [shard.identity for shard in shards]]
    fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    note = (
        f"order: {len(shards)} shards of {config.source!r} are read in a shuffled order, with a shuffled window of "
        f"{WINDOW_DOCUMENTS:,} documents"
    )
    # Held-out documents are not shuffled: a window would read 10,000 x held_out_every documents
    # before the first evaluation.
    return Corpus(
        WindowedDocuments(shards, seed, lambda text: not is_held_out(text), WINDOW_DOCUMENTS),
        WindowedDocuments(shards, seed, is_held_out, 1),
        fingerprint,
        (note,),
        HELD_OUT_SEQUENCES,
    )


def _open_small(config: DataConfig, seed: int) -> Corpus:
    """Return documents in an exact permutation, after all were read."""
    documents = open_documents(config)
    notes = [f"the last 1/{config.split_every} of each document is held out"] if documents.are_cut else []
    return Corpus(
        PermutedDocuments(documents, documents.train, seed),
        PermutedDocuments(documents, documents.held_out, seed),
        documents.fingerprint,
        tuple(notes),
    )


def _has_both_splits(held_out: Iterable[bool], every: int) -> bool:
    """Return whether the hash splits the documents: there are at least ``every``, some held out and some not.

    Args:
        held_out: for each document, whether its hash says that it is held out; read as far as needed.
        every: ``data.held_out_every``.
    """
    if not every:
        return True
    counts = {False: 0, True: 0}
    for is_out in held_out:
        counts[is_out] += 1
        if all(counts.values()) and sum(counts.values()) >= every:
            return True
    return False


def _open_indexed(config: DataConfig, seed: int) -> Corpus:
    """Return documents of token ids, whose places are known: an exact permutation at any size."""
    refuse_conversations(config, "tokens")
    tokens = IndexedTokens(Path(config.source))
    every = config.split_every
    facts = ["indexed", every, *tokens.identity]
    # As for texts: by the hash of its ids, or, with few documents, the end of each one. The ids are read here as far as
    # needed for both sides, and no further.
    sides = (are_held_out(tokens[index], every) for index in range(len(tokens)))
    are_cut = not _has_both_splits(sides, every)

    def part(ids: Tokens, *, held_out: bool) -> Tokens | None:
        if are_cut:
            cut = int((1 - 1 / every) * len(ids))
            return ids[cut:] if held_out else ids[:cut]
        return ids if are_held_out(ids, every) == held_out else None

    notes = [f"order: {len(tokens):,} documents of token ids in {config.source!r}, in an exact permutation"]
    if are_cut:
        notes.append(f"the last 1/{every} of each document is held out")
    return Corpus(
        PermutedTokens(tokens, seed, partial(part, held_out=False)),
        PermutedTokens(tokens, seed, partial(part, held_out=True)),
        hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        tuple(notes),
        HELD_OUT_SEQUENCES,
    )


class PermutedDocuments:
    """Documents with known indices, in an order that depends on the seed and their number.

    Args:
        documents: reads a part by its index.
        parts: the split's parts.
        seed: seed of the order.
    """

    def __init__(self, documents: Documents, parts: list[Part], seed: int) -> None:
        self._documents = documents
        self._parts = parts
        # Streams of random numbers: [seed, 0] orders documents or shards, [seed, 1] the sequences
        # of each window, [seed, 2, epoch] those of a later epoch, [seed, 3] the rows of best fit,
        # [seed, 4, ...] the documents of a window.
        self._order = np.random.default_rng([seed, 0]).permutation(len(parts))

    def read(self, start: Position | None) -> Iterator[tuple[str, Position, Place]]:
        """Yield the texts from position ``[number of documents before it]`` on."""
        (first,) = start or [0]
        for number in range(first, len(self._order)):
            part = self._parts[self._order[number]]
            yield self._documents.text(part), [number + 1], self._documents.texts.place(part.index)

    def share_of(self, position: Position) -> float:
        """Return which part of the documents is before a position."""
        return position[0] / max(len(self._order), 1)


class WindowedDocuments:
    """Documents of shards: the shards in a shuffled order, and windows of documents shuffled within.

    A window's order depends on the seed and the window's place alone, so reading can go on from
    any position.

    Args:
        shards: all shards, in an order that does not depend on the machine.
        seed: seed of the order.
        is_chosen: whether a text belongs to the split.
        window: documents that are shuffled together.
    """

    def __init__(self, shards: list[Shard], seed: int, is_chosen: Callable[[str], bool], window: int) -> None:
        self._shards = [shards[index] for index in np.random.default_rng([seed, 0]).permutation(len(shards))]
        self._seed = seed
        self._is_chosen = is_chosen
        self._window = window
        # Begin of each window that was read -> the place after it, and its documents.
        self._ends: dict[tuple[int, int], tuple[Position, int]] = {}

    def read(self, start: Position | None) -> Iterator[tuple[str, Position, Place]]:
        """Yield texts from a position ``[shard, offset in it, documents of the window there]`` on."""
        shard, offset, done = start or [0, 0, 0]
        while shard < len(self._shards):
            texts, after = self._window_at(shard, offset)
            self._ends[shard, offset] = (after, len(texts))
            order = np.random.default_rng([self._seed, 4, shard, offset]).permutation(len(texts))
            for number in range(done, len(order)):
                index = int(order[number])
                # After the window's last document the position is the next window's begin.
                is_last = number + 1 == len(order)
                yield texts.read(index), [*after, 0] if is_last else [shard, offset, number + 1], texts.place(index)
            shard, offset = after
            done = 0

    def share_of(self, position: Position) -> float:
        """Return about which part of the shards is before a position, as if all were equally large."""
        shard, offset, done = position
        share = self._part_before(shard, offset)
        if not done:
            return share
        # Documents of a window are in no order of their places.
        after, count = self._ends[shard, offset]
        return share + done / count * (self._part_before(after[0], after[1]) - share)

    def _part_before(self, shard: int, offset: int) -> float:
        """Return the part of the shards before a place between two windows."""
        within = self._shards[shard].share_of(offset) if offset else 0.0
        return (shard + within) / len(self._shards)

    def _window_at(self, shard: int, offset: int) -> tuple[StoredTexts, Position]:
        """Return the texts of a window, and the place after them."""
        texts = StoredTexts()
        while shard < len(self._shards):
            for text, after in self._shards[shard].read(offset):
                offset = after
                if not self._is_chosen(text):
                    continue
                texts.add(text, self._shards[shard], after)
                if len(texts) == self._window:
                    return texts, [shard, offset]
            shard, offset = shard + 1, 0
        return texts, [shard, 0]
