"""Packs the tokens of documents into rows of S tokens: concatenated, or as pieces that fit best."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
"""Token ids with the flags below in their upper bits: one number a token, which cannot get out of step."""

PADDING = 1 << 28
"""Flag of padding, in addition to ``NOT_TRAINED``."""
DOCUMENT_START = 1 << 29
"""Flag of the first token of a document, of a piece of a document that best fit has cut, and of padding."""
NOT_TRAINED = 1 << 30
"""Flag of a token that is never predicted, such as padding or a question: its label is -100."""
ID_MASK = PADDING - 1

# Tokens of the documents of training that best-fit packing arranges together. More leave less padding (on
# source code with S = 1024, 0.1 % in windows of this size) and need more memory: 32 MiB.
WINDOW_TOKENS = 2**22


class Concatenation:
    """Packs documents one after another and cuts them every S tokens; a remainder below S is dropped.

    A document that crosses the end of a row continues in the next one.

    Args:
        length: S.
        state: of an earlier packer, to go on from.
    """

    def __init__(self, length: int, state: Mapping[str, Any] | None = None) -> None:
        self._length = length
        self._rest: list[Tokens] = []
        if state is not None:
            self._rest = [np.array(state["rest"], dtype=np.int32)]
        self._size = sum(map(len, self._rest))

    def add(self, document: Tokens) -> Sequence[Tokens]:
        """Return the rows that ``document`` completes."""
        self._rest.append(started(document))
        self._size += len(document)
        if self._size < self._length:
            return []
        joined = np.concatenate(self._rest)
        rows = joined[: self._size // self._length * self._length].reshape(-1, self._length)  # [complete rows, S]
        # A copy: a view would keep all tokens of a long document in memory.
        self._rest = [joined[rows.size :].copy()]
        self._size -= rows.size
        return list(rows)

    def finish(self) -> Sequence[Tokens]:
        """Return no row: the remainder is dropped."""
        return []

    def state(self) -> dict[str, Any]:
        """Return the tokens of the incomplete row, with their flags."""
        # Joined once: the states of many short documents would otherwise join the same tokens.
        if self._rest:
            self._rest = [np.concatenate(self._rest)]
        return {"rest": [token for part in self._rest for token in part.tolist()]}


class BestFit:
    """Packs so that documents are cut as rarely as possible (arXiv:2404.10830).

    Only documents longer than S are cut, into pieces of S tokens and a remainder. Within windows
    of ``WINDOW_TOKENS`` tokens, the pieces are placed from the longest to the shortest, each into
    the row with the least space that it fits into. A row's end is filled with ``padding_id``,
    which is not trained and is a document of its own. The rows of a window are shuffled, because
    they are found in the order of their documents' lengths. The first windows are smaller, each twice the
    one before: there is no row before a window is full, and a run waits for its first rows.

    Args:
        length: S.
        padding_id: token that fills rows.
        seed: seed of the order of a window's rows.
        state: of an earlier packer, to go on from.
        first_tokens: tokens of the first window; None for ``WINDOW_TOKENS``.
    """

    def __init__(
        self,
        length: int,
        *,
        padding_id: int,
        seed: int,
        state: Mapping[str, Any] | None = None,
        first_tokens: int | None = None,
    ) -> None:
        self._length = length
        self._window_tokens = min(first_tokens or WINDOW_TOKENS, WINDOW_TOKENS)
        self._padding_id = padding_id
        self._generator = np.random.default_rng([seed, 3])
        if state is not None:
            self._generator.bit_generator.state = state["generator"]
            self._window_tokens = state["window_tokens"]
        self._window: list[Tokens] = []
        self._size = 0

    def add(self, document: Tokens) -> Sequence[Tokens]:
        """Return the rows of a window that ``document`` fills, else none."""
        # Each piece starts a document: in its row, the tokens before it are of another one.
        starts = range(0, len(document), self._length)
        self._window += [started(document[start : start + self._length]) for start in starts]
        self._size += len(document)
        if self._size < self._window_tokens:
            return []
        return self.finish()

    def finish(self) -> Sequence[Tokens]:
        """Return the rows of the window."""
        rows = _best_fit_rows(self._window, self._length, self._padding_id)
        self._window = []
        self._size = 0
        self._window_tokens = min(2 * self._window_tokens, WINDOW_TOKENS)
        return [rows[index] for index in self._generator.permutation(len(rows))]

    def state(self) -> dict[str, Any] | None:
        """Return the random state and the size of the next window between two windows; None inside a window."""
        if self._window:
            return None
        return {"generator": self._generator.bit_generator.state, "window_tokens": self._window_tokens}


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
    padding = np.full(length - len(row), padding_id | NOT_TRAINED | PADDING, dtype=np.int32)
    padding[:1] |= DOCUMENT_START
    return np.concatenate([row, padding])


def started(document: Tokens) -> Tokens:
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
