"""Finds the shards of a corpus: ranges of JSON lines, JSON arrays, Parquet and text files, read from any position."""

from __future__ import annotations

import codecs
import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.dataset_shards import find_dataset_shards, streams_dataset
from nxd_memopt.training.data.sources.local_data import BUILDERS, file_identity, is_saved, local_files
from nxd_memopt.training.data.sources.rows import Place, RowReader, RowShard, Shard

# Corpora up to this size are read, checked and hashed before training: 1 to 3 s.
SMALL_BYTES = 2**26
# Bytes of a file of JSON lines in one shard: the shards of a single large file are shuffled too.
LINES_BYTES = 2**26
# A text file up to this size is one document. If texts are cut, a longer one is, at ends of lines.
TEXT_BYTES = 2**24
TEXT_PIECE_BYTES = 2**20
# Test folders are excluded because their files have unusual encodings on purpose.
STDLIB_EXCLUDED = {"site-packages", "test", "tests", "idle_test", "__pycache__"}


def is_streamed(config: DataConfig) -> bool:
    """Return whether the corpus is read while the run trains: ``data.streaming``, or by its size."""
    if config.streaming != "auto":
        return config.streaming
    if config.source == "stdlib":
        return False
    files = local_files(config.source)
    if not files:
        return streams_dataset(config, SMALL_BYTES)
    return sum(path.stat().st_size for path in files) > SMALL_BYTES


def find_shards(config: DataConfig, reader: RowReader, *, streamed: bool) -> list[Shard]:
    """Return the shards of ``config.source``, without reading more than the first row.

    Args:
        config: names the dataset.
        reader: reads the documents of rows.
        streamed: whether large files are cut into several shards or documents.

    Raises:
        ValueError: for a missing file, and for data that can only be read as one piece.
    """
    if config.source == "stdlib":
        if streamed:
            raise ValueError(
                "data.streaming true reads files or a dataset, and data.dataset is 'stdlib': set it to auto"
            )
        refuse_hub_options(config, ())
        refuse_conversations(config, "Python files")
        root = Path(sysconfig.get_paths()["stdlib"])
        # Sorted: the order of a directory's entries differs between file systems, and indices and the
        # fingerprint depend on it.
        modules = (path for path in root.rglob("*.py") if not STDLIB_EXCLUDED & set(path.relative_to(root).parts))
        return [TextFile(path, reader, is_cut=False) for path in sorted(modules)]
    files = local_files(config.source)
    refuse_hub_options(config, files)
    if not files:
        return list(find_dataset_shards(config, reader, streamed=streamed))
    if streamed:
        files = [path for path in files if path.stat().st_size]
    shards: list[Shard] = []
    for path in files:
        shards += _file_shards(config, path, reader, streamed=streamed)
    return shards


def _file_shards(config: DataConfig, path: Path, reader: RowReader, *, streamed: bool) -> list[Shard]:
    """Return the shards of a file."""
    kind = BUILDERS[path.suffix]
    if kind == "text":
        refuse_conversations(config, "text files")
        return [TextFile(path, reader, is_cut=streamed)]
    if kind == "parquet":
        return [_file_of_rows(path, partial(_parquet_rows, path, reader), reader, cache(partial(count_parquet, path)))]
    assert kind == "json", kind
    if not has_json_lines(path):
        if streamed:
            raise ValueError(
                f"{path} is one JSON value, not a JSON object in each line, and is too large to be read at once: "
                "write it as JSON lines, or set data.streaming to false"
            )
        return [_file_of_rows(path, partial(_array_rows, path), reader)]
    size = path.stat().st_size
    length = LINES_BYTES if streamed else max(size, 1)
    return [JsonLines(path, start, start + length, reader) for start in range(0, size, length)]


def _file_of_rows(
    path: Path,
    open_rows: Callable[[int], Iterator[Callable[[], Any]]],
    reader: RowReader,
    count: Callable[[], int] | None = None,
) -> Shard:
    """Return the rows of a file as one shard."""
    return RowShard(open_rows, str(path), [*file_identity(path), reader.identity], reader, count=count)


def count_parquet(path: Path) -> int:
    """Return the number of rows of a Parquet file."""
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(path).num_rows


def refuse_conversations(config: DataConfig, found: str) -> None:
    """Raise ``ValueError`` for conversations in data without rows."""
    if config.has_conversations:
        raise ValueError(
            f"data.format {config.format!r} reads rows, and data.dataset {config.source!r} is {found}: name JSON "
            "lines, Parquet files or a dataset, or set data.format to text"
        )


