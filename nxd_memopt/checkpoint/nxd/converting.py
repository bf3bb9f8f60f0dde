"""Converts neuronx-distributed's checkpoints to Hugging Face directories and back, and loads them into models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nxd_memopt.checkpoint.directories import new_version, restore_interrupted
from nxd_memopt.checkpoint.files import group_by_size, read_json, require_directory, write_index, write_safetensors
from nxd_memopt.checkpoint.files import open_weights as open_hugging_face
from nxd_memopt.checkpoint.huggingface.companions import copy_companions
from nxd_memopt.checkpoint.huggingface.exporting import copy_other_files, require_replaceable
from nxd_memopt.checkpoint.huggingface.importing import load_sources
from nxd_memopt.checkpoint.nxd.parts import KVOrder
from nxd_memopt.checkpoint.nxd.reading import LazyFullTensor, as_hugging_face, open_weights
from nxd_memopt.checkpoint.nxd.writing import Target, write_weights
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.tensor_files import resolve

MAX_SHARD_SIZE_BYTES = 5 * 2**30


def load_nxd(
    model: torch.nn.Module,
    directory: str | Path,
    *,
    kv_order: KVOrder | None = None,
    query_key_value_stride: int = 1,
    accept_drift: bool = False,
) -> list[str]:
    """Load ``model`` from neuronx-distributed's rank files of any T and any number of stages.

    Every rank calls.

    Each rank reads the shards that contain its own slices, one full parameter at a time on the
    host. Replicated values (norms, biases, replicated KV heads) are read twice: they are compared
    before any parameter changes.

    Args:
        model: ``LlamaForCausalLM`` or ``GPTNeoXForCausalLM`` of this library, at any T.
        directory: a tag of ``nxd.save_checkpoint``, or the directory with the rank files.
        kv_order: order of KV replicas; None finds it by comparing the replicas.
        query_key_value_stride: GPT-NeoX: 3 if ``query_key_value`` was sharded with the sample's
            ``stride=3``.
        accept_drift: where norms and row-parallel biases differ between ranks, use rank 0's
            values and warn for each. GPT-NeoX's sample makes them differ, because it never sums
            their gradients. Without this option a difference is an error.

    Returns:
        A line for each entry of the files that is not a weight of the model.

    Raises:
        ValueError: on every rank, before any parameter changes, if files are missing, damaged, or
            do not fit.
    """
    config = plain_config(model)
    with raise_together(f"loading {directory}"):
        weights = open_weights(
            directory,
            config,
            kv_order=kv_order,
            query_key_value_stride=query_key_value_stride,
            accept_drift=accept_drift,
        )
        full_tensors, report = as_hugging_face(weights, config)
        for tensor in full_tensors.values():
            tensor.check()
    # Parameters change only after every rank has checked the files.
    with raise_together(f"loading {directory}"):
        load_sources(model, dict(full_tensors), Path(directory))
    return report


def plain_config(model: torch.nn.Module) -> dict[str, Any]:
    """Return the content of the model's ``config.json``, with Megatron's ``num_query_groups`` as
    ``num_key_value_heads``.
    """
    config: Any = model.config
    plain = config.to_dict()
    groups = getattr(config, "num_query_groups", None)
    if groups:
        return {**plain, "num_key_value_heads": groups}
    return plain


def from_nxd(
    source: str | Path,
    target: str | Path,
    *,
    config: str | Path,
    kv_order: KVOrder | None = None,
    query_key_value_stride: int = 1,
    accept_drift: bool = False,
    tensor_model_parallel_size: int | None = None,
    max_shard_size_bytes: int = MAX_SHARD_SIZE_BYTES,
    progress: Callable[[str], None] = print,
) -> None:
    """Write the weights of neuronx-distributed's checkpoint ``source`` as the Hugging Face
    directory ``target``.

    Args:
        source: a tag of ``nxd.save_checkpoint``, its ``model``, or the ``output_dir`` of
            ``checkpointing.save``.
        target: directory to write; an earlier export is replaced when the new one is complete.
        config: the model's Hugging Face ``config.json``, which is not part of the rank files.
        kv_order: order of KV replicas; None finds it by comparing the replicas.
        query_key_value_stride: GPT-NeoX: 3 if ``query_key_value`` was sharded with the sample's
            ``stride=3``.
        accept_drift: where norms and row-parallel biases differ between ranks, use rank 0's
            values and warn for each. GPT-NeoX's sample makes them differ, because it never sums
            their gradients. Without this option a difference is an error.
        tensor_model_parallel_size: expected T of the files; None accepts any.
        max_shard_size_bytes: upper bound of a file in bytes, unless a single parameter is larger.
        progress: receives a line for each file, and for each entry of the source that is not a
            weight.

    Raises:
        ValueError: files are missing or damaged, or do not fit the config.
    """
    content = read_json(Path(config))
    path = Path(target).resolve()
    weights = open_weights(
        source,
        content,
        kv_order=kv_order,
        query_key_value_stride=query_key_value_stride,
        accept_drift=accept_drift,
        tensor_model_parallel_size=tensor_model_parallel_size,
    )
    full_tensors, report = as_hugging_face(weights, content)
    restore_interrupted(path)
    require_replaceable(path)
    # Written next to the target and renamed at the end: a failure leaves an earlier export intact.
    with new_version(path) as incomplete:
        for line in (f"{weights.directory}: {weights.describe()}", *report):
            progress(line)
        _write_shards(full_tensors, incomplete, max_shard_size_bytes, progress)
        (incomplete / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        # The directory of config.json is the model's, and its tokenizer belongs to these weights.
        has_own = copy_companions(Path(config).parent, incomplete)
        copy_other_files(path, incomplete, companions=not has_own)


def _write_shards(
    full_tensors: Mapping[str, LazyFullTensor],
    directory: Path,
    max_shard_size_bytes: int,
    progress: Callable[[str], None],
) -> None:
    """Write the full tensors as safetensors files of bounded size, and an index if there are
    several.
    """
    # Assign names to files by size first; each tensor is read only when its file is written.
    sizes = {name: _size_bytes(tensor) for name, tensor in full_tensors.items()}
    groups = group_by_size(sizes, max_shard_size_bytes)
    weight_map: dict[str, str] = {}
    for file_name, names in groups.items():
        # The host stores the full tensors of one file at a time: no name may refer to them while
        # those of the next file are read.
        write_safetensors(directory / file_name, {name: full_tensors[name].full() for name in names})
        weight_map.update(dict.fromkeys(names, file_name))
        progress(f"{file_name} (of {len(groups)} files)")
    write_index(directory, weight_map, sum(sizes.values()))


def _size_bytes(tensor: LazyFullTensor) -> int:
    """Return the bytes of a full tensor."""
    return math.prod(tensor.get_shape()) * resolve(tensor.shards[0]).element_size()


def to_nxd(source: str | Path, target: str | Path, options: Target, progress: Callable[[str], None] = print) -> None:
    """Write the Hugging Face directory ``source`` as neuronx-distributed's checkpoint ``target``.

    ``config.json`` is not part of this checkpoint: neuronx-distributed's samples read it from a
    separate directory.

    Args:
        source: directory with ``config.json`` and safetensors or ``.bin`` files.
        target: directory of the tag; see ``writing.write_weights``.
        options: layout and form of the files.
        progress: receives a line for each file.

    Raises:
        ValueError: the source is incomplete, or its sizes do not fit ``options``.
    """
    directory = require_directory(source)
    config = read_json(directory / "config.json")
    with open_hugging_face(directory) as sources:
        write_weights(sources, config, target, options, progress)
