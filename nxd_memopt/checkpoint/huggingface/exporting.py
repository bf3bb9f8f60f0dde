"""Writes a model as a Hugging Face directory that transformers loads."""

from __future__ import annotations

import copy
import math
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from nxd_memopt._optional import require_transformers
from nxd_memopt.architectures.model_spec import num_kv_heads
from nxd_memopt.backends import backend
from nxd_memopt.checkpoint.directories import copy_entry, incomplete_path, replace_directory, restore_interrupted
from nxd_memopt.checkpoint.files import group_by_size, is_own, write_index, write_safetensors
from nxd_memopt.checkpoint.full_tensors import FullTensors, is_writer
from nxd_memopt.checkpoint.huggingface.companions import TEMPLATES, copy_companions, is_companion
from nxd_memopt.checkpoint.huggingface.experts import split_experts, stored_names
from nxd_memopt.checkpoint.huggingface.fused_layers import fuse_layers, fused_parameter
from nxd_memopt.checkpoint.layout import require_groups_of
from nxd_memopt.checkpoint.names import named_tensors
from nxd_memopt.modules.lora import is_adapter, merged_adapters
from nxd_memopt.modules.moe.hf_options import require_exportable
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.data_shards import model_dtype
from nxd_memopt.parallel_layers.resharding import full_shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_SHARD_SIZE_BYTES = 5 * 2**30
_WEIGHT_FILE = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")

Shards = dict[str, dict[str, Tensor]]
"""Parameters by file name and stored name."""


