"""Shards of a large corpus: ranges of JSON lines, Parquet files and text files, read from any position."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.bad_rows import NOT_UTF8, BadRow, RowReader, SkippedRows, parse_line
from nxd_memopt.training.data.sources.conversations import row_reader
from nxd_memopt.training.data.sources.dataset_shards import find_dataset_shards, streams_dataset
from nxd_memopt.training.data.sources.documents import require_one_split, require_rows
from nxd_memopt.training.data.sources.local_data import BUILDERS, file_identity, local_files
from nxd_memopt.training.data.sources.row_files import has_json_lines, parquet_rows

# Corpora up to this size are read, checked and hashed before training: 1 to 3 s.
SMALL_BYTES = 2**26
# Bytes of a file of JSON lines in one shard: the shards of a single large file are shuffled too.
LINES_BYTES = 2**26
# A text file up to this size is one document. A longer one is cut at ends of lines.
TEXT_BYTES = 2**24
TEXT_PIECE_BYTES = 2**20


class Shard(Protocol):
    """A part of a corpus that is read in order."""

    @property
    def identity(self) -> list[Any]:
        """What distinguishes the shard's content from that of others, as JSON values."""
        ...

    def read(self, start: int) -> Iterator[tuple[str, int]]:
        """Yield the texts from position ``start`` on, each with the position after it; 0 is the beginning."""
        ...


def is_streamed(config: DataConfig) -> bool:
    """Return whether the corpus is read while the run trains: ``data.streaming``, or by its size."""
    if config.streaming != "auto":
        return config.streaming
    if config.dataset == "stdlib":
        return False
    files = local_files(config.dataset)
    if not files:
        return streams_dataset(config, SMALL_BYTES)
    return sum(path.stat().st_size for path in files) > SMALL_BYTES


def find_shards(config: DataConfig) -> list[Shard]:
    """Return the shards of ``config.dataset``, without reading more than the first row.

    Raises:
        ValueError: for a missing file, and for data that can only be read as one piece.
    """
    if config.dataset == "stdlib":
        raise ValueError("data.streaming true reads files or a dataset, and data.dataset is 'stdlib': set it to auto")
    found = local_files(config.dataset)
    require_one_split(config, found)
    if not found:
        return list(find_dataset_shards(config))
    files = [path for path in found if path.stat().st_size]
    if not files:
        raise ValueError(f"dataset {config.dataset!r} is empty: it has no documents")
    skipped = SkippedRows(config.on_bad_rows, config.dataset)
    kind = BUILDERS[files[0].suffix]
    reader = row_reader(config)
    if kind == "text":
        require_rows(config, "text files")
        return [TextFile(path, skipped) for path in files]
    if kind == "parquet":
        return [ParquetShard(path, reader, skipped) for path in files]
    for path in files:
        if not has_json_lines(path):
            raise ValueError(
                f"{path} is one JSON value, not a JSON object in each line, and is too large to be read at once: "
                "write it as JSON lines, or set data.streaming to false"
            )
    return [
        JsonLines(path, start, start + LINES_BYTES, reader, skipped)
        for path in files
        for start in range(0, path.stat().st_size, LINES_BYTES)
    ]


@dataclass(frozen=True)
class JsonLines:
    """The lines of a file that start in a range of bytes; positions are bytes of the file, plus 1.

    Args:
        path: file with one JSON object per line.
        start: first byte of the range.
        stop: end of the range.
        reader: reads the document of a row.
        skipped: what happens to bad rows.
    """

    path: Path
    start: int
    stop: int
    reader: RowReader
    skipped: SkippedRows

    @property
    def identity(self) -> list[Any]:
        return [*file_identity(self.path), self.start, str(self.reader)]

    def read(self, start: int) -> Iterator[tuple[str, int]]:
        """Yield the texts of the range's lines."""
        with self.path.open("rb") as file:
            if start:
                file.seek(start - 1)
            elif self.start:
                # The line that crosses the start of the range belongs to the range before: its end
                # is found from one byte before, where a line may end exactly.
                file.seek(self.start - 1)
                file.readline()
            place = file.tell()
            while place < self.stop:
                line = file.readline()
                if not line:
                    return
                data = line.removeprefix(codecs.BOM_UTF8) if place == 0 else line
                begin, place = place, file.tell()
                if data.strip():
                    row = parse_line(data.strip(), self.reader, "")
                    if row["kind"] is None:
                        yield str(row["text"]), place + 1
                    else:
                        description = f"{self.path} line {self._number(begin)}{row['description']}"
                        self.skipped.add(BadRow(begin, row["kind"], description))

    def _number(self, place: int) -> int:
        """Return the number, from 1, of the line that starts at byte ``place``."""
        number = 1
        with self.path.open("rb") as file:
            while place > 0:
                chunk = file.read(min(place, LINES_BYTES))
                number += chunk.count(b"\n")
                place -= len(chunk)
        return number


@dataclass(frozen=True)
class ParquetShard:
    """The rows of a Parquet file; positions are numbers of rows."""

    path: Path
    reader: RowReader
    skipped: SkippedRows

    @property
    def identity(self) -> list[Any]:
        return [*file_identity(self.path), str(self.reader)]

    def read(self, start: int) -> Iterator[tuple[str, int]]:
        """Yield the documents of the rows, one row group at a time."""
        for number, row in parquet_rows(self.path, self.reader, start):
            if row["kind"] is None:
                yield str(row["text"]), number
            else:
                self.skipped.add(BadRow(number - 1, row["kind"], str(row["description"])))


@dataclass(frozen=True)
class TextFile:
    """A text file: one document, or several if it is long; positions are bytes of the file."""

    path: Path
    skipped: SkippedRows

    @property
    def identity(self) -> list[Any]:
        return file_identity(self.path)

    def read(self, start: int) -> Iterator[tuple[str, int]]:
        """Yield the file's text, cut after an end of line about every MiB if it is longer than 16 MiB."""
        size = self.path.stat().st_size
        length = size if size <= TEXT_BYTES else TEXT_PIECE_BYTES
        with self.path.open("rb") as file:
            file.seek(start)
            while data := file.read(length):
                encoding = "utf-8" if start else "utf-8-sig"  # a byte order mark is no text
                # A line as long as the limit is cut at once: between characters, it has no end.
                data += _rest_of_line(file) if len(data) == length < size else b""
                start += len(data)
                try:
                    yield data.decode(encoding), start
                except UnicodeDecodeError as error:
                    description = f"{self.path} is not UTF-8 ({error.reason})"
                    self.skipped.add(BadRow(start, NOT_UTF8, description))


def _rest_of_line(file: Any) -> bytes:
    """Return the bytes up to the end of the line, or of a character if the line is very long."""
    rest = file.readline(TEXT_PIECE_BYTES)
    if rest.endswith(b"\n"):
        return rest
    # The bytes of a character after its first one are 10xxxxxx.
    while (byte := file.read(1)) and byte[0] & 0xC0 == 0x80:
        rest += byte
    if byte:
        file.seek(-1, 1)
    return rest
