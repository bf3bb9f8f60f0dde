"""Conversions between full tensors and tensor-parallel shards, by the shard attributes of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.mappings import resolve_group
from nxd_memopt.parallel_layers.rank_order import rank_at_position
from nxd_memopt.parallel_layers.utils import (
    copy_tensor_model_parallel_attributes,
    first_expert,
    is_expert_parallel,
    is_sharded,
    shard_ranges,
)


class LazySlice(Protocol):
    """A tensor on disk that is read by slice, e.g. from ``safetensors``' ``get_slice(name)``."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


def full_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape of the full, unpadded tensor of which ``param`` is this rank's shard."""
    recorded = getattr(param, "full_shape", None)
    shape = list(recorded or param.shape)
    # Without a recorded full shape the parameter has no padding: T shards of equal size.
    if is_sharded(param) and recorded is None:
        shape[_partition_dim(param)] *= cast(Any, param).num_partitions
    return tuple(shape)


def _partition_dim(param: Tensor) -> int:
    return cast(Any, param).partition_dim % param.dim()


def stored_shape(source: Tensor | LazySlice) -> tuple[int, ...]:
    """Return the shape of a tensor in memory or on disk."""
    if isinstance(source, Tensor):
        return tuple(source.shape)
    return tuple(source.get_shape())


def require_full_shape(name: str, source: Tensor | LazySlice, param: Tensor) -> None:
    """Raise ValueError if ``source`` cannot be the full tensor of the parameter ``name``."""
    stored = stored_shape(source)
    expected = full_shape(param)
    if stored != expected:
        raise ValueError(
            f"{name} has shape {list(stored)} in the checkpoint but {list(expected)} in the model: "
            "build the model from the checkpoint's own config, or load a checkpoint of this size"
        )


