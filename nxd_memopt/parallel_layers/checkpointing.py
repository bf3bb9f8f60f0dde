"""Owns the way between a full tensor and its shards, and neuronx-distributed's sharded save and load."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.mappings import resolve_group
from nxd_memopt.parallel_layers.output_projection import describe_output_projections
from nxd_memopt.parallel_layers.rank_order import rank_at_position
from nxd_memopt.parallel_layers.utils import is_sharded, map_tensors, shard_ranges


class LazySlice(Protocol):
    """A tensor on disk, read by slice: what ``safetensors.safe_open(...).get_slice(name)`` returns."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


# Slices of one tensor


def full_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole, unpadded tensor of which ``param`` is this rank's shard."""
    shape = list(getattr(param, "full_shape", None) or param.shape)
    if is_sharded(param) and getattr(param, "full_shape", None) is None:  # described without a full shape: no padding
        shape[_partition_dim(param)] *= cast(Any, param).num_partitions
    return tuple(shape)


def _partition_dim(param: Tensor) -> int:
    return cast(Any, param).partition_dim % param.dim()


def stored_shape(source: Tensor | LazySlice) -> tuple[int, ...]:
    """Return the shape of a tensor in memory or on disk."""
    return tuple(source.shape if isinstance(source, Tensor) else source.get_shape())


def require_full_shape(name: str, source: Tensor | LazySlice, param: Tensor) -> None:
    """Raise ``ValueError`` when ``source`` cannot be the full tensor of the parameter ``name``."""
    stored, expected = stored_shape(source), full_shape(param)
    if stored != expected:
        raise ValueError(
            f"{name} has shape {list(stored)} in the checkpoint but {list(expected)} in the model: "
            "build the model from the checkpoint's own config, or load a checkpoint of this size"
        )


def local_slice(source: Tensor | LazySlice, param: Tensor) -> Tensor:
    """Cut this rank's shard of ``param`` out of the full tensor ``source``, on the host, in ``param``'s dtype.

    Reads nothing else of ``source``. Padding behind the full tensor's end becomes zeros.
    """
    if not is_sharded(param):
        return source[...].to(device="cpu", dtype=param.dtype, copy=True)
    dim = _partition_dim(param)
    length = full_shape(param)[dim]
    local = torch.zeros(param.shape, dtype=param.dtype, device="cpu")
    offset = 0
    for start, stop in shard_ranges(param):
        end = min(stop, length)
        if start < end:
            index = (*[slice(None)] * dim, slice(start, end))
            local.narrow(dim, offset, end - start).copy_(source[index])
        offset += stop - start
    return local


def gather_full_tensor(param: Tensor, *, dtype: torch.dtype | None = None) -> Tensor | None:
    """Put the shards of ``param`` together, without padding, on the host of tensor-parallel rank 0; ``None`` elsewhere.

    All ranks of the tensor-parallel group call. Costs one full tensor on each device while it runs.

    Args:
        param: this rank's shard.
        dtype: dtype of the result, cast before the gather; default: the parameter's own.
    """
    if not is_sharded(param):
        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        return param.detach().to(dtype or param.dtype).cpu().contiguous() if is_first else None
    with backend.outside_step():
        local = param.detach().to(dtype or param.dtype).contiguous()
        stacked = backend.all_gather(local, resolve_group(None))  # [T * n, ...]
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return None
    return _join_shards(stacked.cpu(), param)


def _join_shards(stacked: Tensor, param: Tensor) -> Tensor:
    """Undo ``local_slice``: ``stacked`` holds the shards of ranks 0 to T-1 along dim 0."""
    dim, description = _partition_dim(param), cast(Any, param)
    shape = list(param.shape)
    blocks = getattr(param, "blocks", None)
    shape[dim] = sum(b.full_rows for b in blocks) if blocks else shape[dim] * description.num_partitions
    full = stacked.new_empty(shape)
    shards = stacked.unflatten(0, (-1, param.shape[0]))  # [T, n, ...]
    for partition in range(description.num_partitions):
        rank = rank_at_position(partition * description.replicas, len(shards), description.rank_stride)
        offset = 0
        for start, stop in shard_ranges(param, rank=rank):
            full.narrow(dim, start, stop - start).copy_(shards[rank].narrow(dim, offset, stop - start))
            offset += stop - start
    return full.narrow(dim, 0, full_shape(param)[dim]).contiguous()


