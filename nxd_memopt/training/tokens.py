"""Packs token ids into sequences of one length, in a shuffled order, and reads them from a flat file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nxd_memopt.training.config import DataConfig
from nxd_memopt.training.documents import Documents, Part
from nxd_memopt.training.packing import Tokens, best_fit, concatenated
from nxd_memopt.training.vocabulary import Vocabulary

SPLITS = ("train", "held_out")
# Sequences shuffled together. At S = 1024 a window has 1024 * 1024 * 4 bytes = 4 MiB and the text
# of about 64 standard library files.
WINDOW_SEQUENCES = 1024
DOCUMENTS_PER_CALL = 32  # documents that a fast tokenizer encodes in parallel


class TokenFile:
    """Packed sequences of one split, memory-mapped.

    Args:
        path: flat file of int32 token ids with the flags of ``packing``, ``[sequences, S]``.
        seq_length: S, tokens per sequence.
        documents_per_row: the largest number of documents in a row.
        seed: seed of the order of the second and later epochs; the first epoch has the file's
            order, which is shuffled already.
    """

    def __init__(self, path: Path, seq_length: int, *, documents_per_row: int, seed: int = 0) -> None:
        # Memory-mapped: ranks of a host share the page cache, and a step reads its rows only.
        self._tokens: Tokens = np.memmap(path, dtype=np.int32, mode="r").reshape(-1, seq_length)
        self.documents_per_row = documents_per_row
        self._seed = seed
        self._order: tuple[int, NDArray[np.int64] | None] = (0, None)

    def __len__(self) -> int:
        return len(self._tokens)

    def rows(self, positions: range) -> Tokens:
        """Return the rows at ``positions`` of the stream, ``[len(positions), S]``, with their flags.

        The stream repeats the file without end.
        """
        return np.stack([self._tokens[self._row(position)] for position in positions])

    def _row(self, position: int) -> int:
        """Return the file's row at ``position``; each epoch after the first has a permutation."""
        # The permutation is a function of seed and epoch, so a resumed run needs no data state
        # but the step. Only the last epoch's permutation is cached.
        epoch, row = divmod(position, len(self))
        if epoch == 0:
            return row
        if self._order[0] != epoch:
            generator = np.random.default_rng([self._seed, 2, epoch])
            self._order = (epoch, generator.permutation(len(self)))
        assert self._order[1] is not None
        return int(self._order[1][row])


def packed_windows(
    documents: Documents,
    parts: list[Part],
    vocabulary: Vocabulary,
    config: DataConfig,
    seed: int,
) -> Iterator[Tokens]:
    """Yield the packed sequences of ``parts`` in the order of training, ``[<= WINDOW_SEQUENCES, S]``.

    Raises:
        ValueError: the documents have fewer than S tokens.
    """
    sequences = _packed(documents, _shuffled(parts, seed), vocabulary, config, seed)
    return _shuffled_windows(sequences, seed)


def _shuffled(parts: list[Part], seed: int) -> list[Part]:
    """Return ``parts`` in an order that depends on ``seed`` and their number."""
    # [seed, 0] orders documents, [seed, 1] the sequences of each window, [seed, 2, epoch] those of
    # a later epoch, [seed, 3] the rows of best fit.
    return [parts[index] for index in np.random.default_rng([seed, 0]).permutation(len(parts))]


def _shuffled_windows(sequences: Iterator[Tokens], seed: int) -> Iterator[Tokens]:
    """Yield windows of shuffled sequences, ``[<= WINDOW_SEQUENCES, S]``.

    Neighbouring sequences come from one document; shuffling spreads them over a window.
    """
    generator = np.random.default_rng([seed, 1])
    while window := list(itertools.islice(sequences, WINDOW_SEQUENCES)):
        yield np.stack(window)[generator.permutation(len(window))]


def _packed(
    documents: Documents, parts: list[Part], vocabulary: Vocabulary, config: DataConfig, seed: int
) -> Iterator[Tokens]:
    """Yield the rows ``[S]`` of the documents, packed as ``config.packing`` says.

    Raises:
        ValueError: there is no complete row.
    """
    tokens = 0

    def counted() -> Iterator[Tokens]:
        nonlocal tokens
        for document in _encoded(documents, parts, vocabulary):
            tokens += len(document)
            yield document

    if config.packing == "best_fit":
        rows = best_fit(counted(), config.seq_length, padding_id=vocabulary.end_of_text, seed=seed)
    else:
        rows = concatenated(counted(), config.seq_length)
    found = False
    for row in rows:
        found = True
        yield row
    if not found:
        raise ValueError(_too_short(config, tokens, len(parts)))


def _encoded(documents: Documents, parts: list[Part], vocabulary: Vocabulary) -> Iterator[Tokens]:
    """Yield the token ids of each document; memory is bounded by ``DOCUMENTS_PER_CALL`` documents."""
    for start in range(0, len(parts), DOCUMENTS_PER_CALL):
        texts = [documents.text(part) for part in parts[start : start + DOCUMENTS_PER_CALL]]
        # Empty documents are left out: each would add nothing but an end-of-text token.
        texts = [text for text in texts if text.strip()]
        if texts:
            for ids in vocabulary.encode(texts):
                yield np.asarray(ids, dtype=np.int32)


def _too_short(config: DataConfig, tokens: int, count: int) -> str:
    """Return the message for a split that has no complete sequence."""
    if not tokens:
        return (
            f"a split of dataset {config.dataset!r} is empty: none of its {count} documents has any text, or "
            f"data.held_out_every {config.held_out_every} leaves nothing of it: lower held_out_every, or give it text"
        )
    return (
        f"the {count} documents of a split of {config.dataset!r} have {tokens} tokens, fewer "
        f"than data.seq_length {config.seq_length}: shorten data.seq_length, give it more text, "
        "or set data.eval_sequences to 0"
    )
