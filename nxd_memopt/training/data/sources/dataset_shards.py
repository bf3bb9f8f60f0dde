"""Shards of what the ``datasets`` library reads: datasets of the hub, copies of their repositories, saved ones."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.bad_rows import NOT_UTF8, BadRow, RowReader, SkippedRows, bad_row
from nxd_memopt.training.data.sources.conversations import row_reader
from nxd_memopt.training.data.sources.local_data import file_identity, is_saved, readable, repository_files

# Bytes of a saved dataset in one shard, as of files of JSON lines.
SAVED_BYTES = 2**26
SPLIT = r"\w+(\.\w+)*"
"""Name of a split, not a part of one."""


class RowShard:
    """Rows of one shard; positions are numbers of rows.

    Args:
        open_rows: yields the rows from a number of rows on.
        place: the file or the dataset, for messages.
        before: rows of ``place`` before the shard.
        identity: what distinguishes its content from that of others, as JSON values.
        reader: reads the document of a row.
        skipped: what happens to bad rows.
    """

    def __init__(
        self,
        open_rows: Callable[[int], Iterator[Any]],
        place: str,
        before: int,
        identity: list[Any],
        reader: RowReader,
        skipped: SkippedRows,
    ) -> None:
        self.identity = identity
        self._open_rows = open_rows
        self._place = place
        self._before = before
        self._reader = reader
        self._skipped = skipped
        self._reading: tuple[int, Iterator[Any]] | None = None

    def read(self, start: int) -> Iterator[tuple[str, int]]:
        """Yield the documents of the rows from ``start`` on, each with the number of rows up to it."""
        rows, number = self._rows_from(start), start
        while True:
            with readable(self.place_of(number + 1)):
                row = next(rows, None)
            if row is None:
                return
            number += 1
            # The caller stops at the end of a window of documents and calls again for the next one.
            # Without this iterator the shard would be downloaded again up to this row.
            self._reading = (number, rows)
            found = self._document(row, self.place_of(number))
            if found["kind"] is None:
                yield str(found["text"]), number
            else:
                self._skipped.add(BadRow(number - 1, found["kind"], str(found["description"])))

    def place_of(self, row: int) -> str:
        """Return the file and the number of a row of the shard, from 1."""
        return f"{self._place} row {self._before + row}"

    def _rows_from(self, start: int) -> Iterator[Any]:
        """Return an iterator over the rows from ``start`` on: that of the last ``read`` if it stopped there."""
        reading, self._reading = self._reading, None
        if reading is not None and reading[0] == start:
            return reading[1]
        with readable(self.place_of(start + 1)):
            return self._open_rows(start)

    def _document(self, row: dict[str, Any], place: str) -> dict[str, str | None]:
        """Return the text of a row, or the kind and description of a bad one, as ``RowReader.read``."""
        try:
            return self._reader.read(row, place)
        except UnicodeError as error:
            return bad_row(NOT_UTF8, f"{place} is not UTF-8 ({error})")


def streams_dataset(config: DataConfig, small_bytes: int) -> bool:
    """Return whether ``data.streaming: auto`` reads a dataset without local files in shards.

    That is a dataset of more than ``small_bytes``, or of an unknown size. One that is complete in the cache of
    the datasets library without a network, and a part of a split (``train[:10%]``), are read at once.
    """
    if is_saved(config.dataset):
        with readable(config.dataset):
            return sum(path.stat().st_size for path in _saved_files(config.dataset)) > small_bytes
    if not re.fullmatch(SPLIT, config.split):
        return False
    with readable(config.dataset):
        paths = files_of_split(config)
        return bool(paths) and is_large(paths, small_bytes)


def find_dataset_shards(config: DataConfig) -> list[RowShard]:
    """Return the shards of a dataset of the hub, of a copy of its repository, or of a saved one; read its first row.

    Raises:
        ValueError: it cannot be read, is empty, or does not have the columns.
    """
    shards, first = _shards_and_first_row(config)
    reader, skipped = row_reader(config), SkippedRows(config.on_bad_rows, config.dataset)
    missing = [name for name in reader.columns if name not in first]
    if missing:
        option = f"data.format {config.format}" if config.has_conversations else "data.text_column"
        raise ValueError(
            f"{missing[0]!r} ({option}) is not in dataset {config.dataset!r}: its columns are {list(first)}"
        )
    return [
        RowShard(open_rows, place, before, [*facts, str(reader)], reader, skipped)
        for open_rows, place, before, facts in shards
    ]


def first_row(config: DataConfig) -> dict[str, Any]:
    """Return the first row of such a dataset.

    Raises:
        ValueError: it cannot be read, or is empty.
    """
    return _shards_and_first_row(config)[1]


_Shard = tuple[Callable[[int], Iterator[Any]], str, int, list[Any]]
"""Rows, place, rows before and identity."""


def _shards_and_first_row(config: DataConfig) -> tuple[list[_Shard], dict[str, Any]]:
    with readable(config.dataset):
        shards = _saved_shards(config) if is_saved(config.dataset) else _repository_shards(config)
        first = next((row for open_rows, *_ in shards for row in open_rows(0)), None)
    if first is None:
        raise ValueError(f"dataset {config.dataset!r} is empty: it has no documents")
    return shards, first


def _repository_shards(config: DataConfig) -> list[_Shard]:
    """Return the shards of a dataset that ``load_dataset`` streams."""
    import datasets

    files = files_of_split(config)
    stream = datasets.load_dataset(config.dataset, config.dataset_config, split=config.split, streaming=True)
    count = stream.num_shards
    if not files:
        raise ValueError(
            "without a network it is in the cache of the datasets library alone: set data.streaming to false"
        )
    # The content is not read before training. The address of a file of the hub contains the commit.
    facts = _digest([_identity(path) for path in files])

    def opener(index: int) -> Callable[[int], Iterator[Any]]:
        return lambda start: iter(stream.shard(num_shards=count, index=index, contiguous=True).skip(start))

    shards: list[_Shard] = []
    for index in range(count):
        # Each file is a shard, except in archives.
        place = files[index] if len(files) == count else f"{config.dataset} shard {index + 1} of {count}"
        shards.append((opener(index), place, 0, ["datasets", facts, index, count]))
    return shards


def _saved_shards(config: DataConfig) -> list[_Shard]:
    """Return the shards of a dataset that ``save_to_disk`` wrote: ranges of its rows."""
    import datasets

    dataset = datasets.load_from_disk(config.dataset)
    files = _saved_files(config.dataset)
    facts = _digest([file_identity(path) for path in files])
    count = min(len(dataset), -(-sum(path.stat().st_size for path in files) // SAVED_BYTES)) or 1
    bounds = [len(dataset) * index // count for index in range(count + 1)]

    def opener(begin: int, end: int) -> Callable[[int], Iterator[Any]]:
        return lambda start: (dataset[row] for row in range(begin + start, end))

    return [
        (opener(begin, end), repr(config.dataset), begin, ["saved", facts, begin, end])
        for begin, end in pairwise(bounds)
    ]


def files_of_split(config: DataConfig) -> list[str]:
    """Return the addresses of the files of a split, or nothing if the dataset is complete in a cache.

    Raises:
        ValueError: files of a local directory are in no split.
    """
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs an error before it raises it
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # a README needs no metadata
    builder = datasets.load_dataset_builder(config.dataset, config.dataset_config)
    files = builder.config.data_files
    if not files:
        return []
    _require_all_files(config, {str(path) for paths in files.values() for path in paths})
    return [str(path) for path in files.get(config.split, ())]


def _require_all_files(config: DataConfig, known: set[str]) -> None:
    """Raise ``ValueError`` for files of a local directory that are in no split.

    The datasets library finds the splits by the names of directories, and leaves other directories out, unless a
    README says what each configuration has.
    """
    root = Path(config.dataset)
    readme = root / "README.md"
    has_configurations = readme.is_file() and "configs:" in readme.read_text(encoding="utf-8", errors="replace")
    if has_configurations or not root.is_dir():
        return
    known = {str(Path(path).resolve()) for path in known}
    left = [str(file.relative_to(root)) for file in repository_files(root) if str(file.resolve()) not in known]
    if left:
        raise ValueError(
            f"{len(left)} of its files are in no split, the first is {left[0]}: give the directories names of splits "
            f"such as train and test, or name a pattern such as {root}/*/*{Path(left[0]).suffix}"
        )


def _saved_files(name: str) -> list[Path]:
    """Return the files of a saved dataset: others in its directory are caches of the datasets library."""
    directory = Path(name)
    state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    return [directory / entry["filename"] for entry in state["_data_files"]]


def _digest(facts: list[Any]) -> str:
    """Return a hash of facts that every shard's identity contains."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _identity(path: str) -> list[Any]:
    """Return what identifies a file's content: samples of a local file, the address of a file of the hub."""
    return file_identity(Path(path)) if Path(path).is_file() else [path]


def is_large(paths: list[str], small_bytes: int) -> bool:
    """Return whether files have more than ``small_bytes``, or a size that the file system does not know."""
    from fsspec.core import url_to_fs

    sizes: dict[str, int | None] = {}
    total = 0
    for path in paths:
        if "::" in path:  # within an archive
            return True
        system, name = url_to_fs(path)
        if name not in sizes:
            # A directory at a time: a request for each file would take minutes for thousands of them.
            sizes |= {entry["name"]: entry.get("size") for entry in system.ls(name.rpartition("/")[0], detail=True)}
        size = sizes.get(name)
        if size is None:
            return True
        total += size
        if total > small_bytes:
            return True
    return False