def save_pretrained(
    model: torch.nn.Module,
    directory: str | Path,
    *,
    max_shard_size_bytes: int = MAX_SHARD_SIZE_BYTES,
    dtype: torch.dtype | None = None,
    companions: str | Path | None = None,
    merges_adapters: bool = True,
    read: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Write ``model`` as safetensors with its config, for
    ``AutoModelForCausalLM.from_pretrained``.

    Every rank calls.

    The first data-parallel replica gathers the parameters of one file at a time on its first
    rank, which writes them, whichever stage of a pipeline has them. The host of this rank needs
    ``max_shard_size_bytes`` of memory; each device of
    the replica needs one full parameter. The files are written next to ``directory`` and renamed
    when complete. An earlier export in ``directory`` is replaced at this point; other files in it
    (a tokenizer) stay. Adapters (LoRA) are merged into the weights of the files.

    Args:
        model: a model with ``config`` and, optionally, ``generation_config``.
        directory: must be absent, empty, or an export of this program (see
            ``require_replaceable``) without subdirectories.
        max_shard_size_bytes: upper bound of a file in bytes, unless a single parameter is larger.
        dtype: dtype of the floating-point weights on disk; default: the dtypes of the parameters.
        companions: directory whose tokenizer, chat template and ``generation_config.json`` the
            export gets, in the same rename as the weights; if it has any, none of an earlier
            export remains. Read by the writing rank.
        merges_adapters: add the adapters (LoRA) to the weights; False writes the base model.
        read: returns the full tensor of a parameter, of a model on the meta device; default gathers the parameter.

    Raises:
        ValueError, OSError: on every rank, if the writing rank fails; an earlier export is left
            unchanged.
        ImportError: on the writing rank, if transformers, which writes the config, is missing or
            too old; all other ranks raise ``ValueError``.
    """
    backend.mark_step()  # torch_xla may return wrong values when pending results are read one by one
    target = Path(directory).resolve()
    task = f"exporting to {target}"
    writes = is_writer()
    full = FullTensors(model)
    with raise_together(task):
        require_exportable(full.model)
        shards = plan_shards(full.model, max_shard_size_bytes, dtype)
        if writes:
            require_transformers("nxd_memopt.checkpoint.save_pretrained")  # before anything is gathered or written
            _prepare(target, _total_bytes(shards, dtype))
    try:
        # One file at a time bounds the host memory of the writing rank. The gathers are outside
        # of ``raise_together``: the error of one rank inside of it would leave the other ranks
        # waiting in a collective.
        with merged_adapters(model) if merges_adapters and read is None else nullcontext():
            for file_name, params in shards.items():
                tensors = _gather(full, params, dtype, read)
                with raise_together(task):
                    if writes:
                        write_safetensors(incomplete_path(target) / file_name, tensors)
        with raise_together(task):
            if writes:
                _write_remaining(full.model, target, shards, dtype)
                _replace(target, companions)
    finally:
        if writes:
            shutil.rmtree(incomplete_path(target), ignore_errors=True)


def plan_shards(model: torch.nn.Module, max_shard_size_bytes: int, dtype: torch.dtype | None) -> Shards:
    """Assign the model's tensors to files, in order. The result is the same on every rank.

    Raises:
        ValueError: see ``layout.require_groups_of``.
    """
    tensors: dict[str, Tensor] = {}
    for entry in named_tensors(model):
        # The caller has merged adapters into the weights, which have transformers' names.
        if not is_adapter(entry.names[0]):
            require_groups_of(entry.tensor)
            tensors[_stored_name(model, entry.names[0])] = entry.tensor
    # The parts of a fused weight are in one file.
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(fused_parameter(model, name), {})[name] = tensor
    sizes = {name: sum(_full_bytes(tensor, dtype) for tensor in each.values()) for name, each in parts.items()}
    shards: Shards = {}
    for file_name, names in group_by_size(sizes, max_shard_size_bytes).items():
        shards[file_name] = {part: tensor for name in names for part, tensor in parts[name].items()}
    return shards


def _stored_name(model: torch.nn.Module, name: str) -> str:
    """Return the name on disk.

    GPT-NeoX's output head is ``embed_out``, which every version of transformers reads.
    """
    config = getattr(model, "config", None)
    if name == "lm_head.weight" and getattr(config, "model_type", "") == "gpt_neox":
        return "embed_out.weight"
    return name


def _stored_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype on disk: ``dtype`` for floating-point tensors, else the dtype of
    ``tensor``.
    """
    if dtype is not None and tensor.is_floating_point():
        return dtype
    return model_dtype(tensor)


def _full_bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    """Return the bytes of the full tensor on disk."""
    return math.prod(full_shape(tensor)) * _stored_dtype(tensor, dtype).itemsize


def _total_bytes(shards: Shards, dtype: torch.dtype | None) -> int:
    return sum(_full_bytes(tensor, dtype) for params in shards.values() for tensor in params.values())


def _gather(
    full: FullTensors,
    params: dict[str, Tensor],
    dtype: torch.dtype | None,
    read: Callable[[Tensor], Tensor] | None,
) -> dict[str, Tensor]:
    """Return the full tensors, as files have them, on the writer, and nothing on all other ranks."""
    names = {id(entry.tensor): entry.names[0] for entry in named_tensors(full.model)}
    full_tensors: dict[str, Tensor] = {}
    for name, param in params.items():
        stored_dtype = _stored_dtype(param, dtype)
        if read is not None:
            tensor = read(param).to(stored_dtype)
        else:
            tensor = full.gather(names[id(param)], param, stored_dtype)
        if tensor is not None:
            full_tensors |= split_experts(full.model, name, tensor)
    return fuse_layers(full.model, full_tensors)


def _prepare(target: Path, total_bytes: int) -> None:
    """Check that ``target`` can be replaced and has enough space, and create the directory to
    write into.
    """
    restore_interrupted(target)
    require_replaceable(target)
    incomplete_path(target).mkdir(parents=True)
    # Fail before the gathers, not when the disk is full.
    free_bytes = shutil.disk_usage(incomplete_path(target)).free
    if free_bytes < total_bytes:
        shutil.rmtree(incomplete_path(target))
        raise ValueError(
            f"the export needs {total_bytes} bytes but {target.parent} has {free_bytes} left: "
            "free disk space, choose another directory or a smaller dtype"
        )


def require_replaceable(target: Path, weights: re.Pattern[str] = _WEIGHT_FILE) -> None:
    """Raise ``ValueError`` unless ``target`` is absent, empty, or has weights of this program and no subdirectories.

    A safetensors file names in its metadata the program that wrote it, so files that another program has
    put into an export's directory count as that program's.

    Args:
        target: directory to replace.
        weights: matches the names of the weight files, of which there must be at least one. All other
            files stay.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file: pass a directory")
    # The directory is replaced by a new one. Refuse anything that the user could lose.
    content = list(target.iterdir())
    found = [path for path in content if weights.fullmatch(path.name) and path.suffix != ".json"]
    foreign = [path.name for path in found if not is_own(path)]
    if content and (foreign or not found):
        reason = f"{foreign[0]} has no mark of nxd_memopt" if foreign else "it has no weight files"
        raise ValueError(
            f"{target} is neither empty nor an export of nxd_memopt: {reason}: choose another directory, or move this "
            "one away"
        )
    subdirectories = [path.name for path in content if path.is_dir() and path.name != TEMPLATES]
    if subdirectories:
        raise ValueError(
            f"{target} has the subdirectories {subdirectories[:5]}, which replacing it would remove: "
            "choose another directory"
        )


def _write_remaining(model: torch.nn.Module, target: Path, shards: Shards, dtype: torch.dtype | None) -> None:
    """Write the index and the config."""
    incomplete = incomplete_path(target)
    weight_map: dict[str, str] = {}
    for file_name, params in shards.items():
        for name, param in params.items():
            weight_map |= dict.fromkeys(stored_names(model, fused_parameter(model, name), param), file_name)
    write_index(incomplete, weight_map, _total_bytes(shards, dtype))
    write_config(model, incomplete, dtype)


def _replace(target: Path, companions: str | Path | None) -> None:
    """Add the files that are no weights, and rename the new directory to ``target``."""
    incomplete = incomplete_path(target)
    has_own = companions is not None and copy_companions(Path(companions), incomplete)
    # Files of the previous export that this one does not write are copied before the rename: the
    # new directory is complete from its first moment.
    copy_other_files(target, incomplete, companions=not has_own)
    replace_directory(incomplete, target)


def write_config(model: torch.nn.Module, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write ``config.json`` with the stored dtype, by default the model's, and ``generation_config.json`` if the model
    has one.
    """
    # Transformers reads dtype and architectures from the config; the model's own config stays
    # unchanged.
    config = copy.deepcopy(cast("PretrainedConfig", model.config))
    config.dtype = dtype or model_dtype(next(iter(named_tensors(model))).tensor)
    # Megatron's name of the number of KV heads, which transformers does not read.
    if getattr(config, "num_query_groups", None):
        config.num_key_value_heads = num_kv_heads(config)
    config.architectures = config.architectures or [_class_name(model)]
    config.save_pretrained(directory)
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.save_pretrained(directory)


def _class_name(model: torch.nn.Module) -> str:
    """Return the name of the model's class, without the class that FSDP2 puts in front of it."""
    # The method resolution order is FSDP<Name>(FSDPModule, <Name>), FSDPModule, <Name>, ...
    for each in type(model).__mro__:
        names = [each.__name__, *(base.__name__ for base in each.__bases__)]
        if "FSDPModule" not in names:
            return each.__name__
    raise AssertionError("a model is a torch.nn.Module")


def copy_other_files(source: Path, directory: Path, *, companions: bool = True) -> None:
    """Copy the files that an export does not write.

    Args:
        source: the earlier export.
        directory: the new one.
        companions: copy the tokenizer, chat template and generation config too. False where the
            new export has its own: a template or vocabulary of the old one must not remain.
    """
    if not source.exists():
        return
    for path in source.iterdir():
        # Old weight files are left out under any name: an export to several files may replace one
        # to a single file, and transformers would prefer the single file.
        is_kept = companions or not is_companion(path)
        if is_kept and not _WEIGHT_FILE.fullmatch(path.name) and not (directory / path.name).exists():
            copy_entry(path, directory / path.name)
