"""Checkpoints of ``torch.save`` files with a manifest: tagged ones, and training checkpoints of version 1."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nxd_memopt.checkpoint.directories import flush_to_disk, remedy_for_damage
from nxd_memopt.checkpoint.files import read_json
from nxd_memopt.checkpoint.fingerprint import flat_config, parallel_sizes, require_same_config
from nxd_memopt.checkpoint.index import versions
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.checkpointing import read_tensors, to_host, write_tensors
from nxd_memopt.parallel_layers.tensor_files import info_file, tensors_directory, write_xser

MANIFEST = "manifest.json"
BEGUN, DONE = "checkpoint", "done"  # neuronx-distributed's markers of a save that began, and of a complete one
_SIZES = ("world_size", "tensor_model_parallel_size")  # that version 1 compared


def write_into(checkpoint: Path, name: str, state: Any, *, use_xser: bool = False) -> None:
    """``write_flushed`` to the file ``name`` of a checkpoint whose directory rank 0 has created.

    Raises:
        ValueError: the directory is not visible here.
    """
    require_visible(checkpoint)
    write_flushed(checkpoint / name, state, use_xser=use_xser)


def write_flushed(path: Path, state: Any, *, use_xser: bool = False) -> None:
    """Write plain ``state`` to ``path``, so that it survives a crash of the host.

    Args:
        path: of the file; its directory is created if needed.
        state: nested containers, plain values and tensors.
        use_xser: write ``path`` with references, ``path.info.pt``, and one file per tensor in ``path.tensors``.
    """
    written = [path]
    if use_xser:
        write_xser(path, state, info=True)
        tensors = tensors_directory(path)
        # The directory's own entries are flushed too: a file that the directory does not name is lost.
        written += [*tensors.iterdir(), tensors, info_file(path)]
    else:
        write_tensors(path, to_host(state))
    for each in (*written, path.parent):
        flush_to_disk(each)


def require_visible(checkpoint: Path) -> None:
    """Raise ``ValueError`` where the directory that rank 0 has created is not to be seen."""
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}, created by rank 0, is not visible here: use a directory that all hosts share")


def write_manifest(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Declare ``checkpoint`` complete; with ``content`` go the versions that wrote it and the order of KV replicas."""
    strides = {"1": 1, **{str(size): stride for size, stride in parallel_state.kv_rank_strides().items()}}
    manifest = {**content, "kv_rank_strides": strides, "versions": versions()}
    # Renamed when it is on the disk: a kill leaves the manifest complete or absent.
    incomplete = checkpoint / f".{MANIFEST}.incomplete"
    incomplete.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    flush_to_disk(incomplete)
    incomplete.replace(checkpoint / MANIFEST)
    flush_to_disk(checkpoint)


def require_kv_order(checkpoint: Path) -> None:
    """Raise ``ValueError`` where the rank files' KV heads and query heads belong to other ranks than the model's.

    A checkpoint without a manifest of ours is taken to be of this platform, as neuronx-distributed takes it.
    """
    path = checkpoint / MANIFEST
    saved = read_json(path).get("kv_rank_strides", {}) if path.is_file() else None
    for size, stride in parallel_state.kv_rank_strides().items():
        # Versions that stored no stride of 1 left the table empty. A count that a table lacks was another number of
        # replicas in that run, which is refused by its shapes.
        stored = saved.get(str(size), stride if saved else 1) if saved is not None else stride
        if stored != stride:
            raise ValueError(
                f"{checkpoint} holds replicas of KV heads on ranks {stored} apart, this run has them {stride} apart "
                f"({size} replicas): continue on the platform that wrote it, or there write a Hugging Face directory "
                "with save_pretrained, which loads everywhere; consecutive ranks on any platform: call "
                f"parallel_state.initialize_kv_group({size}, sequential_ranks_in_group=True) before building the model"
            )


def read_version_1(
    checkpoint: Path, config: Mapping[str, Any], not_compared: Collection[str]
) -> tuple[int, dict[str, Any]]:
    """Return step and this rank's nested state of a training checkpoint of version 1: one ``torch.save`` file a rank.

    Raises:
        ValueError: a file is damaged, or the configuration, the world size or T are not those of the run that wrote it.
    """
    with remedy_for_damage(checkpoint):
        manifest = read_json(checkpoint / MANIFEST)
        if not isinstance(manifest.get("step"), int) or not isinstance(manifest.get("config"), dict):
            raise ValueError(f"{checkpoint / MANIFEST} has no step and config: copy it again")
    sizes = parallel_sizes()
    current = flat_config(config) | {name: sizes[name] for name in _SIZES}
    ignored = set(not_compared) - set(_SIZES)
    require_same_config(checkpoint, manifest["config"], current, ignored)
    require_kv_order(checkpoint)
    rank_file = checkpoint / f"rank_{parallel_state.get_global_rank():05d}.pt"
    with remedy_for_damage(checkpoint):
        return manifest["step"], read_tensors(rank_file, mmap=False)
