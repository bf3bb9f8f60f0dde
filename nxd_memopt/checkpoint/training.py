"""Owns training checkpoints that resume exactly: one file per rank, a manifest, and the last complete ones kept."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_memopt import __version__
from nxd_memopt.checkpoint.directories import (
    flush_to_disk,
    remove_directory,
    replace_directory,
    restore_interrupted,
)
from nxd_memopt.checkpoint.files import read_json
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.checkpointing import read_tensors, to_host, write_tensors
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts

MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d{8,})")
_REPLACED_STEP = re.compile(r"\.step_(\d{8,})\.replaced")
_PLAIN = (bool, int, float, str, bytes, type(None))


def step_directory(directory: str | Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is, once complete."""
    return Path(directory) / f"step_{step:08d}"


def _rank_file(step_dir: Path) -> Path:
    return step_dir / f"rank_{parallel_state.get_global_rank():05d}.pt"


def require_writable(directory: str | Path) -> None:
    """Create ``directory`` and write into it from every rank; call it before training starts. Every rank calls.

    Raises:
        ValueError: on every rank, when one cannot.
    """
    probe = Path(directory) / f".writable_{parallel_state.get_global_rank()}"
    with raise_together(f"writing to {directory}"):
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"\0")
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"output directory {directory} is not writable: {error}: choose another or change its permissions"
            ) from error


def _complete_steps(directory: Path) -> dict[int, Path]:
    """Complete checkpoints by step, including one that a killed replacement of the same step left behind."""
    found: dict[int, Path] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        moved, renamed = _REPLACED_STEP.fullmatch(path.name), _STEP.fullmatch(path.name)
        match = renamed or moved
        if match and (path / MANIFEST).is_file() and (renamed or int(match[1]) not in found):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def find_latest(directory: str | Path) -> Path | None:
    """Return the last complete checkpoint as rank 0 sees it, or ``None``. Every rank calls."""
    latest = ""
    with raise_together(f"searching {directory}"):
        if parallel_state.is_global_rank_zero():
            latest = next((path.name for path in reversed(_complete_steps(Path(directory)).values())), "")
    latest = share_texts(latest)[0]
    return Path(directory) / latest if latest else None


def save_training_state(
    directory: str | Path, step: int, *, state: Mapping[str, Any], config: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write ``directory/step_XXXXXXXX`` with each rank's ``state`` and return its path. Every rank calls.

    Rank 0 writes the manifest last and renames the finished directory, then removes all but the newest ``keep``
    checkpoints: a kill at any moment leaves the last complete one. All ranks must see the same ``directory``.

    Args:
        directory: of the run; see ``require_writable``.
        step: optimizer steps done.
        state: this rank's nested dict of tensors, numbers and strings: parameters, optimizer, random states, position
            in the data.
        config: what a resumed run must have in common; compared by ``load_training_state``.
        keep: complete checkpoints to leave, this one included; at least 1.

    Raises:
        ValueError, OSError: on every rank, when one cannot write, or when ``directory`` has a later step.
    """
    parent = Path(directory)
    target, incomplete = step_directory(parent, step), parent / f"step_{step:08d}.tmp"
    task = f"saving {target}"
    with raise_together(task):
        require_plain(state, "state")
        if parallel_state.is_global_rank_zero():
            _require_valid(parent, step, keep)
            _clean(parent)
            incomplete.mkdir(parents=True)
    with raise_together(task):
        write_into(incomplete, _rank_file(incomplete).name, state)
    with raise_together(task):
        if parallel_state.is_global_rank_zero():
            write_manifest(incomplete, {"step": step, "config": _fingerprint(config)})
            replace_directory(incomplete, target)
            _prune(parent, keep)
    return target


def require_plain(value: Any, where: str) -> None:
    """Refuse what ``torch.load(weights_only=True)`` would not read back."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            require_plain(key, f"a key of {where}")
            require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            require_plain(item, f"{where}[{i}]")
    elif type(value) not in _PLAIN and not isinstance(value, Tensor):  # numpy.float64 is a float, but not plain
        raise ValueError(
            f"{where} has the type {type(value).__name__}: store tensors, numbers and strings in dicts and lists"
        )


def _require_valid(parent: Path, step: int, keep: int) -> None:
    if step < 0 or keep < 1:
        raise ValueError(f"step must be at least 0 and keep at least 1, got step {step} and keep {keep}")
    later = [other for other in _complete_steps(parent) if other > step]
    if later:
        raise ValueError(
            f"{parent} holds step {later[-1]}, later than step {step}: "
            "resume from it, delete it, or choose another directory"
        )


def _clean(parent: Path) -> None:
    """Remove what killed saves left behind."""
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.glob("step_*.tmp"):
        remove_directory(path)
    for path in parent.iterdir():
        match = _REPLACED_STEP.fullmatch(path.name)
        if match:
            restore_interrupted(step_directory(parent, int(match[1])))


def write_into(checkpoint: Path, name: str, state: Any) -> None:
    """Write plain ``state`` to the file ``name``, flushed, of a checkpoint whose directory rank 0 has created.

    Raises:
        ValueError: the directory is not visible here.
    """
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}, created by rank 0, is not visible here: use a directory that all hosts share")
    write_tensors(checkpoint / name, to_host(state))
    flush_to_disk(checkpoint / name)


