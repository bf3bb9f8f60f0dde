"""Finds documents in the standard library, in files or in a dataset, and splits them into training and held-out."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.bad_rows import (
    ROW_COLUMNS,
    ROWS_VERSION,
    bad_files,
    bad_rows,
    bad_strings,
    good_rows,
)
from nxd_memopt.training.data.sources.conversations import bad_table_rows, row_reader
from nxd_memopt.training.data.sources.dataset_shards import files_of_split
from nxd_memopt.training.data.sources.local_data import BUILDERS, content_hash, is_saved, local_files, readable
from nxd_memopt.training.data.sources.row_files import read_rows

# Test folders are excluded because their files have unusual encodings on purpose.
STDLIB_EXCLUDED = {"site-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Part:
    """Range of one document, from ``start`` to ``stop`` as fractions of its characters."""

    index: int
    start: float = 0.0
    stop: float = 1.0


@dataclass(frozen=True)
class Documents:
    """Training and held-out documents, read one at a time.

    Args:
        read: maps a document's index to its text.
        train: parts of documents for training.
        held_out: parts of documents for evaluation.
        fingerprint: hash that changes if the documents or the split change.
    """

    read: Callable[[int], str]
    train: list[Part]
    held_out: list[Part]
    fingerprint: str

    @property
    def are_cut(self) -> bool:
        """Whether the end of each document is held out, not some documents."""
        return any(part.start for part in self.held_out)

    def text(self, part: Part) -> str:
        """Return the text of ``part``."""
        text = self.read(part.index)
        return text[int(part.start * len(text)) : int(part.stop * len(text))]


@dataclass(frozen=True)
class DocumentSource:
    """Documents of one origin, before they are split.

    Args:
        read: maps a document's index to its text.
        count: number of documents.
    """

    read: Callable[[int], str]
    count: int


def open_documents(config: DataConfig) -> Documents:
    """Find and split the documents of ``config.dataset``; their text is read again on demand.

    Every document is read once, to find its split: about 2 s per GB.

    Raises:
        ValueError: for a missing file, column, dataset or split, for an empty dataset, and for a
            row without text unless ``config.on_bad_rows`` is ``skip``.
    """
    if config.dataset == "stdlib":
        require_one_split(config, ())
        require_rows(config, "Python files")
        source = _open_stdlib()
    else:
        source = _open_dataset(config)
    if not source.count:
        raise ValueError(f"dataset {config.dataset!r} is empty: it has no documents")
    digests = [text_digest(source.read(index)) for index in range(source.count)]
    train, held_out = split_documents(digests, config.split_every, can_cut=not config.has_conversations)
    if not train:
        raise ValueError(
            f"dataset {config.dataset!r} contains {len(digests)} copies of one conversation, and the held-out "
            "set needs a different one: add others"
        )
    # The text of each document, and nothing else: moved or copied data is the same data.
    facts = [str(config.held_out_every), *digests]
    fingerprint = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return Documents(source.read, train, held_out, fingerprint)


def require_rows(config: DataConfig, found: str) -> None:
    """Raise ``ValueError`` for conversations in data without rows."""
    if config.has_conversations:
        raise ValueError(
            f"data.format {config.format!r} reads rows, and data.dataset {config.dataset!r} is {found}: name JSON "
            "lines, Parquet files or a dataset, or set data.format to text"
        )


def split_documents(digests: list[str], held_out_every: int, *, can_cut: bool = True) -> tuple[list[Part], list[Part]]:
    """Return the training parts and the held-out parts.

    With at least ``held_out_every`` documents, each document is in one split, chosen by its text
    alone: copies of a document are in the same split, and a document stays in its split when others
    are added. With fewer, or if that leaves a split empty, each document is cut; of documents that
    cannot be cut, the one with the smallest hash is held out, with its copies.

    Args:
        digests: ``text_digest`` of each document.
        held_out_every: about one document in this many is held out; 0 for none.
        can_cut: whether a part of a document is a document.
    """
    train: list[Part] = []
    held_out: list[Part] = []
    for index, digest in enumerate(digests):
        if _is_held_out(digest, held_out_every):
            held_out.append(Part(index))
        else:
            train.append(Part(index))
    if not held_out_every:
        return train, held_out
    # With few documents, by hash all may be in one split. Each document is cut instead: the last
    # 1/held_out_every of its characters are held out.
    if not can_cut:
        if train and held_out:
            return train, held_out
        chosen = min(digests)
        train = [Part(index) for index, digest in enumerate(digests) if digest != chosen]
        held_out = [Part(index) for index, digest in enumerate(digests) if digest == chosen]
        return train, held_out
    if len(digests) < held_out_every or not train or not held_out:
        cut = 1 - 1 / held_out_every
        train = [Part(index, stop=cut) for index in range(len(digests))]
        held_out = [Part(index, start=cut) for index in range(len(digests))]
    return train, held_out


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def is_held_out(text: str, held_out_every: int) -> bool:
    """Return whether a document of a corpus that is read in shards is held out."""
    return _is_held_out(text_digest(text), held_out_every)


def _is_held_out(digest: str, held_out_every: int) -> bool:
    return held_out_every > 0 and int(digest[:16], 16) % held_out_every == 0


def _open_stdlib() -> DocumentSource:
    """Return Python's standard library, one document per module."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Sorted: the order of a directory's entries differs between file systems, and indices and the
    # fingerprint depend on it.
    files = sorted(path for path in root.rglob("*.py") if not STDLIB_EXCLUDED & set(path.relative_to(root).parts))

    def read(index: int) -> str:
        return files[index].read_text(encoding="utf-8", errors="replace")

    return DocumentSource(read, len(files))


