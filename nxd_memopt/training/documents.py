"""Finds documents in the standard library, in files or in a dataset, and splits them into training and held-out."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_memopt.training.config import DataConfig

BUILDERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
STDLIB_EXCLUDED = {"site-packages", "test", "tests", "idle_test", "__pycache__"}  # test files hold odd encodings


@dataclass(frozen=True)
class Part:
    """A stretch of one document: from ``start`` to ``stop``, as fractions of its characters."""

    index: int
    start: float = 0.0
    stop: float = 1.0


@dataclass(frozen=True)
class Documents:
    """Text that is read one document at a time.

    Args:
        read: returns the text of a document, given its index.
        train: what is trained on.
        held_out: what is kept for evaluation.
        fingerprint: changes whenever the documents or their split do.
    """

    read: Callable[[int], str]
    train: list[Part]
    held_out: list[Part]
    fingerprint: str

    def text(self, part: Part) -> str:
        text = self.read(part.index)
        return text[int(part.start * len(text)) : int(part.stop * len(text))]


def open_documents(config: DataConfig) -> Documents:
    """Find the documents that ``config.dataset`` names, without reading more than their names and sizes.

    Raises:
        ValueError: for a missing file, column, dataset or split, and for an empty dataset; says what is there.
    """
    read, keys = _open_stdlib() if config.dataset == "stdlib" else _open_dataset(config)
    if not keys:
        raise ValueError(f"dataset {config.dataset!r} is empty: it has no documents")
    train, held_out = split_documents(keys, config.held_out_every)
    digest = hashlib.sha256("\n".join([str(config.held_out_every), *keys]).encode()).hexdigest()
    return Documents(read, train, held_out, digest)


def split_documents(keys: list[str], held_out_every: int) -> tuple[list[Part], list[Part]]:
    """Return the training part and the held-out part; a document's side depends on its key alone."""
    if len(keys) < held_out_every:
        cut = 1 - 1 / held_out_every
        return [Part(i, stop=cut) for i in range(len(keys))], [Part(i, start=cut) for i in range(len(keys))]
    sides: tuple[list[Part], list[Part]] = ([], [])
    for index, key in enumerate(keys):
        sides[_hash(key) % held_out_every == 0].append(Part(index))
    return sides


def _hash(key: str) -> int:
    name = key.split("\t")[0]  # a file that grew stays on its side
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _open_stdlib() -> tuple[Callable[[int], str], list[str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not STDLIB_EXCLUDED & set(path.relative_to(root).parts))

    def read(index: int) -> str:
        return files[index].read_text(encoding="utf-8", errors="replace")

    return read, [f"{path.relative_to(root).as_posix()}\t{path.stat().st_size}" for path in files]


def _open_dataset(config: DataConfig) -> tuple[Callable[[int], str], list[str]]:
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
                f"column {column!r} of {config.dataset!r} holds {type(text).__name__}, not text, in row {index}: "
                "name a column of strings in data.text_column"
            )
        return text

    fingerprint = dataset._fingerprint
    return read, [f"{index}\t{fingerprint}" for index in range(len(dataset))]


def _load_dataset(config: DataConfig) -> Any:
    import datasets  # takes a second, which the builtin corpus need not pay
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
    except StopIteration as error:  # how the JSON reader meets the end of a file without rows
        raise ValueError(f"dataset {config.dataset!r} is empty: it has no documents") from error
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(f"dataset {config.dataset!r} cannot be read: {_reason(error)}") from error


def _load_files(load_dataset: Callable[..., Any], files: list[Path]) -> Any:
    builder = BUILDERS[files[0].suffix]
    options = {"sample_by": "document"} if builder == "text" else {}
    return load_dataset(builder, data_files={"train": [str(file) for file in files]}, split="train", **options)


def _local_files(name: str) -> list[Path]:
    """Return the files that ``name`` stands for, or nothing where it can only be a name on the hub."""
    path = Path(name)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in BUILDERS)
    else:
        files = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))) if "*" in name else []
    is_local = path.exists() or "*" in name or path.is_absolute() or name.startswith(".") or path.suffix in BUILDERS
    if is_local and not files:
        raise ValueError(f"no such file, or no file of a known kind ({', '.join(BUILDERS)})")
    kinds = sorted({BUILDERS.get(file.suffix, file.suffix) for file in files})
    if len(kinds) > 1 or (kinds and kinds[0] not in BUILDERS.values()):
        raise ValueError(f"files of kind {kinds} cannot be read as one dataset: known are {', '.join(BUILDERS)}")
    return files


def _reason(error: BaseException) -> str:
    """The innermost cause: the datasets library wraps what went wrong in general words."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