def refuse_hub_options(config: DataConfig, files: Sequence[Path]) -> None:
    """Raise ``ValueError`` if data that is not of the hub comes with options that choose a part of a hub dataset."""
    if not files and config.source != "stdlib" and not is_saved(config.source):
        return
    default = DataConfig()
    for name in ("split", "dataset_config"):
        value = getattr(config, name)
        if value != getattr(default, name):
            raise ValueError(
                f"data.{name} {value!r} chooses a part of a data set of the hub, and data.dataset {config.source!r} "
                f"is not one: leave data.{name} out, and name the files to train on"
            )


def has_json_lines(path: Path) -> bool:
    """Return whether a file has one JSON object per line, by its name or its first line; an empty file has."""
    if path.suffix == ".jsonl":
        return True
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"{}")
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


@dataclass(frozen=True)
class JsonLines:
    """The lines of a file that start in a range of bytes.

    A position is the byte after a line, plus 1: 0 is the beginning of the range, wherever it is in the file.

    Args:
        path: file with one JSON object per line.
        start: first byte of the range.
        stop: end of the range.
        reader: reads the document of a row.
    """

    path: Path
    start: int
    stop: int
    reader: RowReader

    @property
    def identity(self) -> list[Any]:
        return [*file_identity(self.path), self.start, self.reader.identity]

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
            while (begin := file.tell()) < self.stop:
                line = file.readline()
                if not line:
                    return
                data = line.removeprefix(codecs.BOM_UTF8) if begin == 0 else line
                position = begin + len(line) + 1
                if data := data.strip():
                    text = self.reader.read(partial(_json_line, data), Place(self, position))
                    if text is not None:
                        yield text, position

    def place_of(self, position: int) -> str:
        """Return the file and the number of the line that ends at a position."""
        number = 1
        left = position - 2  # without the line's own end
        with self.path.open("rb") as file:
            while left > 0:
                chunk = file.read(min(left, LINES_BYTES))
                number += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self.path} line {number}"

    def share_of(self, position: int) -> float:
        """Return the part of the range's bytes before a position."""
        stop = min(self.stop, self.path.stat().st_size)
        return min(max(position - 1 - self.start, 0) / max(stop - self.start, 1), 1.0)


def _json_line(data: bytes) -> Any:
    return json.loads(data.decode())


def _array_rows(path: Path, start: int) -> Iterator[Callable[[], Any]]:
    """Yield a function for each element of a file's JSON array, or for its one value, from element ``start`` on."""
    try:
        values = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): correct the file, or copy it again") from None
    for row in (values if isinstance(values, list) else [values])[start:]:
        yield lambda row=row: row


def _parquet_rows(path: Path, reader: RowReader, start: int) -> Iterator[Callable[[], Any]]:
    """Yield a function that loads each row of a Parquet file, from row ``start`` on, one row group at a time."""
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a complete Parquet file: {error}: copy or write it again") from None
    with file:
        names = file.schema_arrow.names
        reader.require_columns(str(path), names)
        columns = [name for name in reader.columns if name in names]
        number = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if number + count <= start:
                number += count
                continue
            for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=columns):
                for index in range(max(start - number, 0), batch.num_rows):
                    yield partial(_batch_row, batch, index)
                number += batch.num_rows


def _batch_row(batch: Any, index: int) -> dict[str, Any]:
    return {name: batch.column(name)[index].as_py() for name in batch.schema.names}


@dataclass(frozen=True)
class TextFile:
    """A text file: one document, or several if it is long and cut; positions are bytes of the file."""

    path: Path
    reader: RowReader
    is_cut: bool

    @property
    def identity(self) -> list[Any]:
        return file_identity(self.path)

    def read(self, start: int) -> Iterator[tuple[str, int]]:
        """Yield the text, or pieces of about 1 MiB, cut at ends of lines, of one that is cut and above 16 MiB."""
        size = self.path.stat().st_size
        length = TEXT_PIECE_BYTES if self.is_cut and size > TEXT_BYTES else max(size, 1)
        with self.path.open("rb") as file:
            file.seek(start)
            while (data := file.read(length)) or not size:
                encoding = "utf-8" if start else "utf-8-sig"  # a byte order mark is no text
                # Without an end of line within another MiB, the text is cut between two characters.
                data += _rest_of_line(file) if len(data) == length < size else b""
                start += len(data)
                text = self.reader.checked(partial(data.decode, encoding), Place(self, start))
                if text is not None:
                    yield text, start
                if not size:  # an empty file is an empty document
                    return

    def place_of(self, position: int) -> str:
        del position
        return str(self.path)

    def share_of(self, position: int) -> float:
        """Return the part of the file before a position."""
        return position / max(self.path.stat().st_size, 1)


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