def _open_dataset(config: DataConfig) -> DocumentSource:
    """Return a dataset, one document per row, or text files, one document per file."""
    files = local_files(config.dataset)
    require_one_split(config, files)
    if files and BUILDERS[files[0].suffix] == "text":
        return _open_texts(config, files)
    return _open_rows(config, files) if files else _open_table(config)


def require_one_split(config: DataConfig, files: Sequence[Path]) -> None:
    """Raise ``ValueError`` if data that is not of the hub comes with options that choose a part of a hub dataset."""
    if not files and config.dataset != "stdlib" and not is_saved(config.dataset):
        return
    default = DataConfig()
    for name in ("split", "dataset_config"):
        value = getattr(config, name)
        if value != getattr(default, name):
            raise ValueError(
                f"data.{name} {value!r} chooses a part of a data set of the hub, and data.dataset {config.dataset!r} "
                f"is not one: leave data.{name} out, and name the files to train on"
            )


def _open_texts(config: DataConfig, files: list[Path]) -> DocumentSource:
    """Return text files, one document per file."""
    require_rows(config, "text files")
    rows = good_rows(len(files), bad_files(files), policy=config.on_bad_rows, dataset=config.dataset)

    def read(index: int) -> str:
        # As written: read_text would replace the ends of lines of Windows, which shards keep. A byte
        # order mark is no text.
        return files[rows[index]].read_bytes().decode("utf-8-sig")

    return DocumentSource(read, len(rows))


def _open_rows(config: DataConfig, files: list[Path]) -> DocumentSource:
    """Return files of rows, one document per row."""
    import datasets

    # ``datasets`` keeps the rows in its cache under a name: here the content decides on it, not
    # the times of the files. Its own readers end at the first row that they cannot read, without its
    # number, and change values: texts with a date become times.
    reader, paths = row_reader(config), [str(path) for path in files]
    name = hashlib.sha256(f"{ROWS_VERSION}\n{content_hash(files)}\n{reader}\n{files}".encode()).hexdigest()
    with readable(config.dataset):
        next(read_rows(paths, reader))  # StopIteration: there is none
        datasets.disable_progress_bars()
        dataset = datasets.Dataset.from_generator(
            read_rows,
            features=datasets.Features({column: datasets.Value("large_string") for column in ROW_COLUMNS}),
            gen_kwargs={"paths": paths, "reader": reader},
            fingerprint=name[:32],
        )
    rows = good_rows(len(dataset), bad_rows(dataset), policy=config.on_bad_rows, dataset=config.dataset)

    def read(index: int) -> str:
        return dataset[int(rows[index])]["text"]

    return DocumentSource(read, len(rows))


def _open_table(config: DataConfig) -> DocumentSource:
    """Return a saved dataset or one of the hub, one document per row."""
    with readable(config.dataset):
        dataset = load_table(config)
    if config.has_conversations:
        return _open_conversations(config, dataset)
    column = config.text_column
    if column not in dataset.column_names:
        raise ValueError(
            f"data.text_column {column!r} is not in dataset {config.dataset!r}: its columns are {dataset.column_names}"
        )
    dtype = getattr(dataset.features[column], "dtype", "lists or objects")
    if dtype not in ("string", "large_string", "string_view"):
        raise ValueError(
            f"column {column!r} of {config.dataset!r} holds {dtype}, not text: name a column of strings in "
            "data.text_column"
        )
    strings = dataset.flatten_indices().data.column(column) if dataset._indices else dataset.data.column(column)
    bad = bad_strings(strings, lambda row: f"column {column!r} of {config.dataset!r} row {row + 1}")
    rows = good_rows(len(dataset), bad, policy=config.on_bad_rows, dataset=config.dataset)

    def read(index: int) -> str:
        return dataset[int(rows[index])][column]

    return DocumentSource(read, len(rows))


def _open_conversations(config: DataConfig, dataset: Any) -> DocumentSource:
    """Return a dataset with a conversation in each row."""
    reader = row_reader(config)
    columns = [*reader.columns, *reader.optional_columns]
    # Other columns are not decoded.
    chosen = dataset.select_columns([name for name in dataset.column_names if name in columns])
    missing = [name for name in reader.columns if name not in dataset.column_names]
    if missing:
        raise ValueError(
            f"{missing[0]!r} (data.format {config.format}) is not in dataset {config.dataset!r}: its columns are "
            f"{dataset.column_names}"
        )
    bad = bad_table_rows(chosen, reader, lambda row: f"{config.dataset!r} row {row + 1}")
    rows = good_rows(len(chosen), bad, policy=config.on_bad_rows, dataset=config.dataset)

    def read(index: int) -> str:
        return str(reader.read(chosen[int(rows[index])], "")["text"])

    return DocumentSource(read, len(rows))


def load_table(config: DataConfig) -> Any:
    """Return a ``datasets.Dataset``: saved on disk, or from the hub."""
    import datasets  # takes about a second, which dataset "stdlib" does not need

    datasets.disable_progress_bars()
    # The library logs an error before it raises it: a second line about the same file.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if is_saved(config.dataset):
        return datasets.load_from_disk(config.dataset)
    files_of_split(config)  # raises for files that are in no split
    return datasets.load_dataset(config.dataset, config.dataset_config, split=config.split)
