"""Replaces a directory atomically: the previous one stays until its successor is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def incomplete_path(target: Path) -> Path:
    """Return the sibling in which the successor of ``target`` is written."""
    return target.with_name(f".{target.name}.incomplete")


def replaced_path(target: Path) -> Path:
    """Return the sibling in which the predecessor waits while its successor moves in."""
    return target.with_name(f".{target.name}.replaced")


def replace_directory(complete: Path, target: Path) -> None:
    """Rename ``complete`` to ``target`` and remove the directory that was there.

    Two renames, as no portable call swaps directories: a kill between them leaves the predecessor under
    ``replaced_path``, from where ``restore_interrupted`` brings it back.
    """
    if os.path.lexists(target):  # a link too, also one to nowhere
        target.rename(replaced_path(target))
    complete.rename(target)
    flush_to_disk(target.parent)
    remove_directory(replaced_path(target))


def restore_interrupted(target: Path) -> None:
    """Undo what a killed ``replace_directory`` left behind."""
    predecessor = replaced_path(target)
    if predecessor.exists() and not target.exists():
        predecessor.rename(target)
    remove_directory(predecessor)
    remove_directory(incomplete_path(target))


def remove_directory(path: Path) -> None:
    """Remove ``path`` with its content; of a symbolic link the link alone; nothing when it is absent."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def flush_to_disk(path: Path) -> None:
    """Have the file or directory survive a crash of the host."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def remedy_for_damage(checkpoint: Path) -> Iterator[None]:
    """Add to a ``ValueError`` about a damaged file how to go on without ``checkpoint``."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; or delete {checkpoint} to resume from the step before") from error
