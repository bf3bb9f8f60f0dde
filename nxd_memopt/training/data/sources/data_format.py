"""Recognizes what the rows of a dataset are by their columns: ``data.format``."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.conversations import COLUMNS
from nxd_memopt.training.data.sources.dataset_shards import columns_of
from nxd_memopt.training.data.sources.indexed_tokens import SUFFIX
from nxd_memopt.training.data.sources.local_data import BUILDERS, local_files
from nxd_memopt.training.data.sources.shards import has_json_lines, is_streamed
from nxd_memopt.training.runtime.distributed import is_rank_zero

FIRST_ROWS = 100  # that tell the format of a file


def with_format(config: DataConfig) -> DataConfig:
    """Return the options with the format of the rows; print which one was recognized. Every rank calls.

    Raises:
        ValueError: the rows have the columns of another format, or of none, or the sources of a
            mixture have different formats.
    """
    # Rank 0 reads and the others take its answer: each rank with its own view of a file could read another format.
    found = ""
    with raise_together("reading the columns of the data"):
        if is_rank_zero():
            formats = {name: _format_of(config.of_source(name)) for name in config.sources}
            found, *others = dict.fromkeys(formats.values())
            if others:
                raise ValueError(
                    f"the sources of data.mixture have different formats, {formats}: train them one by one"
                )
    return replace(config, format=share_texts(found)[0])


def _format_of(config: DataConfig) -> str:
    """Return the format of the rows of ``config.dataset``."""
    # The order decides if several fit. A row may lack a column: one of the first rows is enough.
    formats = {"text": (config.text_column,)} | {name: required for name, (required, _) in COLUMNS.items()}
    rows = _columns(config)
    fitting = [name for name, required in formats.items() if any(row.issuperset(required) for row in rows)]
    columns = sorted(set().union(*rows))
    named = "text" if config.format == "auto" and config.text_column != "text" else config.format
    if named != "auto":
        if fitting and named not in fitting:
            raise ValueError(
                f"data.format {named!r} reads the columns {list(formats[named])}, and the rows of {config.dataset!r} "
                f"have {columns}: set data.format to {fitting[0]}"
            )
        return named
    if not rows:
        return "text"
    if not fitting:
        known = ", ".join(f"{name} {list(required)}" for name, required in formats.items())
        raise ValueError(
            f"the rows of {config.dataset!r} have the columns {columns}, and the values of data.format read others "
            f"({known}): rename the columns, or name the one with the text in data.text_column"
        )
    also = f"; {' and '.join(fitting[1:])} would fit too (data.format)" if fitting[1:] else ""
    if fitting != ["text"]:
        print(f"data: the rows of {config.dataset!r} have {columns} and are read as {fitting[0]}{also}", flush=True)
    return fitting[0]


def _columns(config: DataConfig) -> list[set[str]]:
    """Return the columns of the first rows, or of the table; nothing for data without rows."""
    if config.dataset == "stdlib" or Path(config.dataset).suffix == SUFFIX:
        return []
    files = local_files(config.dataset)
    if files and BUILDERS[files[0].suffix] == "text":
        return []
    for path in files:
        if found := _columns_of_file(path):
            return found
    return [] if files else [set(columns_of(config, streamed=is_streamed(config)))]


def _columns_of_file(path: Path) -> list[set[str]]:
    """Return the columns of each of the first rows that are objects, or of a Parquet file."""
    values = []
    with suppress(OSError, ValueError, RecursionError):  # reported where the rows are read
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return [set(pyarrow.parquet.read_schema(path).names)]
        # A file with one JSON value is small enough to be read at once; of JSON lines the first ones are read.
        if not has_json_lines(path):
            content = json.loads(path.read_bytes().decode("utf-8-sig"))
            values = content[:FIRST_ROWS] if isinstance(content, list) else [content]
    if not values:
        with path.open("rb") as file:
            for line in islice(file, FIRST_ROWS):
                with suppress(ValueError, RecursionError):
                    values.append(json.loads(line.decode("utf-8-sig")))
    return [set(value) for value in values if isinstance(value, dict)]
