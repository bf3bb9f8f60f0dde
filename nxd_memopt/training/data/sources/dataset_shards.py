"""Shards of what the ``datasets`` library reads: datasets of the hub, copies of their repositories, saved ones."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.local_data import file_identity, is_saved, readable, repository_files
from nxd_memopt.training.data.sources.rows import Place, RowReader, Shard

# Bytes of a saved dataset in one shard, as of files of JSON lines.
SAVED_BYTES = 2**26
SPLIT = r"\w+(\.\w+)*"
"""Name of a split, not a part of one."""


class TableShard:
    """Rows of a ``datasets.Dataset``, which is on this host's disk; positions are numbers of rows.

    Args:
        table: all rows.
        name: name of the dataset, for messages.
        begin: first row of the shard.
        end: end of its rows.
        identity: what distinguishes its content from that of others, as JSON values.
        reader: reads the document of a row.
    """

    def __init__(self, table: Any, name: str, begin: int, end: int, identity: list[Any], reader: RowReader) -> None:
        self.identity = identity
        self._table = table
        self._name = name
        self._begin = begin
        self._end = end
        self._reader = reader

    def read(self, start: int) -> Iterator[tuple[str, int]]:
        """Yield the documents of the rows from ``start`` on, each with the number of rows up to it."""
        for index in range(self._begin + start, self._end):
            position = index + 1 - self._begin
            text = self._reader.read(partial(self._table.__getitem__, index), Place(self, position))
            if text is not None:
                yield text, position

    def place_of(self, position: int) -> str:
        """Return the dataset and the number of a row of it, from 1."""
        return f"{self._name!r} row {self._begin + position}"


class StreamShard:
    """Rows that the ``datasets`` library downloads; positions are numbers of rows.

    Args:
        open_rows: yields the rows from a number of rows on.
        name: the file or the shard, for messages.
        identity: what distinguishes its content from that of others, as JSON values.
        reader: reads the document of a row.
    """

    def __init__(
        self, open_rows: Callable[[int], Iterator[Any]], name: str, identity: list[Any], reader: RowReader
    ) -> None:
        self.identity = identity
        self._open_rows = open_rows
        self._name = name
        self._reader = reader
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
            text = self._reader.read(lambda row=row: row, Place(self, number))
            if text is not None:
                yield text, number

    def place_of(self, position: int) -> str:
        """Return the file and the number of a row of the shard, from 1."""
        return f"{self._name} row {position}"

    def _rows_from(self, start: int) -> Iterator[Any]:
        """Return an iterator over the rows from ``start`` on: that of the last ``read`` if it stopped there."""
        reading, self._reading = self._reading, None
        if reading is not None and reading[0] == start:
            return reading[1]
        with readable(self.place_of(start + 1)):
            return self._open_rows(start)


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


def find_dataset_shards(config: DataConfig, reader: RowReader, *, streamed: bool) -> list[Shard]:
    """Return the shards of a dataset of the hub, of a copy of its repository, or of a saved one.

    Raises:
        ValueError: it cannot be read, or does not have the columns.
    """
    with readable(config.dataset):
        dataset, files = _load(config, streamed=streamed)
        columns = _columns(dataset, files)
    if columns:  # the first row of a stream may be absent
        reader.require_columns(f"dataset {config.dataset!r}", columns)
    if files is None:
        return _table_shards(config, dataset, reader, streamed=streamed)
    with readable(config.dataset):
        return _stream_shards(config, dataset, files, reader)


def columns_of(config: DataConfig, *, streamed: bool) -> list[str]:
    """Return the columns of such a dataset: those of its first row if it is streamed."""
    with readable(config.dataset):
        return _columns(*_load(config, streamed=streamed))


def _load(config: DataConfig, *, streamed: bool) -> tuple[Any, list[str] | None]:
    """Return a dataset that was saved on disk, or one of the hub; and the files of one that is streamed."""
    datasets = _library()
    if is_saved(config.dataset):
        return datasets.load_from_disk(config.dataset), None
    files = files_of_split(config)  # raises for files that are in no split
    dataset = datasets.load_dataset(config.dataset, config.dataset_config, split=config.split, streaming=streamed)
    return dataset, files if streamed else None


def _library() -> Any:
    """Return the ``datasets`` library, which prints nothing."""
    import datasets  # takes about a second, which dataset "stdlib" does not need

    datasets.disable_progress_bars()
    # It logs an error before it raises it: a second line about the same file.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # a README needs no metadata
    return datasets


def _columns(dataset: Any, files: list[str] | None) -> list[str]:
    """Return the columns of a table, or of the first row of a stream of files."""
    return dataset.column_names if files is None else list(next(iter(dataset), {}))


def _stream_shards(config: DataConfig, stream: Any, files: list[str], reader: RowReader) -> list[Shard]:
    """Return the shards of a dataset that the library streams."""
    count = stream.num_shards
    if not files:
        raise ValueError(
            "without a network it is in the cache of the datasets library alone: set data.streaming to false"
        )
    # The content is not read before training. The address of a file of the hub contains the commit.
    facts = _digest([_identity(path) for path in files])

    def rows(index: int, start: int) -> Iterator[Any]:
        return iter(stream.shard(num_shards=count, index=index, contiguous=True).skip(start))

    shards: list[Shard] = []
    for index in range(count):
        # Each file is a shard, except in archives.
        name = files[index] if len(files) == count else f"{config.dataset} shard {index + 1} of {count}"
        identity = ["datasets", facts, index, count, reader.identity]
        shards.append(StreamShard(partial(rows, index), name, identity, reader))
    return shards


def _table_shards(config: DataConfig, table: Any, reader: RowReader, *, streamed: bool) -> list[Shard]:
    """Return ranges of the rows of a table, or all of them as one shard unless they are streamed."""
    # Other columns are not decoded.
    chosen = table.select_columns([name for name in reader.columns if name in table.column_names])
    if not streamed:
        return [TableShard(chosen, config.dataset, 0, len(table), [], reader)]
    files = _saved_files(config.dataset)
    facts = _digest([file_identity(path) for path in files])
    count = min(len(table), -(-sum(path.stat().st_size for path in files) // SAVED_BYTES)) or 1
    bounds = [len(table) * index // count for index in range(count + 1)]
    shards: list[Shard] = []
    for begin, end in pairwise(bounds):
        identity = ["saved", facts, begin, end, reader.identity]
        shards.append(TableShard(chosen, config.dataset, begin, end, identity, reader))
    return shards


def files_of_split(config: DataConfig) -> list[str]:
    """Return the addresses of the files of a split, or nothing if the dataset is complete in a cache.

    Raises:
        ValueError: files of a local directory are in no split.
    """
    builder = _library().load_dataset_builder(config.dataset, config.dataset_config)
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