def get_sharded_model_dict(model: torch.nn.Module, model_state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Slice a full state dict into this rank's, by the attributes of ``model``'s parameters.

    Entries that are not sharded parameters are passed on as they are.

    Raises:
        ValueError: when an entry's shape is not the parameter's full shape.
    """
    describe_output_projections(model)
    params = dict(model.named_parameters(remove_duplicate=False))
    sharded = {}
    for name, full in model_state_dict.items():
        if name in params and is_sharded(params[name]):
            require_full_shape(name, full, params[name])
            full = local_slice(full, params[name])
        sharded[name] = full
    return sharded


# Files


def to_host(value: Any, *, down_cast_bf16: bool = False) -> Any:
    """Copy nested dicts, lists and tuples with every tensor on the host, without the rest of its storage."""

    def copied(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu()
        if down_cast_bf16 and tensor.dtype == torch.float32:
            return tensor.to(torch.bfloat16)
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

    return map_tensors(value, copied)


def read_tensors(path: Path, *, mmap: bool = True) -> Any:
    """Read a file written by ``torch.save``: tensors, containers and plain values only.

    Args:
        path: of the file.
        mmap: map the tensors, so that only what is used is read; the file must then outlive them.

    Raises:
        ValueError: when the file is missing, cut short, or holds other Python objects.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: check the directory and the tensor-parallel size it was saved with")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except (RuntimeError, EOFError, UnpicklingError, OSError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) cannot be read: {reason} "
            "It is cut short, or holds other objects than tensors and plain values: copy or save it again"
        ) from error


def rank_directory(output_dir: str | Path) -> Path:
    """``output_dir/tp_rank_XX_pp_rank_XX`` of this rank."""
    tensor, pipeline = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return Path(output_dir) / f"tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}"


def is_model_replica_zero() -> bool:
    """Whether this rank belongs to the copy of the model that writes: data- and context-parallel rank 0."""
    return parallel_state.get_data_parallel_rank() == parallel_state.get_context_model_parallel_rank() == 0


def write_tensors(path: Path, checkpoint: Any) -> None:
    """Write what ``read_tensors`` reads; an existing file is replaced once the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    incomplete = path.with_name(f"{path.name}.rank_{parallel_state.get_global_rank()}.incomplete")
    try:
        torch.save(checkpoint, incomplete)
        incomplete.replace(path)
    except (RuntimeError, OSError) as error:  # torch.save reports a full disk as RuntimeError
        raise OSError(f"could not write {path}: {error}: free disk space or choose another directory") from error
    finally:
        incomplete.unlink(missing_ok=True)


def save(
    checkpoint: Mapping[str, Any],
    output_dir: str | Path,
    save_serially: bool = True,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Write this rank's ``checkpoint`` to ``output_dir/tp_rank_XX_pp_rank_XX/checkpoint.pt``. Every rank calls.

    Args:
        checkpoint: nested dict of tensors and plain values, usually ``{"model": model.state_dict(), ...}``.
        output_dir: created if needed; a file of an earlier save is replaced once the new one is complete.
        save_serially: one tensor-parallel rank at a time, so that a host copies one shard at a time. False is faster.
        down_cast_bf16: write fp32 tensors as bf16.
        master_dp_only: write from data-parallel rank 0 only. False: from every rank, for disks that hosts do not share.

    Raises:
        ValueError, OSError: on every rank, when one cannot write.
    """
    writes = is_model_replica_zero() or not master_dp_only
    rank = parallel_state.get_tensor_model_parallel_rank()
    for turn in range(parallel_state.get_tensor_model_parallel_size() if save_serially else 1):
        with raise_together(f"saving {output_dir}"):
            if writes and (turn == rank or not save_serially):
                content = to_host(checkpoint, down_cast_bf16=down_cast_bf16)
                write_tensors(rank_directory(output_dir) / "checkpoint.pt", content)


def load(
    chkpt_path: str | Path,
    model_or_optimizer: torch.nn.Module | torch.optim.Optimizer | None = None,
    model_key: str | None = "model",
    sharded: bool = True,
    strict: bool = True,
) -> Any:
    """Read a checkpoint, load ``model_or_optimizer`` from it if given, and return it. Every rank calls.

    Args:
        chkpt_path: the ``output_dir`` of ``save``, or, with ``sharded=False``, one file with a full state dict.
        model_or_optimizer: gets the entry ``model_key``.
        model_key: ``None`` when the file is the state dict itself.
        sharded: False slices a full state dict for this rank's parameters.
        strict: for modules: names must match exactly.

    Raises:
        ValueError: on every rank, when a file is missing, damaged or does not fit.
    """
    path = rank_directory(chkpt_path) / "checkpoint.pt" if sharded else Path(chkpt_path)
    with raise_together(f"loading {chkpt_path}"):
        checkpoint = read_tensors(path)
        if model_or_optimizer is not None:
            load_into(model_or_optimizer, _entry(checkpoint, model_key, path), sharded=sharded, strict=strict)
    return checkpoint


def _entry(checkpoint: Mapping[str, Any], key: str | None, path: Path) -> Any:
    if key is None:
        return checkpoint
    if key not in checkpoint:
        raise ValueError(f"{path} has no entry {key!r}: pass model_key as one of {sorted(checkpoint)[:10]} or None")
    return checkpoint[key]


def load_into(
    target: torch.nn.Module | torch.optim.Optimizer, state: Any, *, sharded: bool = True, strict: bool = True
) -> None:
    """``target.load_state_dict(state)``; arguments as of ``load``. A model that it does not fit: ``ValueError``."""
    if not isinstance(target, torch.nn.Module):
        target.load_state_dict(state)
        return
    state = state if sharded else get_sharded_model_dict(target, state)
    try:
        target.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint does not fit the model: {error}") from error
