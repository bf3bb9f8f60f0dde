"""Reads documents of token ids in Megatron-LM's format: ``NAME.bin`` with the ids, ``NAME.idx`` with their places."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nxd_memopt.training.data.packing import ID_MASK, Tokens
from nxd_memopt.training.data.sources.documents import is_digest_held_out
from nxd_memopt.training.data.sources.local_data import file_identity

SUFFIX = ".idx"
# The index: magic, version, code of the dtype, number of sequences and of document bounds; then the
# length of each sequence (int32), its first byte in the .bin file (int64), and the first sequence
# of each document, with one bound more than there are documents (int64).
# megatron/core/datasets/indexed_dataset.py has the writer.
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
REMEDY = "name the .idx file that Megatron-LM's tools/preprocess_data.py wrote, next to its .bin file"


class IndexedTokens:
    """Documents of token ids, memory-mapped.

    Args:
        path: the ``.idx`` file; the ``.bin`` file has the same name.

    Raises:
        ValueError: a file is missing, has another format, or is shorter than its index says.
    """

    def __init__(self, path: Path) -> None:
        self._bin = path.with_suffix(".bin")
        for file in (path, self._bin):
            if not file.is_file():
                raise ValueError(f"{file} is missing: {REMEDY}")
        self.identity: list[Any] = [*file_identity(path), *file_identity(self._bin)]
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER.size)
        magic, version, code, sequences, bounds = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
        if (magic, version) != (MAGIC, VERSION) or code not in DTYPES:
            raise ValueError(
                f"{path} is not an index of Megatron-LM of version {VERSION} with an integer dtype: {REMEDY}"
            )
        # Each sequence may have a mode (int8) behind everything else, for images.
        expected = HEADER.size + 12 * sequences + 8 * bounds
        if bounds < 2 or size not in (expected, expected + sequences):
            raise ValueError(f"{path} has {size} bytes, its header says {expected}: copy or write it again")
        if size == expected + sequences and sequences:
            raise ValueError(f"{path} has modes of sequences, as for images and text: only text can be trained on")
        self._dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        places = HEADER.size + 4 * sequences
        self._lengths = np.memmap(path, "<i4", "r", HEADER.size, (sequences,))
        self._places = np.memmap(path, "<i8", "r", places, (sequences,))
        self._bounds = np.memmap(path, "<i8", "r", places + 8 * sequences, (bounds,))
        self._require_complete(path)

    def _require_complete(self, path: Path) -> None:
        """Raise ``ValueError`` unless the bounds are within the sequences, and those within the file."""
        size = self._bin.stat().st_size
        ends = self._places + self._lengths.astype(np.int64) * self._dtype.itemsize
        if len(ends) and (int(ends.max()) > size or int(self._places.min()) < 0 or int(self._lengths.min()) < 0):
            raise ValueError(f"{self._bin} has {size} bytes, {path} names {int(ends.max())}: copy or write it again")
        if self._bounds[0] != 0 or self._bounds[-1] != len(ends) or (np.diff(self._bounds) < 0).any():
            raise ValueError(f"{path} has documents that do not cover its {len(ends)} sequences: write it again")

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> Tokens:
        """Return the token ids of a document, of all of its sequences.

        Raises:
            ValueError: an id is negative, or too large for any vocabulary.
        """
        parts = [np.empty(0, np.int64)]
        for sequence in range(int(self._bounds[index]), int(self._bounds[index + 1])):
            length, place = int(self._lengths[sequence]), int(self._places[sequence])
            if length:
                parts.append(np.fromfile(self._bin, self._dtype, length, offset=place).astype(np.int64))
        ids = np.concatenate(parts)
        if len(ids) and not (ids.min() >= 0 and ids.max() <= ID_MASK):
            raise ValueError(f"{self._bin} has token id {ids.min()} or {ids.max()} in document {index}: write it again")
        return ids.astype(np.int32)


class PermutedTokens:
    """Documents of ``IndexedTokens`` of one split, in an order that depends on the seed and their number.

    Args:
        tokens: all documents.
        seed: seed of the order.
        part: returns what a document with these ids has in the split, or None.
    """

    def __init__(self, tokens: IndexedTokens, seed: int, part: Callable[[Tokens], Tokens | None]) -> None:
        self._tokens = tokens
        self._seed = seed
        self._part = part

    def read(self, start: list[int] | None) -> Iterator[tuple[Tokens, list[int], None]]:
        """Yield the documents from position ``[documents of both splits before it]`` on."""
        order = np.random.default_rng([self._seed, 0]).permutation(len(self._tokens))
        (first,) = start or [0]
        for number in range(first, len(order)):
            ids = self._part(self._tokens[int(order[number])])
            if ids is not None:
                yield ids, [number + 1], None

    def share_of(self, position: list[int]) -> float:
        """Return which part of the documents is before a position."""
        return position[0] / max(len(self._tokens), 1)


def are_held_out(ids: Tokens, held_out_every: int) -> bool:
    """Return whether a document is held out, by a hash of its token ids."""
    return is_digest_held_out(hashlib.sha256(ids.tobytes()).hexdigest(), held_out_every)
