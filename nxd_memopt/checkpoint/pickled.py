"""Tagged checkpoints: ``torch.save`` files and a manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_memopt.checkpoint.directories import flush_to_disk, write_text
from nxd_memopt.checkpoint.files import read_json
from nxd_memopt.checkpoint.sharded.index import versions
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.checkpointing import to_host, write_tensors
from nxd_memopt.parallel_layers.tensor_files import info_file, tensors_directory, write_xser

MANIFEST = "manifest.json"
# neuronx-distributed's marker files of a save that has begun, and of a complete save.
BEGUN = "checkpoint"
DONE = "done"


def write_flushed(path: Path, state: Any, *, use_xser: bool = False) -> None:
    """Write plain ``state`` to ``path`` and flush it to the disk.

    Args:
        path: the file; its directory is created if needed.
        state: nested containers, plain values and tensors.
        use_xser: write ``path`` with references, ``path.info.pt``, and one file per tensor in
            ``path.tensors``.
    """
    written = [path]
    if use_xser:
        write_xser(path, state, info=True)
        tensors = tensors_directory(path)
        # Flush the directory's entries too: a file without a directory entry is lost.
        written += [*tensors.iterdir(), tensors, info_file(path)]
    else:
        write_tensors(path, to_host(state))
    for each in (*written, path.parent):
        flush_to_disk(each)


def write_manifest(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Declare ``checkpoint`` complete by writing ``content``, the versions of the writer, and the
    order of KV replicas.
    """
    # Number of KV replicas -> distance in ranks between them. The entry for one replica keeps the
    # table from being empty; see ``require_kv_order``.
    strides = {"1": 1}
    for size, stride in parallel_state.kv_rank_strides().items():
        strides[str(size)] = stride
    manifest = {**content, "kv_rank_strides": strides, "versions": versions()}
    write_text(checkpoint / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def require_kv_order(checkpoint: Path) -> None:
    """Raise ``ValueError`` if the files' KV heads and query heads are ordered differently over
    ranks than the model's.

    A checkpoint without this library's manifest is assumed to have the order of this run's platform, as in
    neuronx-distributed.
    """
    path = checkpoint / MANIFEST
    if not path.is_file():
        return
    saved = read_json(path).get("kv_rank_strides", {})
    for size, stride in parallel_state.kv_rank_strides().items():
        # Versions that did not store a stride of 1 left the table empty: consecutive ranks. If a
        # filled table lacks ``size``, that run had another number of replicas; the check of the
        # shapes refuses it, so it is not refused here.
        default = stride if saved else 1
        stored = saved.get(str(size), default)
        if stored != stride:
            raise ValueError(
                f"{checkpoint} holds the {size} replicas of KV heads on ranks {stored} apart, this run has them "
                f"{stride} apart: continue on the platform that wrote it, or there write a Hugging Face directory "
                "with save_pretrained, which loads everywhere; or call parallel_state.initialize_kv_group with "
                "sequential_ranks_in_group=True before building the model on both"
            )