def write_manifest(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Declare ``checkpoint`` complete; with ``content`` go the versions that wrote it and the order of KV replicas."""
    strides = {str(size): stride for size, stride in parallel_state.kv_rank_strides().items() if stride > 1}
    versions = {"nxd_memopt": __version__, "torch": torch.__version__}
    manifest = {**content, "kv_rank_strides": strides, "versions": versions}
    path = checkpoint / MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    flush_to_disk(path)
    flush_to_disk(checkpoint)


def require_kv_order(checkpoint: Path) -> None:
    """Raise ``ValueError`` where the rank files' KV heads and query heads belong to other ranks than the model's.

    A checkpoint without a manifest of ours is taken to be of this platform, as neuronx-distributed takes it.
    """
    path = checkpoint / MANIFEST
    saved = read_json(path).get("kv_rank_strides", {}) if path.is_file() else None
    for size, stride in parallel_state.kv_rank_strides().items():
        stored = stride if saved is None else saved.get(str(size), 1)
        if stored != stride:
            raise ValueError(
                f"{checkpoint} holds replicas of KV heads on ranks {stored} apart, this run has them {stride} apart "
                f"({size} replicas): continue on the platform that wrote it, or there write a Hugging Face directory "
                "with save_pretrained, which loads everywhere; consecutive ranks on any platform: call "
                f"parallel_state.initialize_kv_group({size}, sequential_ranks_in_group=True) before building the model"
            )


def _prune(parent: Path, keep: int) -> None:
    for path in list(_complete_steps(parent).values())[:-keep]:
        incomplete = path.with_name(f"{path.name}.tmp")  # no longer complete from the first removed file on
        path.rename(incomplete)
        remove_directory(incomplete)


def _fingerprint(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten ``config`` to dotted names and JSON values, and add the sizes of the run."""
    sizes = {
        "world_size": parallel_state.get_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_size(),
    }
    plain = json.loads(json.dumps(config, default=_to_plain))
    return {**_flatten(plain), **sizes}


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def load_training_state(directory: str | Path, *, config: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the step and this rank's state of the last complete checkpoint, on the host. Every rank calls.

    Raises:
        ValueError: on every rank, when there is none, a file is damaged, or ``config``, the world size or the
            tensor-parallel size differ from those of the run that wrote it; names every differing field.
    """
    latest = find_latest(directory)
    with raise_together(f"resuming from {directory}"):
        if latest is None:
            raise ValueError(f"{directory} has no complete checkpoint: start without resuming, or check the directory")
        with _remedy_for_damage(latest):
            manifest = _read_manifest(latest)
        _require_same_config(latest, manifest["config"], _fingerprint(config))
        require_kv_order(latest)
        with _remedy_for_damage(latest):
            return manifest["step"], read_tensors(_rank_file(latest), mmap=False)


@contextmanager
def _remedy_for_damage(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; or delete {checkpoint} to resume from the step before") from error


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    manifest = read_json(checkpoint / MANIFEST)
    if not isinstance(manifest.get("step"), int) or not isinstance(manifest.get("config"), dict):
        raise ValueError(f"{checkpoint / MANIFEST} has no step and config: copy it again")
    return manifest


def _require_same_config(checkpoint: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    differences = [
        f"{name} was {_spell(saved, name)} and is {_spell(current, name)}"
        for name in dict.fromkeys([*saved, *current])
        if name not in saved or name not in current or saved[name] != current[name]
    ]
    if differences:
        raise ValueError(
            f"{checkpoint} was written by another configuration: {'; '.join(differences)}: "
            "resume with the saved values, or start a new run in another directory"
        )


def _spell(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "absent"
