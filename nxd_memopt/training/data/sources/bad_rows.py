"""Finds the rows of a dataset that have no text to train on: an error, or skipped and counted."""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 2**20
ROWS_VERSION = 2  # of read_rows: part of the names of the files in which datasets keeps its rows
ROW_COLUMNS = ("text", "kind", "description")
NOT_JSON = "not JSON"
NOT_AN_OBJECT = "not a JSON object"
NOT_UTF8 = "not UTF-8"
NO_COLUMN = "without the text column"
NULL = "null"
NOT_TEXT = "not text"
REMEDY = "correct it, or set data.on_bad_rows to skip to leave such rows out"


class RowReader(Protocol):
    """Reads the document of a row."""

    @property
    def columns(self) -> list[str]:
        """The columns that a row must have."""
        ...

    @property
    def optional_columns(self) -> list[str]:
        """The columns that are read if a row has them."""
        ...

    def read(self, row: Mapping[str, Any], place: str) -> dict[str, str | None]:
        """Return the row's ``text``, or the ``kind`` and ``description`` of a bad row.

        The description begins with ``place``.

        Raises:
            UnicodeError: the text has no UTF-8 form.
        """
        ...


@dataclass(frozen=True)
class TextRows:
    """Reads rows with a text in one column.

    Args:
        column: ``data.text_column``.
    """

    column: str

    @property
    def columns(self) -> list[str]:
        return [self.column]

    @property
    def optional_columns(self) -> list[str]:
        return []

    def read(self, row: Mapping[str, Any], place: str) -> dict[str, str | None]:
        """Return the text of the column."""
        column = self.column
        if column not in row:
            return bad_row(NO_COLUMN, f"{place} has no {column!r} (data.text_column): its columns are {list(row)}")
        text = row[column]
        if not isinstance(text, str):
            kind = NULL if text is None else NOT_TEXT
            return bad_row(kind, f"{place} has {type_of(text)} in column {column!r} (data.text_column), not text")
        text.encode()
        return {"text": text, "kind": None, "description": None}


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be trained on.

    Args:
        index: number of the row in the dataset, from 0.
        kind: one of the kinds above, under which skipped rows are counted.
        description: what is wrong, with the file and its line or row.
    """

    index: int
    kind: str
    description: str


def good_rows(count: int, bad: Iterator[BadRow], *, policy: str, dataset: str) -> NDArray[np.int64]:
    """Return the indices of the rows that are not bad; print one line if there are bad ones.

    Args:
        count: number of rows.
        bad: the bad rows, ascending.
        policy: ``data.on_bad_rows``.
        dataset: ``data.dataset``, for messages.

    Raises:
        ValueError: a row is bad and ``policy`` is ``error``, or all rows are.
    """
    keep = np.ones(count, dtype=bool)
    kinds: Counter[str] = Counter()
    first = ""
    for row in bad:
        if policy == "error":
            raise ValueError(f"{row.description}: {REMEDY}")
        first = first or row.description
        keep[row.index] = False
        kinds[row.kind] += 1
    if not kinds:
        return np.arange(count)
    numbers = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    skipped = f"{kinds.total()} of the {count} rows of {dataset!r} ({numbers}), the first: {first}"
    if not keep.any():
        raise ValueError(f"data.on_bad_rows skip leaves no row: {skipped}")
    print(f"data.on_bad_rows skip: left out {skipped}", flush=True)
    return np.flatnonzero(keep)


class SkippedRows:
    """Bad rows of a corpus that is read while the run trains: an error, or left out and counted.

    Args:
        policy: ``data.on_bad_rows``.
        dataset: ``data.dataset``, for messages.
    """

    def __init__(self, policy: str, dataset: str) -> None:
        self._policy = policy
        self._dataset = dataset
        self._kinds: Counter[str] = Counter()

    def add(self, row: BadRow) -> None:
        """Count a bad row; print one line for the first, the 10th, the 100th and so on.

        Raises:
            ValueError: the policy is ``error``.
        """
        if self._policy == "error":
            raise ValueError(f"{row.description}: {REMEDY}")
        self._kinds[row.kind] += 1
        count = self._kinds.total()
        if str(count).strip("0") == "1":
            numbers = ", ".join(f"{number} {kind}" for kind, number in sorted(self._kinds.items()))
            skipped = f"left out {count} rows of {self._dataset!r} so far ({numbers}), the last: {row.description}"
            print(f"data.on_bad_rows skip: {skipped}", flush=True)


# ---- lines of JSON ---------------------------------------------------------------------------------------------------


def parse_line(line: bytes, reader: RowReader, place: str) -> dict[str, str | None]:
    """Return the row of one line, as ``reader`` does."""
    # The json module accepts what no text of a model may have: half of a surrogate pair.
    try:
        content = json.loads(line.decode())
    except UnicodeError as error:
        return bad_row(NOT_UTF8, f"{place} is not UTF-8 ({error})")
    except (ValueError, RecursionError) as error:
        return bad_row(NOT_JSON, f"{place} is not JSON ({error})")
    return read_value(content, reader, place)


def read_value(content: Any, reader: RowReader, place: str) -> dict[str, str | None]:
    """Return the row of one JSON value, as ``reader`` does."""
    if not isinstance(content, dict):
        return bad_row(NOT_AN_OBJECT, f"{place} is {type_of(content)}, not a JSON object")
    try:
        return reader.read(content, place)
    except UnicodeError as error:
        return bad_row(NOT_UTF8, f"{place} is not UTF-8 ({error})")


def bad_row(kind: str, description: str) -> dict[str, str | None]:
    """Return the row of a bad line."""
    # What a message quotes of the file may have no UTF-8 form.
    return {"text": "", "kind": kind, "description": description.encode(errors="replace").decode()}


def type_of(value: Any) -> str:
    """Return the type of a value, as JSON calls it, or its Python name where JSON has none, as of a date."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object", str: "a text"}
    return names.get(type(value), f"a {type(value).__name__}")


