"""Files that are complete or absent, written under another name and renamed, and names that are free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")


@contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces ``path`` when the block ends.

    If the block raises, or the process is killed in it, ``path`` is what it was before. A symbolic link stays, and its
    target is replaced. A device, a pipe or ``/dev/stdout`` is yielded itself: a rename would replace it.
    """
    # A file to which the output is redirected has other output too.
    is_stream = str(path.absolute()).startswith(_STREAMS)
    if is_stream or (path.exists() and not path.is_file()):
        yield path
        return
    path = Path(os.path.realpath(path))
    # In the same directory, because a rename is atomic within one file system only. With the same suffix, by
    # which matplotlib and PyTorch's profiler choose a format.
    temporary = path.with_name(f"incomplete.{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in UTF-8; the file is complete or as it was before."""
    # A stream is not truncated.
    with complete_file(path) as opened, opened.open("a" if opened == path else "w", encoding="utf-8") as file:
        file.write(text)


def require_new(option: str, path: Path) -> None:
    """Raise ``ValueError`` if the file or directory that ``option`` names exists."""
    if path.exists():
        raise ValueError(f"{option} {path} exists already: choose another name, or remove it")
