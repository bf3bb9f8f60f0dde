"""Describes parameters that are sharded over data-parallel ranks (ZeRO stage 3, PyTorch's FSDP2).

Such a parameter is a DTensor. Its shape is that of this tensor-parallel rank's parameter, and each
data-parallel rank stores consecutive rows of it, ``ceil(n / D)`` of n, the last ranks fewer or none.
DTensor is never imported here: only FSDP2 creates one, and the import takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend

MODEL_DTYPE = "model_dtype"
"""Attribute of a sharded parameter: the dtype of the layer's weight, to which its rows are rounded
before the all-gather. The rows themselves may be fp32 masters."""

SHARD_GROUP = "data_parallel_shard_group"
"""Attribute of a sharded parameter: the group of ranks with different rows."""


def is_data_sharded(tensor: Tensor) -> bool:
    """Return whether data-parallel ranks store different rows of ``tensor`` (a DTensor)."""
    return hasattr(tensor, "placements") and hasattr(tensor, "_local_tensor")


def local_rows(tensor: Tensor) -> Tensor:
    """Return the rows that this rank stores, sharing memory; ``tensor`` itself if it is plain.

    The result is one object for as long as the DTensor lives, so it may carry attributes.
    """
    if is_data_sharded(tensor):
        return cast(Any, tensor)._local_tensor
    return tensor


def local_gradient(param: Tensor) -> Tensor | None:
    """Return ``param.grad``, or the rows of it that this rank stores."""
    if param.grad is None:
        return None
    return local_rows(param.grad)


def model_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of the layer's weight, which masters in ``param`` may exceed."""
    return getattr(param, MODEL_DTYPE, param.dtype)


def shard_group(param: Tensor) -> ProcessGroup:
    """Return the group of ranks with different rows of a sharded parameter.

    Raises:
        ValueError: another library has sharded the parameter.
    """
    # Not ``param.device_mesh``: torch caches the results of operations on DTensors, so the mesh of a
    # parameter may be an equal one of groups that were destroyed since.
    group = getattr(param, SHARD_GROUP, None)
    if group is None:
        raise ValueError(
            f"a parameter of shape {list(param.shape)} is a DTensor of another library: shard the model "
            "with data_parallel.shard_model"
        )
    return group


def row_range(param: Tensor) -> tuple[int, int]:
    """Return the first row that this rank stores of a sharded parameter, and one after the last."""
    group = shard_group(param)
    rows = param.shape[0]
    # torch.chunk: ceil(n / D) rows per rank until none are left
    length = -(-rows // group.size())
    start = min(group.rank() * length, rows)
    stop = min(start + length, rows)
    assert stop - start == local_rows(param).shape[0], "FSDP2 shards dimension 0 in chunks of equal length"
    return start, stop


def element_range(param: Tensor) -> tuple[int, int]:
    """Return ``row_range`` in elements of the flattened parameter."""
    start, stop = row_range(param)
    row_elements = math.prod(param.shape[1:])
    return start * row_elements, stop * row_elements


def replica_ranks(param: Tensor, data_parallel_size: int) -> tuple[int, ...]:
    """Return the data-parallel ranks that store the same rows of ``param`` as this rank.

    With hybrid sharding each run of consecutive data-parallel ranks stores all rows once, with
    expert parallelism each run of expert-parallel ranks stores all experts, which zero3 shards further.
    """
    if getattr(param, "expert_model_parallel", False):
        experts: Any = param
        same = range(experts.expert_partition_index, data_parallel_size, experts.num_expert_partitions)
        # Each of the ranks with the same experts has other rows of them.
        if is_data_sharded(param):
            return (same[shard_group(param).rank()],)
        return tuple(same)
    if not is_data_sharded(param):
        return tuple(range(data_parallel_size))
    group = shard_group(param)
    return tuple(range(group.rank(), data_parallel_size, group.size()))


def common_shard_group(params: Iterable[Tensor]) -> ProcessGroup | None:
    """Return the group over which the parameters are sharded, or None if none of them is.

    Raises:
        ValueError: only some of the parameters are sharded, or over different groups.
    """
    groups = [shard_group(param) if is_data_sharded(param) else None for param in params]
    distinct = list(dict.fromkeys(groups))
    if len(distinct) > 1:
        sharded = sum(group is not None for group in groups)
        raise ValueError(
            f"{sharded} of {len(groups)} parameters are sharded over data-parallel ranks, over "
            f"{len(distinct)} groups: treat parameters of one kind at a time"
        )
    return distinct[0] if distinct else None


def require_replicated(params: Iterable[Tensor], what: str, remedy: str) -> None:
    """Raise ``ValueError`` if a parameter is sharded over data-parallel ranks.

    Args:
        params: parameters or gradients.
        what: the refused operation, the subject of the message.
        remedy: what to do instead.
    """
    sharded = [param for param in params if is_data_sharded(param)]
    if sharded:
        raise ValueError(
            f"{what} needs parameters that every data-parallel rank has in full, and {len(sharded)} are "
            f"sharded (zero3), the first of shape {list(sharded[0].shape)}: {remedy}"
        )


@torch.no_grad()
def gather_rows(param: Tensor) -> Tensor:
    """Return a sharded parameter in full, in the dtype of the model. All ranks of its group call.

    The result is a plain tensor with all attributes of ``param``; the all-gather moves rows in the
    dtype of the model. A plain parameter is returned as it is.
    """
    if not is_data_sharded(param):
        return param
    group = shard_group(param)
    rows = local_rows(param).detach().to(model_dtype(param))
    # [ceil(n / D), ...] on each rank; the padding of the last ranks is at the end of all rows.
    length = -(-param.shape[0] // group.size())
    padded = rows.new_zeros((length, *param.shape[1:]))
    padded[: rows.shape[0]] = rows
    full = backend.all_gather(padded, group)[: param.shape[0]]
    for name, value in vars(param).items():
        if name not in (MODEL_DTYPE, SHARD_GROUP):
            setattr(full, name, value)
    return full