def bad_rows(dataset: Any) -> Iterator[BadRow]:
    """Yield the bad rows of a dataset of ``read_rows``."""
    start = 0
    for chunk in dataset.data.column("kind").chunks:
        if chunk.null_count < len(chunk):
            for offset in np.flatnonzero(chunk.is_valid().to_numpy(zero_copy_only=False)):
                row = dataset[int(start + offset)]
                yield BadRow(int(start + offset), row["kind"], row["description"])
        start += len(chunk)


# ---- columns of strings ----------------------------------------------------------------------------------------------


def bad_strings(column: Any, place: Callable[[int], str]) -> Iterator[BadRow]:
    """Yield the rows of a pyarrow column of strings that are null or not UTF-8.

    Args:
        column: ``pyarrow.ChunkedArray`` of strings.
        place: names the row with an index.
    """
    import pyarrow

    start = 0
    for chunk in column.chunks:
        # Most chunks are good: found out without an object for each row.
        is_valid = chunk.null_count == 0
        try:
            chunk.validate(full=True)
        except pyarrow.ArrowInvalid:
            is_valid = False
        if not is_valid:
            yield from _bad_values(chunk, start, place)
        start += len(chunk)


def _bad_values(chunk: Any, start: int, place: Callable[[int], str]) -> Iterator[BadRow]:
    for offset, value in enumerate(chunk):
        index = start + offset
        if not value.is_valid:
            yield BadRow(index, NULL, f"{place(index)} is null")
            continue
        try:
            value.as_py()
        except UnicodeDecodeError as error:
            yield BadRow(index, NOT_UTF8, f"{place(index)} is not UTF-8 ({error.reason})")


# ---- text files ------------------------------------------------------------------------------------------------------


def bad_files(paths: list[Path]) -> Iterator[BadRow]:
    """Yield the files that are not UTF-8; a file is a row."""
    for index, path in enumerate(paths):
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    decoder.decode(chunk)
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            yield BadRow(index, NOT_UTF8, f"{path} is not UTF-8 ({error.reason})")