def local_slice(source: Tensor | LazySlice, param: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Copy this rank's shard of ``param`` from the full tensor ``source`` to the host.

    Reads only the needed slices of ``source``. Padding beyond the full tensor is filled with zeros.

    Args:
        source: the full tensor.
        param: parameter with the attributes of the shard.
        dtype: dtype of the result; default the dtype of ``param``.

    Returns:
        A CPU tensor with the shape of ``param``.
    """
    dtype = dtype or param.dtype
    if not is_sharded(param):
        return source[...].to(device="cpu", dtype=dtype, copy=True)
    dim = _partition_dim(param)
    length = full_shape(param)[dim]
    # Ranges are consecutive in the shard and apart in the full tensor (strides, blocks). A range
    # may end, or even start, beyond the full tensor: that part of the shard is padding.
    local = torch.zeros(param.shape, dtype=dtype, device="cpu")
    offset = 0
    for start, stop in shard_ranges(param):
        end = min(stop, length)
        if start < end:
            index = [slice(None)] * dim + [slice(start, end)]
            if is_expert_parallel(param):
                index[0] = slice(first_expert(param), first_expert(param) + param.shape[0])
            local.narrow(dim, offset, end - start).copy_(source[tuple(index)])
        offset += stop - start
    return local


def gather_experts(param: Tensor) -> Tensor:
    """Return ``param`` with the experts of all expert-parallel ranks. All ranks of their group call.

    The result has all attributes of a parameter that is sharded over tensor-parallel ranks only.
    Any other parameter is returned as it is.
    """
    if not is_expert_parallel(param):
        return param
    with backend.outside_step():
        full = backend.all_gather(param.detach(), parallel_state.get_expert_model_parallel_group())
    copy_tensor_model_parallel_attributes(full, param)
    cast(Any, full).expert_model_parallel = False
    return full


def gather_full_tensor(param: Tensor, *, dtype: torch.dtype | None = None) -> Tensor | None:
    """Gather the shards of ``param`` on the host of tensor-parallel rank 0, without padding.

    All ranks of the tensor-parallel group call this function. Peak memory: one full tensor on each
    device.

    Args:
        param: this rank's shard.
        dtype: dtype of the result, cast before the gather; default the dtype of ``param``.

    Returns:
        The full tensor on the CPU of tensor-parallel rank 0, None on other ranks.
    """
    assert not is_expert_parallel(param), "call gather_experts on all ranks first"
    if not is_sharded(param):
        # On torch_xla every rank must cut its graph here, also those that return nothing: the
        # ranks would otherwise compile and run different graphs of the next step.
        backend.mark_step()
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return None
        return param.detach().to(dtype or param.dtype).cpu().contiguous()
    # An all-gather: every device receives the full tensor, although only rank 0 copies it to its
    # host. Callers gather one tensor at a time, so this is the peak.
    with backend.outside_step():
        local = param.detach().to(dtype or param.dtype).contiguous()
        stacked = backend.all_gather(local, resolve_group(None))  # [T * n, ...]
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return None
    return _merge_stacked(stacked.cpu(), param)


def _merge_stacked(stacked: Tensor, param: Tensor) -> Tensor:
    """Build the full tensor; inverse of ``local_slice``.

    Args:
        stacked: shards of ranks 0 to T-1, concatenated along dim 0.
        param: this rank's shard.
    """
    dim = _partition_dim(param)
    description = cast(Any, param)
    blocks = getattr(param, "blocks", None)
    # The padded full shape, which is what ``shard_ranges`` indexes. In a fused parameter the
    # blocks have different numbers of replicas, so its length is not the local length times
    # partitions.
    shape = list(param.shape)
    if blocks:
        shape[dim] = sum(block.full_rows for block in blocks)
    else:
        shape[dim] *= description.num_partitions
    full = stacked.new_empty(shape)
    shards = stacked.unflatten(0, (-1, param.shape[0]))  # [T, n, ...]
    # Of m replicas of a partition, the rank at position partition * m is used.
    for partition in range(description.num_partitions):
        rank = rank_at_position(partition * description.replicas, len(shards), description.rank_stride)
        offset = 0
        for start, stop in shard_ranges(param, rank=rank):
            source = shards[rank].narrow(dim, offset, stop - start)
            full.narrow(dim, start, stop - start).copy_(source)
            offset += stop - start
    return full.narrow(dim, 0, full_shape(param)[dim]).contiguous()


def require_mergeable(local: int, size: int, param: Tensor) -> None:
    """Raise ValueError if shards cannot be concatenated to the full tensor of ``param``.

    Padding is shorter than a shard: ``0 <= local * size - length < local``, for ``length`` elements
    of the full, unpadded tensor along the sharded dimension. Below 0, ranks are missing, and their
    elements would become zeros. At ``local`` or above, ranks hold replicas.

    Args:
        local: length of each shard along the sharded dimension.
        size: number of tensor-parallel ranks with a shard.
        param: this run's shard, with attributes that describe the full tensor.
    """
    dim = _partition_dim(param)
    shape = full_shape(param)
    found = f"dimension {dim} of a parameter of {list(shape)} is {local} on each of {size} tensor-parallel ranks"
    if local * size < shape[dim]:
        raise ValueError(
            f"{found}, {local * size} of {shape[dim]} in all: the files of ranks {size} and above "
            "are missing, or are of another model: copy the files of all ranks"
        )
    blocks = getattr(param, "blocks", None) or ()
    is_replicated = getattr(param, "replicas", 1) > 1 or any(block.replicas > 1 for block in blocks)
    if is_replicated or local * size >= shape[dim] + local:
        raise ValueError(
            f"{found} and {param.size(dim)} here, so that ranks hold the same KV heads: use the "
            "checkpoint's tensor_model_parallel_size, or convert the weights with nxd-memopt convert"
        )


def merge_shards(shards: Sequence[Tensor], param: Tensor) -> Tensor:
    """Return the full tensor, without padding, from the shards of another tensor-parallel size.

    Args:
        shards: shards of ranks 0 to T'-1.
        param: this run's shard, with attributes that describe the full tensor.

    Raises:
        ValueError: shards are missing, or ranks hold replicas of the tensor at either T.
    """
    size = len(shards)
    dim = _partition_dim(param)
    shape = full_shape(param)
    length = shape[dim]
    local = shards[0].size(dim)
    require_mergeable(local, size, param)
    blocks = getattr(param, "blocks", None) or ()
    # Blocks along dim that are sharded separately: those of a fused parameter, or of a stride.
    # Block b begins at ``first`` in the full tensor and at ``offset`` in each shard.
    stride = cast(Any, param).partition_stride
    block_lengths = [block.full_rows // size for block in blocks] or [local // stride] * stride
    full = shards[0].new_zeros(shape)
    for rank, shard in enumerate(shards):
        first = offset = 0
        for block_length in block_lengths:
            start = first + rank * block_length
            # The end of the last rank's block may be padding, which the full tensor does not
            # have.
            stop = min(start + block_length, length)
            if start < stop:
                source = shard.narrow(dim, offset, stop - start)
                full.narrow(dim, start, stop - start).copy_(source)
            first += block_length * size
            offset += block_length
    return full
