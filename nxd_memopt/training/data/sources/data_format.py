"""Recognizes what the rows of a dataset are by their columns: ``data.format``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from nxd_memopt.parallel_layers.coordination import from_rank_zero, raise_together
from nxd_memopt.training.config.data import FIELDS, USUAL_COLUMNS, DataConfig, columns_by_field
from nxd_memopt.training.data.sources.dataset_shards import columns_of
from nxd_memopt.training.data.sources.indexed_tokens import SUFFIX
from nxd_memopt.training.data.sources.local_data import BUILDERS, local_files
from nxd_memopt.training.data.sources.shards import count_parquet, has_json_lines, is_streamed
from nxd_memopt.training.runtime.distributed import is_rank_zero

FIRST_ROWS = 100  # that tell the format of a file


class _Rows(NamedTuple):
    """What is known of the rows of a dataset before they are read.

    Args:
        columns: of each of the first rows, or of the table; empty for data without rows.
        count: number of rows, or None if only reading all of them would tell.
    """

    columns: list[set[str]]
    count: int | None = None


class _Reading(NamedTuple):
    """A way to read rows: a value of ``data.format`` and one of ``data.columns``."""

    form: str
    columns: Mapping[str, str]

    @property
    def required(self) -> dict[str, str]:
        return columns_by_field(self.form, self.columns)[0]

    def fits(self, rows: _Rows) -> bool:
        """Return whether one of the rows has the columns that a row must have."""
        needed = set(self.required.values())
        # Two fields of one column, such as prompt and completion of "response", are none of its readings.
        return len(needed) == len(self.required) and any(needed <= columns for columns in rows.columns)

    def __str__(self) -> str:
        named = [column if field == column else f"{field} in {column!r}" for field, column in self.required.items()]
        return f"{self.form} ({', '.join(named)})"


def with_format(config: DataConfig) -> DataConfig:
    """Return the options with format and columns of the rows; print which were recognized. Every rank calls.

    Raises:
        ValueError: the rows have the columns of another format, or of none, or the sources of a
            mixture have different formats.
    """
    # Rank 0 reads and the others take its answer: each rank with its own view of a file could read another format.
    found: _Reading | None = None
    with raise_together("reading the columns of the data"):
        if is_rank_zero():
            readings = {name: _reading_of(config.of_source(name)) for name in config.sources}
            first = next(iter(readings.values()))
            if any(each != first for each in readings.values()):
                listed = ", ".join(f"{name!r} is {reading}" for name, reading in readings.items())
                raise ValueError(
                    f"the sources of data.mixture have different formats or columns: {listed}: train them one by one, "
                    "or rename the columns"
                )
            if config.validation_dataset is not None:
                # Its rows are read in the same way, and may have other optional columns, or columns that are not read.
                held_out = config.of_source(config.validation_dataset)
                if first.fits(rows := _rows(held_out)):
                    _print_reading(held_out, rows, first, [])
            found = first
    form, columns = from_rank_zero(found)
    return replace(config, format=form, columns=columns)


def _reading_of(config: DataConfig) -> _Reading:
    """Return how the rows of ``config.source`` are read."""
    rows = _rows(config)
    if not rows.columns:
        return _Reading("text" if config.format == "auto" else config.format, config.columns)
    found = sorted(set().union(*rows.columns))
    missing = [name for name in config.columns.values() if name not in found]
    if missing:
        raise ValueError(f"data.columns names {missing}, and the rows of {config.source!r} have the columns {found}")
    seen = f"first {FIRST_ROWS} " if len(rows.columns) == FIRST_ROWS else ""
    # The order decides if several fit. A row may lack a column: one of the first rows is enough.
    fitting = [reading for reading in _readings(config) if reading.fits(rows)]
    chosen = [reading for reading in fitting if config.format in ("auto", reading.form)]
    if chosen:
        _print_reading(config, rows, chosen[0], [each for each in fitting if each != chosen[0]])
        return chosen[0]
    if fitting:
        raise ValueError(
            f"data.format {config.format!r} reads the columns {list(FIELDS[config.format][0])}, and the {seen}rows of "
            f"{config.source!r} have the columns {found}, which is {fitting[0].form}: set data.format to "
            f"{fitting[0].form}, or leave it out"
        )
    known = ", ".join(f"{form} {list(required)}" for form, (required, _) in FIELDS.items())
    raise ValueError(
        f"the {seen}rows of {config.source!r} have the columns {found}, and the values of data.format read others "
        f"({known}): name them in data.columns, such as {{text: COLUMN}}, or rename them"
    )


def _readings(config: DataConfig) -> list[_Reading]:
    """Return the ways to read rows with ``data.columns``: its names win over the usual ones."""
    found: list[_Reading] = []
    for form, (required, optional) in FIELDS.items():
        if config.columns.keys() <= {*required, *optional}:
            found += [_Reading(form, {**usual, **config.columns}) for usual in USUAL_COLUMNS.get(form, ({},))]
    return found


def _print_reading(config: DataConfig, rows: _Rows, reading: _Reading, others: list[_Reading]) -> None:
    """Print how the rows are read, what of them is not, and what else would fit."""
    columns = set().union(*rows.columns)
    required, optional = columns_by_field(reading.form, reading.columns)
    unread = sorted(columns - {*required.values(), *optional.values()})
    given = {field: column for field, column in (required | optional).items() if column in columns}
    shown = ", ".join(column if field == column else f"{field} in {column!r}" for field, column in given.items())
    number = "the" if rows.count is None else f"the {rows.count:,}"
    line = f"format: {number} rows of {config.source!r} are read as {reading.form}: columns {shown}"
    # Later rows may have more of the optional ones, which are read too.
    if len(rows.columns) == FIRST_ROWS:
        line += f" in the first {FIRST_ROWS} rows"
    if unread:
        line += f"; not read: {', '.join(unread)}"
    if others:
        line += f"; {' and '.join(map(str, others))} would fit too (data.format, data.columns)"
    print(line, flush=True)


def _rows(config: DataConfig) -> _Rows:
    """Return what is known of the rows."""
    if config.source == "stdlib" or Path(config.source).suffix == SUFFIX:
        return _Rows([])
    files = local_files(config.source)
    if files and BUILDERS[files[0].suffix] == "text":
        return _Rows([])
    is_large = is_streamed(config)
    if not files:
        columns, count = columns_of(config, streamed=is_large)
        return _Rows([set(columns)], count)
    for path in files:
        if columns := _columns_of_file(path):
            return _Rows(columns, None if is_large else _count_rows(files))
    return _Rows([])


def _count_rows(files: list[Path]) -> int | None:
    """Return the number of rows of files, or None if one of them is damaged, which is reported where it is read."""
    count = 0
    with suppress(OSError, ValueError, RecursionError):
        for path in files:
            if path.suffix == ".parquet":
                count += count_parquet(path)
            elif has_json_lines(path):
                with path.open("rb") as file:
                    count += sum(1 for line in file if line.strip())
            else:
                content = json.loads(path.read_bytes().decode("utf-8-sig"))
                count += len(content) if isinstance(content, list) else 1
        return count
    return None


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
