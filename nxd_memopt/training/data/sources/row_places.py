"""Finds the file and the row of a conversation, for the message of an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.bad_rows import RowReader
from nxd_memopt.training.data.sources.conversations import row_reader
from nxd_memopt.training.data.sources.dataset_shards import find_dataset_shards
from nxd_memopt.training.data.sources.documents import load_table
from nxd_memopt.training.data.sources.local_data import is_saved, local_files
from nxd_memopt.training.data.sources.row_files import placed_rows
from nxd_memopt.training.data.sources.shards import is_streamed


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
    for path in files:
        for place, row in placed_rows(path, reader):
            yield place, str(row["text"])
    if files:
        return
    # The rows of a saved dataset are read from its table at any size: it is mapped into memory.
    if not is_saved(dataset) and is_streamed(config.of_source(dataset)):
        if not Path(dataset).exists():
            return
        for shard in find_dataset_shards(config.of_source(dataset)):
            for text, row in shard.read(0):
                yield shard.place_of(row), text
    else:
        table = load_table(config.of_source(dataset))
        for number, row in enumerate(table, start=1):
            yield f"{dataset!r} row {number}", str(reader.read(row, "")["text"])
