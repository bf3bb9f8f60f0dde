"""Finds the file and the row of a conversation, for the message of an error."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from nxd_memopt.training.bad_rows import BadRow, RowReader, SkippedRows, has_json_lines, parse_line
from nxd_memopt.training.conversations import row_reader, table_row
from nxd_memopt.training.data_options import DataConfig
from nxd_memopt.training.dataset_shards import find_dataset_shards
from nxd_memopt.training.documents import load_table
from nxd_memopt.training.local_data import BUILDERS, content_hash, is_saved, local_files
from nxd_memopt.training.shards import ParquetShard, is_streamed


def place_of(config: DataConfig, text: str) -> str:
    """Return the file and row of the first document ``text``, or an empty text if it is not found or not local.

    Local data is read again, up to this row: conversations are shuffled and rendered far from where they
    were read, and only an error that ends the run asks for a place. What is streamed over a network is not:
    it would be downloaded again while other ranks wait.
    """
    reader = row_reader(config)
    for dataset in (config.dataset, config.validation_dataset):
        if dataset in (None, "stdlib"):
            continue
        try:
            for place, found in _rows(config, dataset, reader):
                if found == text:
                    return place
        except (OSError, ValueError):  # the error that asks is reported, not one of its place
            continue
    return ""


def _rows(config: DataConfig, dataset: str, reader: RowReader) -> Iterator[tuple[str, str]]:
    """Yield the place and the document of each row."""
    files = local_files(dataset)
    kind = BUILDERS[files[0].suffix] if files else ""
    if kind == "parquet":
        for path in files:
            for text, row in ParquetShard(path, reader, _Unreported()).read(0):
                yield f"{path} row {row}", text
    elif kind == "json" and all(has_json_lines(path) for path in files):
        for path in files:
            yield from _lines(path, reader)
    # The rows of a saved dataset are read from its table at any size: it is mapped into memory.
    elif not files and not is_saved(dataset) and is_streamed(config.of_source(dataset)):
        if not Path(dataset).exists():
            return
        for shard in find_dataset_shards(config.of_source(dataset)):
            for text, row in shard.read(0):
                yield shard.place_of(row), text
    else:
        table = load_table(config.of_source(dataset), files, content_hash(files))
        for number, row in enumerate(table, start=1):
            yield f"{dataset!r} row {number}", str(table_row(row, reader, "")["text"])


def _lines(path: Path, reader: RowReader) -> Iterator[tuple[str, str]]:
    """Yield the place and the document of each line of JSON."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            data = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            yield f"{path} line {number}", str(parse_line(data.strip(), reader, "")["text"])


class _Unreported(SkippedRows):
    """Leaves bad rows out without a line: the run reports them where it reads them."""

    def __init__(self) -> None:
        super().__init__("skip", "")

    def add(self, row: BadRow) -> None:
        """Do nothing."""
