"""Finds the local files of a dataset, and turns what goes wrong when data is read into one kind of error."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUILDERS = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
}
# Files next to the directories with the data in repositories of the hub. They would become the training text.
ABOUT_REPOSITORY = ("README.md", "LICENSE.md", "CITATION.md", "CHANGELOG.md", "dataset_infos.json")
# At the beginning, in the middle and at the end of a file whose content is not hashed.
SAMPLE_BYTES = 2**16


def local_files(name: str) -> list[Path]:
    """Return the local files of ``name``; none of a saved dataset, one of the hub, or a copy of its repository.

    Raises:
        ValueError: there is no such file, or the files are not of one known kind.
    """
    path, wrong = Path(name), f"dataset {name!r} cannot be read: "
    if is_saved(name) or is_repository(path):
        return []
    if (path / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in path.glob("*/state.json"))
        raise ValueError(f"{wrong}it was saved with the splits {splits}: name the directory of one of them")
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in BUILDERS and not file.is_dir())
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
        where = "" if path.is_absolute() else f"; a relative path is looked for in {Path.cwd()}"
        raise ValueError(f"{wrong}no such file, or no file of a known kind ({', '.join(BUILDERS)}){where}")
    # Files of one builder make one dataset with one set of columns. A suffix that is not known
    # stands for itself and is named in the message.
    kinds = sorted({BUILDERS.get(file.suffix, file.suffix) for file in files})
    if len(kinds) > 1:
        raise ValueError(f"{wrong}its files are of several kinds, {kinds}: name one by a pattern, such as '*.jsonl'")
    if kinds and kinds[0] not in BUILDERS.values():
        raise ValueError(
            f"{wrong}its files are of kind {kinds}, and not of one of {', '.join(BUILDERS)}: unpack them, or write "
            "their rows as JSON lines"
        )
    return files


def is_saved(name: str) -> bool:
    """Return whether ``save_to_disk`` wrote the directory."""
    return (Path(name) / "state.json").is_file()


def is_repository(path: Path) -> bool:
    """Return whether a directory has data in subdirectories only, as a copy of a repository of the hub."""
    if not path.is_dir() or any(path.glob("*/state.json")):
        return False
    if any(file.suffix in BUILDERS and file.name not in ABOUT_REPOSITORY for file in path.iterdir()):
        return False
    return bool(repository_files(path))


def repository_files(path: Path) -> list[Path]:
    """Return the files with data in the subdirectories of a copy of a repository."""
    return sorted(
        file for file in path.glob("*/*") if file.suffix in (".parquet", ".jsonl", ".json") and file.is_file()
    )


def file_identity(path: Path) -> list[Any]:
    """Return size, time and samples of a file: its content cannot be read before training starts."""
    # The time too: an edit in the middle that keeps the size would not change the samples. The
    # name does not count, nor does the directory.
    status = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for place in (0, status.st_size // 2, max(status.st_size - SAMPLE_BYTES, 0)):
            file.seek(place)
            digest.update(file.read(SAMPLE_BYTES))
    return [status.st_size, status.st_mtime_ns, digest.hexdigest()]


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Raise one kind of error for everything that the datasets library cannot read."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        yield
    except StopIteration as error:  # of a file without rows
        raise ValueError(f"dataset {name!r} is empty: it has no documents") from error
    # KeyError and TypeError: what load_from_disk raises for a file of another program.
    except (OSError, ValueError, KeyError, TypeError, DatasetsError) as error:
        cause = _cause(error)
        remedy = ""
        if isinstance(cause, KeyError | TypeError):
            remedy = f" ({type(cause).__name__}): a file of it was altered, save it again"
        elif isinstance(cause, ConnectionError | DatasetNotFoundError):
            remedy = f": check the name and the network, or name local files, which are looked for in {Path.cwd()}"
        elif type(cause).__module__.startswith("pyarrow"):
            remedy = ": correct the file, or copy it again"
        elif isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = ": free disk space, or set HF_DATASETS_CACHE to a directory with more"
        raise ValueError(f"dataset {name!r} cannot be read: {str(cause) or type(cause).__name__}{remedy}") from error


def _cause(error: BaseException) -> BaseException:
    """Return the innermost cause, which the datasets library wraps."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
