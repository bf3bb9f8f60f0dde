"""Replaces a directory atomically: the previous one stays until its successor is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def incomplete_path(target: Path) -> Path:
    """Return the sibling directory in which a new version of ``target`` is written."""
    return target.with_name(f".{target.name}.incomplete")


def replaced_path(target: Path) -> Path:
    """Return the sibling path of the previous version while the new version is renamed."""
    return target.with_name(f".{target.name}.replaced")


def replace_directory(complete: Path, target: Path) -> None:
    """Rename ``complete`` to ``target`` and remove the previous directory.

    It takes two renames, because no portable call swaps directories. A kill between the two
    leaves the previous version at ``replaced_path``; ``restore_interrupted`` renames it back.
    """
    if os.path.lexists(target):  # also true for a dangling symbolic link
        target.rename(replaced_path(target))
    complete.rename(target)
    # The renames are on the disk before the previous version is removed: otherwise a crash of the
    # host could leave neither version.
    flush_to_disk(target.parent)
    remove_directory(replaced_path(target))


def restore_interrupted(target: Path) -> None:
    """Undo an interrupted ``replace_directory``."""
    # If the new version is in place, only the removal of the previous one was interrupted.
    predecessor = replaced_path(target)
    if predecessor.exists() and not target.exists():
        predecessor.rename(target)
    remove_directory(predecessor)
    remove_directory(incomplete_path(target))


def remove_directory(path: Path) -> None:
    """Remove ``path`` and its content.

    Remove only the link of a symbolic link. Do nothing if ``path`` is absent.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def copy_entry(source: Path, target: Path) -> None:
    """Copy a file, or a directory with its content."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


@contextmanager
def new_version(target: Path) -> Iterator[Path]:
    """Yield a new directory, which replaces ``target`` when the block ends without an error.

    The directory is removed after an error, and ``target`` stays as it was.
    """
    incomplete = incomplete_path(target)
    try:
        incomplete.mkdir(parents=True)
        yield incomplete
        replace_directory(incomplete, target)
    finally:
        remove_directory(incomplete)


def write_text(path: Path, text: str) -> None:
    """Write ``path``, which is complete or absent, also after a crash of the host."""
    # Flush before the rename, and the directory after it: otherwise a crash could leave an empty
    # file under the final name.
    incomplete = path.with_name(f"{path.name}.incomplete")
    incomplete.write_text(text, encoding="utf-8")
    flush_to_disk(incomplete)
    incomplete.replace(path)
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Flush a file or directory to the disk (fsync), so that it survives a crash of the host."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def remedy_for_damage(checkpoint: Path) -> Iterator[None]:
    """Add to a ``ValueError`` about a damaged file the advice to delete ``checkpoint``."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; or delete {checkpoint} to resume from the step before") from error


def require_visible(checkpoint: Path) -> None:
    """Raise ``ValueError`` if the directory that rank 0 has created is not visible on this host."""
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}, created by rank 0, is not visible here: use a directory that all hosts share")
