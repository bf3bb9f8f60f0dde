"""Finds and removes complete checkpoints under tags: this library's, with a manifest, and
neuronx-distributed's.

This library's directories appear under their final name when they are complete; ``manifest.json``
counts the saves. neuronx-distributed writes the file ``checkpoint`` into the directory of a tag
first and ``done`` last. Directories of this library have all three files.
"""

from __future__ import annotations

import heapq
import re
import warnings
from pathlib import Path
from typing import Any

from nxd_memopt.checkpoint.directories import flush_to_disk, incomplete_path, remove_directory
from nxd_memopt.checkpoint.files import read_json
from nxd_memopt.checkpoint.pickled import BEGUN, DONE, MANIFEST
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts

_REPLACED = re.compile(r"\.(.+)\.replaced")
_INCOMPLETE = re.compile(r"\.(.+)\.incomplete")


def local_directory(path: str | Path) -> Path:
    """Return ``path`` as the directory of all tags.

    Raises:
        ValueError: ``path`` is a URL, such as ``s3://bucket/run``, which would become a directory called ``s3:``.
    """
    if "://" in str(path):
        raise ValueError(
            f"checkpoints are in directories, got {path}: use a directory, of a mounted bucket or copied to one"
        )
    return Path(path)


def tag_directory(directory: Path, tag: str) -> Path:
    """Return the directory of the checkpoint of ``tag``.

    Raises:
        ValueError: ``tag`` is not a valid directory name.
    """
    # A number, such as the step, is a valid tag. A leading dot marks incomplete and replaced
    # directories, see ``directories``.
    name = str(tag)
    if not name or Path(name).name != name or name.startswith("."):
        raise ValueError(f"tag {tag!r} must be a directory's name, without a separator or a leading dot")
    return directory / name


def require_replaceable_tag(target: Path) -> None:
    """Raise ``ValueError`` if ``target`` exists, is not empty, and is no checkpoint, complete or not."""
    is_checkpoint = any((target / name).is_file() for name in (BEGUN, DONE, MANIFEST))
    if target.is_file() or (_entries(target) and not is_checkpoint):
        raise ValueError(f"{target} exists and is no checkpoint, and a save of this tag would replace it: rename it")


def begin_writing(incomplete: Path) -> None:
    """Create the directory to write a tag into, and remove what earlier saves have left incomplete.

    One program at a time saves to a directory of tags: a save of another one that is running loses
    its directory, and fails. Rank 0 calls.
    """
    for path in _entries(incomplete.parent):
        # The marker tells them from directories that another program has named so.
        if _INCOMPLETE.fullmatch(path.name) and (path / BEGUN).is_file() and not path.is_symlink():
            remove_directory(path)
    incomplete.mkdir(parents=True)
    (incomplete / BEGUN).write_text("1")


def end_writing(incomplete: Path) -> None:
    """Mark the checkpoint complete for neuronx-distributed."""
    (incomplete / DONE).write_text("1")
    flush_to_disk(incomplete / DONE)


def _entries(directory: Path) -> list[Path]:
    """Return the entries of ``directory``; none if it does not exist."""
    if not directory.is_dir():
        return []
    return list(directory.iterdir())


def complete_tags(directory: Path) -> dict[str, Path]:
    """Return the complete checkpoints by tag, oldest first.

    If a replacement was interrupted, the previous checkpoint of the tag is returned.
    """
    numbers = saved_numbers(directory)
    # Previous versions, whose names begin with a dot, come first: a new one that is in place takes
    # the entry of its predecessor.
    tags: dict[str, Path] = {}
    for path in sorted(numbers, key=lambda path: not path.name.startswith(".")):
        match = _REPLACED.fullmatch(path.name)
        tags[match[1] if match else path.name] = path
    # Own checkpoints are ordered by their number, neuronx-distributed's by file time.
    own = sorted(tags.items(), key=lambda item: numbers[item[1]])
    nxd = [(path.name, path) for path in _entries(directory) if _is_neuronx_distributed(path)]
    nxd.sort(key=lambda item: _written_ns(item[1]))
    # Each list keeps its order, also if files were copied and have new times. Only the order
    # between the two lists depends on file times.
    return dict(heapq.merge(own, nxd, key=lambda item: _written_ns(item[1])))


