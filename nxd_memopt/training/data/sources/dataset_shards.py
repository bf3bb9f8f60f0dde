"""Shards of what the ``datasets`` library reads: datasets of the hub, copies of their repositories, saved ones."""

from __future__ import annotations

import hashlib
import itertools
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
from nxd_memopt.training.data.sources.rows import RowReader, RowShard, Shard

# Bytes of a saved dataset in one shard, as of files of JSON lines.
SAVED_BYTES = 2**26
SPLIT = r"\w+(\.\w+)*"
"""Name of a split, not a part of one."""


def streams_dataset(config: DataConfig, small_bytes: int) -> bool:
    """Return whether ``data.streaming: auto`` reads a dataset without local files in shards.

    That is a dataset of more than ``small_bytes``, or of an unknown size. One that is complete in the cache of
    the datasets library without a network, and a part of a split (``train[:10%]``), are read at once.
    """
    if is_saved(config.source):
        with readable(config.source):
            return sum(path.stat().st_size for path in _saved_files(config.source)) > small_bytes
    if not re.fullmatch(SPLIT, config.split):
        return False
    with readable(config.source):
        paths = files_of_split(config)
        return bool(paths) and is_large(paths, small_bytes)


def find_dataset_shards(config: DataConfig, reader: RowReader, *, streamed: bool) -> list[Shard]:
    """Return the shards of a dataset of the hub, of a copy of its repository, or of a saved one.

    Raises:
        ValueError: it cannot be read, or does not have the columns.
    """
    with readable(config.source):
        dataset, files = _load(config, streamed=streamed)
        columns = _columns(dataset, files)
    if columns:  # the first row of a stream may be absent
        reader.require_columns(f"dataset {config.source!r}", columns)
    if files is None:
        return _table_shards(config, dataset, reader, streamed=streamed)
    with readable(config.source):
        return _stream_shards(config, dataset, files, reader)


def columns_of(config: DataConfig, *, streamed: bool) -> tuple[list[str], int | None]:
    """Return the columns of such a dataset, and its rows; of its first row, and None, if it is streamed."""
    with readable(config.source):
        dataset, files = _load(config, streamed=streamed)
        return _columns(dataset, files), len(dataset) if files is None else None


def _load(config: DataConfig, *, streamed: bool) -> tuple[Any, list[str] | None]:
    """Return a dataset that was saved on disk, or one of the hub; and the files of one that is streamed."""
    datasets = _library()
    if is_saved(config.source):
        return datasets.load_from_disk(config.source), None
    files = files_of_split(config)  # raises for files that are in no split
    dataset = datasets.load_dataset(config.source, config.dataset_config, split=config.split, streaming=streamed)
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
    shards: list[Shard] = []
    for index in range(count):
        # Each file is a shard, except in archives.
        name = files[index] if len(files) == count else f"{config.source} shard {index + 1} of {count}"
        identity = ["datasets", facts, index, count, reader.identity]
        shards.append(RowShard(partial(_stream_rows, stream, index, name), name, identity, reader))
    return shards


def _stream_rows(stream: Any, index: int, name: str, start: int) -> Iterator[Callable[[], Any]]:
    """Yield what loads each row of a shard of a stream from a number of rows on."""
    with readable(f"{name} row {start + 1}"):
        rows = iter(stream.shard(num_shards=stream.num_shards, index=index, contiguous=True).skip(start))
    for number in itertools.count(start + 1):
        # The row is downloaded here, and not where it is loaded: a network that fails is no bad row.
        with readable(f"{name} row {number}"):
            row = next(rows, None)
        if row is None:
            return
        yield lambda row=row: row


def _table_rows(table: Any, begin: int, end: int, start: int) -> Iterator[Callable[[], Any]]:
    """Yield what loads each row of a range of a table from a number of rows on."""
    for index in range(begin + start, end):
        yield partial(table.__getitem__, index)


def _table_shards(config: DataConfig, table: Any, reader: RowReader, *, streamed: bool) -> list[Shard]:
    """Return ranges of the rows of a table, or all of them as one shard unless they are streamed."""
    # Other columns are not decoded.
    chosen = table.select_columns([name for name in reader.columns if name in table.column_names])
    facts: list[Any] = []
    count = 1
    if streamed:
        files = _saved_files(config.source)
        facts = ["saved", _digest([file_identity(path) for path in files])]
        count = min(len(table), -(-sum(path.stat().st_size for path in files) // SAVED_BYTES)) or 1
    # The bounds depend on the sizes of the files alone, so each host and each start finds the same shards.
    bounds = [len(table) * index // count for index in range(count + 1)]
    shards: list[Shard] = []
    for begin, end in pairwise(bounds):
        rows = partial(_table_rows, chosen, begin, end)
        identity = [*facts, begin, end, reader.identity]
        size = range(begin, end).__len__
        shards.append(RowShard(rows, repr(config.source), identity, reader, first=begin, count=size))
    return shards


def files_of_split(config: DataConfig) -> list[str]:
    """Return the addresses of the files of a split, or nothing if the dataset is complete in a cache.

    Raises:
        ValueError: files of a local directory are in no split.
    """
    builder = _library().load_dataset_builder(config.source, config.dataset_config)
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
    root = Path(config.source)
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

    total = 0
    for path in paths:
        if "::" in path:  # within an archive
            return True
        system, name = url_to_fs(path)
        # The file system of the hub answers from the listing of the file's directory, which it requests once: a
        # request for each of thousands of files would take minutes.
        size = system.info(name).get("size")
        if size is None:
            return True
        total += size
        if total > small_bytes:
            return True
    return False
