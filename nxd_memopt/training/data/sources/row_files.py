"""Reads the rows of files: JSON lines, one JSON array, Parquet."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from nxd_memopt.training.data.sources.bad_rows import (
    NOT_UTF8,
    NULL,
    RowReader,
    TextRows,
    bad_row,
    parse_line,
    read_value,
)

FIRST_ROWS = 100  # that tell the format of a file

Row = dict[str, str | None]
"""What ``RowReader.read`` returns."""


def has_json_lines(path: Path) -> bool:
    """Return whether a file has one JSON object per line, by its name or its first line, or no line with content."""
    if path.suffix == ".jsonl":
        return True
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"{}")
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def read_rows(paths: list[str], reader: RowReader) -> Iterator[Row]:
    """Yield the rows of files: a row's text, or a bad row's kind and description."""
    # Bad lines are rows too: the rows that datasets keeps in its cache serve both values of
    # data.on_bad_rows.
    for path in paths:
        for _, row in placed_rows(Path(path), reader):
            yield row


def placed_rows(path: Path, reader: RowReader) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file, each with the file and its line or number."""
    if path.suffix == ".parquet":
        for number, row in parquet_rows(path, reader, 0):
            yield f"{path} row {number}", row
    elif has_json_lines(path):
        for number, line in json_lines(path):
            place = f"{path} line {number}"
            yield place, parse_line(line, reader, place)
    else:
        for number, value in enumerate(_json_values(path), start=1):
            place = f"{path} row {number}"
            yield place, read_value(value, reader, place)


def first_columns(path: Path) -> list[set[str]]:
    """Return the columns of each of the first rows that are objects, or of a Parquet file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return [set(pyarrow.parquet.read_schema(path).names)]
        except (OSError, ValueError):  # reported where the rows are read
            return []
    values: list[Any] = []
    if has_json_lines(path):
        for _, line in islice(json_lines(path), FIRST_ROWS):
            with suppress(ValueError, RecursionError):  # a bad row, reported where the rows are read
                values.append(json.loads(line))
    else:
        values = _json_values(path)[:FIRST_ROWS]
    return [set(value) for value in values if isinstance(value, dict)]


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with content, each with its number from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            data = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if data := data.strip():
                yield number, data


def _json_values(path: Path) -> list[Any]:
    """Return the elements of a file's JSON array, or its one value."""
    try:
        values = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): correct the file, or copy it again") from None
    return values if isinstance(values, list) else [values]


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def parquet_rows(path: Path, reader: RowReader, start: int) -> Iterator[tuple[int, Row]]:
    """Yield the rows after the first ``start``, one row group at a time, each with its number from 1.

    Raises:
        ValueError: the file cannot be read, or does not have the reader's columns.
    """
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a complete Parquet file: {error}: copy or write it again") from None
    with file:
        _require_columns(path, file.schema_arrow, reader)
        names = [*reader.columns, *reader.optional_columns]
        columns = [name for name in names if name in file.schema_arrow.names]
        first = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if first + count > start:
                row = first
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=columns):
                    for index in range(batch.num_rows):
                        row += 1
                        if row > start:
                            yield row, _parquet_row(batch, index, reader, f"{path} row {row}")
            first += count


def _parquet_row(batch: Any, index: int, reader: RowReader, place: str) -> Row:
    """Return row ``index`` of a batch."""
    if isinstance(reader, TextRows):
        return _text(batch.column(0)[index], f"column {reader.column!r} of {place}")
    try:
        return reader.read({name: batch.column(name)[index].as_py() for name in batch.schema.names}, place)
    except UnicodeError as error:
        return bad_row(NOT_UTF8, f"{place} is not UTF-8 ({error})")


def _text(value: Any, place: str) -> Row:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        return bad_row(NOT_UTF8, f"{place} is not UTF-8 ({error.reason})")
    if text is None:
        return bad_row(NULL, f"{place} is null")
    return {"text": text, "kind": None, "description": None}


def _require_columns(path: Path, schema: Any, reader: RowReader) -> None:
    import pyarrow

    option = "data.text_column" if isinstance(reader, TextRows) else "data.format's column"
    missing = [name for name in reader.columns if name not in schema.names]
    if missing:
        raise ValueError(f"{option} {missing[0]!r} is not in {path}: its columns are {schema.names}")
    if not isinstance(reader, TextRows):
        return
    dtype = schema.field(reader.column).type
    # A column of few different texts (a categorical of pandas) has their numbers.
    values = dtype.value_type if pyarrow.types.is_dictionary(dtype) else dtype
    if values not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise ValueError(
            f"column {reader.column!r} of {path} holds {dtype}, not text: name a column of strings in data.text_column"
        )
