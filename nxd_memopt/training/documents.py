"""Finds documents in the standard library, in files or in a dataset, and splits them into training and held-out."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_memopt.training.config import DataConfig

BUILDERS = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
}
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

    def text(self, part: Part) -> str:
        """Return the text of ``part``."""
        text = self.read(part.index)
        return text[int(part.start * len(text)) : int(part.stop * len(text))]


def open_documents(config: DataConfig) -> Documents:
    """Find and split the documents of ``config.dataset``. Their text is read later, on demand.

    Raises:
        ValueError: for a missing file, column, dataset or split, and for an empty dataset.
    """
    if config.dataset == "stdlib":
        read, keys = _open_stdlib()
    else:
        read, keys = _open_dataset(config)
    if not keys:
        raise ValueError(f"dataset {config.dataset!r} is empty: it has no documents")
    train, held_out = split_documents(keys, config.held_out_every)
    digest = hashlib.sha256("\n".join([str(config.held_out_every), *keys]).encode()).hexdigest()
    return Documents(read, train, held_out, digest)


def split_documents(keys: list[str], held_out_every: int) -> tuple[list[Part], list[Part]]:
    """Return the training parts and the held-out parts.

    With at least ``held_out_every`` documents, each document is in one split, chosen by a hash of
    its key alone: a document with an unchanged name stays in its split when others are added.
    """
    # With fewer documents, by hash all could be in one split. Each document is cut instead: the
    # last 1/held_out_every of its characters are held out.
    if len(keys) < held_out_every:
        cut = 1 - 1 / held_out_every
        starts = [Part(index, stop=cut) for index in range(len(keys))]
        ends = [Part(index, start=cut) for index in range(len(keys))]
        return starts, ends
    train: list[Part] = []
    held_out: list[Part] = []
    for index, key in enumerate(keys):
        if _hash(key) % held_out_every == 0:
            held_out.append(Part(index))
        else:
            train.append(Part(index))
    return train, held_out


def _hash(key: str) -> int:
    """Return a hash of a document's name; Python's ``hash`` differs from process to process."""
    # A key is "name\tsize". Without the size, a file that grew stays in its split.
    name = key.split("\t")[0]
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _open_stdlib() -> tuple[Callable[[int], str], list[str]]:
    """Return the reader and the keys of Python's standard library, one document per module."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Sorted: the order of a directory's entries differs between file systems, and indices and the
    # fingerprint depend on it.
    files = sorted(path for path in root.rglob("*.py") if not STDLIB_EXCLUDED & set(path.relative_to(root).parts))

    def read(index: int) -> str:
        return files[index].read_text(encoding="utf-8", errors="replace")

    # A key has the file's size, so the fingerprint changes if a file of the library changes size.
    keys = [f"{path.relative_to(root).as_posix()}\t{path.stat().st_size}" for path in files]
    return read, keys


def _open_dataset(config: DataConfig) -> tuple[Callable[[int], str], list[str]]:
    """Return the reader and the keys of a dataset, one document per row."""
    dataset = _load_dataset(config)
    column = config.text_column
    if column not in dataset.column_names:
        raise ValueError(
            f"data.text_column {column!r} is not in dataset {config.dataset!r}: its columns are {dataset.column_names}"
        )

    def read(index: int) -> str:
        text = dataset[index][column]
        if not isinstance(text, str):
            raise ValueError(
                f"column {column!r} of {config.dataset!r} holds {type(text).__name__}, not text, "
                f"in row {index}: name a column of strings in data.text_column"
            )
        return text

    # The datasets library's hash of the data: part of every key, so it enters our fingerprint.
    fingerprint = dataset._fingerprint
    return read, [f"{index}\t{fingerprint}" for index in range(len(dataset))]


def _load_dataset(config: DataConfig) -> Any:
    """Return a ``datasets.Dataset``: saved on disk, read from local files, or from the hub."""
    import datasets  # takes about a second, which dataset "stdlib" does not need
    from datasets.exceptions import DatasetsError

    datasets.disable_progress_bars()
    path = Path(config.dataset)
    try:
        if (path / "state.json").is_file():
            return datasets.load_from_disk(str(path))
        files = _local_files(config.dataset)
        if not files:
            return datasets.load_dataset(config.dataset, config.dataset_config, split=config.split)
        return _load_files(datasets.load_dataset, files)
    except StopIteration as error:  # raised by the JSON reader for a file without rows
        raise ValueError(f"dataset {config.dataset!r} is empty: it has no documents") from error
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(f"dataset {config.dataset!r} cannot be read: {_reason(error)}") from error


def _load_files(load_dataset: Callable[..., Any], files: list[Path]) -> Any:
    """Return the dataset of ``files``, which have one kind."""
    builder = BUILDERS[files[0].suffix]
    # The text builder makes each line a row by default; here a file is one document.
    options = {}
    if builder == "text":
        options = {"sample_by": "document"}
    data_files = {"train": [str(file) for file in files]}
    return load_dataset(builder, data_files=data_files, split="train", **options)


def _local_files(name: str) -> list[Path]:
    """Return the local files of ``name``, or an empty list if it can only be a hub dataset."""
    path = Path(name)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in BUILDERS)
    elif "*" in name:
        # glob takes relative patterns only, so an absolute pattern is searched from its root.
        files = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
    else:
        files = []
    # A hub name has the form "owner/name", like a relative path. Everything that a hub name
    # cannot be is an error here instead of a failing download.
    is_path = path.exists() or path.is_absolute() or path.suffix in BUILDERS
    is_local = is_path or "*" in name or name.startswith(".")
    if is_local and not files:
        raise ValueError(f"no such file, or no file of a known kind ({', '.join(BUILDERS)})")
    # Files of one builder make one dataset with one set of columns. A suffix that is not known
    # stands for itself and is named in the message.
    kinds = sorted({BUILDERS.get(file.suffix, file.suffix) for file in files})
    if len(kinds) > 1 or (kinds and kinds[0] not in BUILDERS.values()):
        raise ValueError(f"files of kind {kinds} cannot be read as one dataset: known are {', '.join(BUILDERS)}")
    return files


def _reason(error: BaseException) -> str:
    """Return the message of the innermost cause, which the datasets library wraps."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
