"""Packs the tokens of documents into rows of S tokens: concatenated, or as pieces that fit best."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
"""Token ids with the two flags below in their upper bits: one number a token, which cannot get out of step."""

DOCUMENT_START = 1 << 29
"""Flag of the first token of a document, of a piece of a document that best fit has cut, and of padding."""
NOT_TRAINED = 1 << 30
"""Flag of a token that is never predicted, such as padding: its label is -100."""
ID_MASK = DOCUMENT_START - 1

# Tokens of the documents that best-fit packing arranges together. More leave less padding (on
# source code with S = 1024, 0.1 % in windows of this size) and need more memory: 32 MiB.
WINDOW_TOKENS = 2**22


def concatenated(documents: Iterable[Tokens], length: int) -> Iterator[Tokens]:
    """Yield rows ``[S]`` of the documents one after another; a remainder below S tokens is dropped.

    A document that crosses the end of a row continues in the next one.
    """
    rest: list[Tokens] = []
    size = 0
    for document in documents:
        rest.append(_started(document))
        size += len(document)
        if size >= length:
            joined = np.concatenate(rest)
            rows = joined[: size // length * length].reshape(-1, length)  # [complete rows, S]
            rest = [joined[rows.size :]]
            size -= rows.size
            yield from rows


def best_fit(documents: Iterable[Tokens], length: int, *, padding_id: int, seed: int) -> Iterator[Tokens]:
    """Yield rows ``[S]`` in which documents are cut as rarely as possible (arXiv:2404.10830).

    Only documents longer than S are cut, into pieces of S tokens and a remainder. Within windows
    of ``WINDOW_TOKENS`` tokens, the pieces are placed from the longest to the shortest, each into
    the row with the least space that it fits into. A row's end is filled with ``padding_id``,
    which is not trained and is a document of its own. The rows of a window are shuffled, because
    they are found in the order of their documents' lengths.
    """
    generator = np.random.default_rng([seed, 3])
    window: list[Tokens] = []
    size = 0
    for document in documents:
        # Each piece starts a document: in its row, the tokens before it are of another one.
        window += [_started(document[start : start + length]) for start in range(0, len(document), length)]
        size += len(document)
        if size >= WINDOW_TOKENS:
            yield from _shuffled(_best_fit_rows(window, length, padding_id), generator)
            window = []
            size = 0
    yield from _shuffled(_best_fit_rows(window, length, padding_id), generator)


def _best_fit_rows(pieces: list[Tokens], length: int, padding_id: int) -> list[Tokens]:
    """Return the rows of ``pieces`` of at most ``length`` tokens, packed best-fit-decreasing."""
    # sorted is stable: pieces of one length keep their order, so the rows are deterministic.
    rows: list[list[Tokens]] = []
    spaces: list[tuple[int, int]] = []  # (space, row), ascending: the first that is large enough fits best
    for piece in sorted(pieces, key=len, reverse=True):
        at = bisect_left(spaces, (len(piece), 0))
        if at == len(spaces):
            space, row = length, len(rows)
            rows.append([])
        else:
            space, row = spaces.pop(at)
        rows[row].append(piece)
        if space > len(piece):
            insort(spaces, (space - len(piece), row))
    return [_padded(np.concatenate(pieces_of_row), length, padding_id) for pieces_of_row in rows]


def _padded(row: Tokens, length: int, padding_id: int) -> Tokens:
    """Return ``row`` followed by padding up to ``length`` tokens, as a document of its own."""
    padding = np.full(length - len(row), padding_id | NOT_TRAINED, dtype=np.int32)
    padding[:1] |= DOCUMENT_START
    return np.concatenate([row, padding])


def _shuffled(rows: list[Tokens], generator: np.random.Generator) -> Iterator[Tokens]:
    """Yield ``rows`` in the order that ``generator`` draws."""
    for index in generator.permutation(len(rows)):
        yield rows[index]


def _started(document: Tokens) -> Tokens:
    """Return a copy of ``document`` whose first token has ``DOCUMENT_START``."""
    copy = np.array(document, dtype=np.int32)
    copy[:1] |= DOCUMENT_START
    return copy


def trained_tokens(rows: Tokens, *, isolated: bool) -> int:
    """Return how many tokens of ``rows [n, S]`` are predicted.

    Never the first token of a row, which has no token before it; with ``isolated`` documents also
    not the first token of a document.
    """
    # One comparison of each number: the flag of tokens that are not trained is the upper one.
    limit = DOCUMENT_START if isolated else NOT_TRAINED
    return int(np.count_nonzero(rows[:, 1:] < limit))


def documents_per_row(rows: Tokens) -> int:
    """Return the largest number of documents in a row of ``rows [n, S]``."""
    # A document that continues from the row before it has no flag at the row's first token.
    starts = (rows[:, 1:] & DOCUMENT_START) != 0
    return 1 + int(starts.sum(axis=1).max(initial=0))
