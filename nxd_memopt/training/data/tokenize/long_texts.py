"""Tokenizes a long text in pieces, cut where the tokens on both sides do not depend on each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The tokenizers library needs about 150 bytes for each character of a call, and one thread for a text.
LONG_CHARACTERS = 2**22
PIECE_CHARACTERS = 2**17
PIECES_PER_CALL = 32
# After the end of a line, or before a space, between words.
_PLACE = re.compile(r"(?<=\S\n)(?=\w)|(?<=\w)(?= \w)")
_CONTEXT = 200  # characters on each side of a place, with which is tested whether a text can be cut there
_MOST_PLACES = 20  # tested in a row; a piece is then longer


def long_text_ids(tokenizer: Any, text: str) -> NDArray[np.int32]:
    """Return the ids of ``tokenizer(text)``, which gets the text in pieces.

    Tokenizers split text into words before they merge characters, or have no token that begins before
    the end of a line and ends after it. At each place where the text is cut, this is tested: the text around it has
    the same tokens as its two sides. The beginning of a text may have other tokens than its middle, such
    as a space before the first word. A piece therefore begins with the last character of the one before it,
    whose tokens are left out.
    """
    first, last = _special_ids(tokenizer)
    bounds = list(pairwise([0, *_cuts(tokenizer, text), len(text)]))
    ids = [first]
    for number in range(0, len(bounds), PIECES_PER_CALL):
        group = bounds[number : number + PIECES_PER_CALL]
        pieces = _ids(tokenizer, [text[max(start - 1, 0) : stop] for start, stop in group])
        edges = _ids(tokenizer, [text[max(start - 1, 0) : start] for start, _ in group])
        ids += [piece[len(edge) :] for piece, edge in zip(pieces, edges, strict=True)]
    return np.concatenate([*ids, last])


def _ids(tokenizer: Any, texts: list[str]) -> list[NDArray[np.int32]]:
    """Return the ids of texts without the special tokens at their ends."""
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]
    return [np.asarray(ids, dtype=np.int32) for ids in encoded]


def _special_ids(tokenizer: Any) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the ids that the tokenizer adds before and after a text."""
    (inner,) = _ids(tokenizer, ["a"])
    ids = np.asarray(tokenizer("a", verbose=False)["input_ids"], dtype=np.int32)
    start = next(i for i in range(len(ids)) if np.array_equal(ids[i : i + len(inner)], inner))
    return ids[:start], ids[start + len(inner) :]


def _cuts(tokenizer: Any, text: str) -> Iterator[int]:
    """Yield places at which the text can be cut, one after about each ``PIECE_CHARACTERS``."""
    place = PIECE_CHARACTERS
    while place < len(text):
        found = islice(_PLACE.finditer(text, place, place + PIECE_CHARACTERS), _MOST_PLACES)
        cut = next((each.start() for each in found if _can_cut(tokenizer, text, each.start())), None)
        if cut is not None:
            yield cut
            place = cut
        place += PIECE_CHARACTERS


def _can_cut(tokenizer: Any, text: str, place: int) -> bool:
    """Return whether the text around ``place`` has the tokens of its two sides."""
    left, edge, right = text[place - _CONTEXT : place], text[place - 1], text[place : place + _CONTEXT]
    whole, before, removed, after = _ids(tokenizer, [left + right, left, edge, edge + right])
    begins = np.array_equal(after[: len(removed)], removed)
    return begins and np.array_equal(whole, np.concatenate([before, after[len(removed) :]]))
