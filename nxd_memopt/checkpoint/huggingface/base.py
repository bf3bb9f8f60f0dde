"""Identifies the base of adapters (LoRA), a Hugging Face directory, by its weight files, and finds it again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nxd_memopt.checkpoint.files import find_gguf, find_weights, read_json, require_directory
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import from_rank_zero, raise_together

STORED = "base"
"""Name of the base that a run stores next to its checkpoints, where no other directory has it."""
_THREADS = 8


def describe_base(directory: Path, *, is_stored: bool) -> dict[str, Any]:
    """Return what a checkpoint records of its base, equal on every rank. Every rank calls.

    Rank 0 reads the weight files a second time and computes their SHA-256, which the Hugging Face hub shows too.

    Args:
        directory: the Hugging Face directory that the weights were loaded from.
        is_stored: whether it is ``STORED`` next to the checkpoints, and moves with them.
    """
    described: dict[str, Any] = {}
    with raise_together(f"reading the weights of {directory}"):
        if parallel_state.is_global_rank_zero():
            path = directory.resolve()
            files = _weight_files(path)
            digests = _digests(files)
            content = {file.name: [file.stat().st_size, digests[file.name]] for file in files}
            described = {"directory": str(path), "is_stored": is_stored, "files": content}
    return from_rank_zero(described)


def find_base(recorded: Mapping[str, Any], checkpoint: Path, directories: Sequence[str | Path]) -> Path:
    """Return the directory of a checkpoint's base, with equal weight files. Every rank calls.

    Args:
        recorded: what the checkpoint records (``describe_base``).
        checkpoint: directory of the checkpoint.
        directories: where the base may be; not used if it is stored next to the checkpoint.

    Raises:
        ValueError: on every rank, if none of the directories has the recorded files.
    """
    found = ""
    with raise_together(f"reading the base of the adapters in {checkpoint}"):
        if parallel_state.is_global_rank_zero():
            if recorded["is_stored"]:
                directories = [checkpoint.resolve().parent / STORED]
            found = str(_first_equal(recorded, checkpoint, directories))
    return Path(from_rank_zero(found))


def _first_equal(recorded: Mapping[str, Any], checkpoint: Path, directories: Sequence[str | Path]) -> Path:
    """Return the first of ``directories`` with the recorded weight files, as an absolute path."""
    differences = ["no directory is named"]
    for directory in dict.fromkeys(Path(each).resolve() for each in directories):
        differences.append(_difference(recorded["files"], directory))
        if not differences[-1]:
            return directory
    raise ValueError(
        f"{checkpoint} has adapters (LoRA) and not their base, whose weights were in {recorded['directory']}: "
        f"{'; '.join(differences[1:] or differences)}: name a copy of that directory"
    )


def _difference(recorded: Mapping[str, Sequence[Any]], directory: Path) -> str:
    """Return in which way the weight files of ``directory`` differ from the recorded ones; empty if they are equal."""
    try:
        files = _weight_files(directory)
    except ValueError as error:
        return str(error)
    sizes = {file.name: file.stat().st_size for file in files}
    expected = {name: size for name, (size, _) in recorded.items()}
    # Sizes first: they cost nothing, and models of other shapes differ in them.
    if sizes != expected:
        return f"{directory} has weight files of {sizes} bytes and not of {expected}"
    for name, digest in _digests(files).items():
        if digest != recorded[name][1]:
            return f"{directory / name} has SHA-256 {digest} and not {recorded[name][1]}"
    return ""


def _weight_files(directory: Path) -> list[Path]:
    """Return the files from which the weights of a Hugging Face directory are read."""
    found = find_gguf(require_directory(directory)) or find_weights(directory)
    if found is None:
        raise ValueError(f"{directory} holds no weights")
    if found.suffix != ".json":
        return [found]
    return [directory / name for name in sorted(set(read_json(found)["weight_map"].values()))]


def _digests(files: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file by its name."""

    # About 1.5 GB/s a file; hashlib releases the interpreter's lock, so files are read side by side.
    def digest(file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    with ThreadPoolExecutor(_THREADS) as threads:
        return {file.name: found for file, found in zip(files, threads.map(digest, files), strict=True)}