def saved_numbers(directory: Path) -> dict[Path, int]:
    """Return the save number by directory, for checkpoints with a manifest of this library.

    Incomplete saves, whose names start with a dot, and unreadable manifests are left out: the
    directory may contain files of other programs.
    """
    numbers: dict[Path, int] = {}
    for path in _entries(directory):
        # Under its final name, or a previous version in a replacement.
        if not path.name.startswith(".") or _REPLACED.fullmatch(path.name):
            manifest = _read_manifest(path)
            if "number" in manifest:
                numbers[path] = manifest["number"]
    return numbers


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; empty if there is none or it cannot be read."""
    if not (path / MANIFEST).is_file():
        return {}
    try:
        return read_json(path / MANIFEST)
    except ValueError:
        return {}


def _is_neuronx_distributed(path: Path) -> bool:
    """Return whether ``path`` is a complete checkpoint of neuronx-distributed."""
    has_manifest = (path / MANIFEST).exists()
    return (path / DONE).is_file() and not has_manifest and not path.name.startswith(".")


def _written_ns(path: Path) -> int:
    """Return the time at which the checkpoint was completed, in nanoseconds."""
    # The marker is written last, so its time is that of the completed save.
    marker = next(path / name for name in (DONE, MANIFEST) if (path / name).is_file())
    return marker.stat().st_mtime_ns


def prune_tags(directory: Path, num_kept_ckpts: int | None) -> None:
    """Remove all but the newest ``num_kept_ckpts`` complete checkpoints; None and -1 keep all."""
    if num_kept_ckpts not in (None, -1):
        remove_directories(list(complete_tags(directory).values())[:-num_kept_ckpts])


def remove_directories(checkpoints: list[Path]) -> None:
    """Remove complete checkpoints; one that is partly removed at a kill does not count as one."""
    for path in checkpoints:
        # Under its new name the checkpoint is incomplete, and after a kill the next save removes it.
        removed = incomplete_path(path)
        path.rename(removed)
        remove_directory(removed)


def find_tag(directory: Path, tag: str | None) -> Path:
    """Return the directory of the checkpoint of ``tag``, by default of the newest one.

    Rank 0 looks for it and tells the other ranks; every rank calls. After an interrupted
    replacement the directory is the previous version's, ``.TAG.replaced``.

    A directory of rank files without any marker, as NxD's converter writes it, can be loaded by
    its tag.

    Raises:
        ValueError: on every rank, if there is no such checkpoint, or its save was interrupted.
    """
    found = ""
    with raise_together(f"searching {directory}"):
        if parallel_state.is_global_rank_zero():
            found = _find(directory, tag)
    return directory / share_texts(found)[0]


def _find(directory: Path, tag: str | None) -> str:
    """Return the directory name of the checkpoint to load."""
    complete = complete_tags(directory)
    if tag is not None:
        wanted = str(tag)
    else:
        wanted = next(reversed(complete), "")
        _warn_of_unreadable(directory)
    if wanted in complete:
        return complete[wanted].name
    # Not a complete checkpoint by its markers. Without any marker it can still be the output of
    # NxD's converter: a ``model`` directory of rank files.
    unmarked = directory / wanted
    if wanted and (unmarked / MANIFEST).is_file():
        read_json(unmarked / MANIFEST)  # raises for a manifest that is damaged or not a JSON object
    if wanted and (unmarked / "model").is_dir() and not (unmarked / BEGUN).exists():
        return wanted
    missing = "no complete checkpoint" if tag is None else f"no complete checkpoint {wanted!r}"
    # An interrupted save has the marker of its beginning.
    if wanted and (unmarked / BEGUN).is_file():
        missing += f" ({unmarked / DONE} is missing: its save was interrupted)"
    raise ValueError(f"{directory} has {missing}, only {list(complete)}: check the directory and the tag")


def _warn_of_unreadable(directory: Path) -> None:
    """Warn about tags whose manifests are damaged: one of them could be the newest checkpoint."""
    for path in sorted(_entries(directory)):
        if path.name.startswith("."):
            continue
        # Both files: a manifest alone may belong to another program.
        if (path / BEGUN).is_file() and (path / MANIFEST).is_file():
            try:
                read_json(path / MANIFEST)
            except ValueError as error:
                warnings.warn(f"{path} is taken for an incomplete checkpoint: {error}", stacklevel=2)
