"""Equal shards of flat tensors over one group, and the bucketed collectives between tensors and shards.

A tensor of n elements, flat and padded to a multiple of the group's size D, is ``[A_1 .. A_D]``; rank i holds ``A_i``
of ceil(n / D) elements. A bucket of several tensors is the matrix ``[D, sum of ceil(n / D)]``, so that one collective
over its rows serves them all (arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers.grads import bucket_indices
from nxd_memopt.parallel_layers.utils import ShardBlock, padded_size


def cut_shard(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's elements of ``tensor``, 1-D; may share its storage. A group of size 1 returns ``tensor`` as it is."""
    size = backend.group_size(group)
    return tensor if size == 1 else backend.shard(_padded(tensor, size), 0, group)


def flat_shard(tensor: Tensor, rank: int, size: int) -> Tensor:
    """Return the elements of ``tensor`` that ``rank`` of ``size`` holds, 1-D, in storage of their own.

    ``size`` 1 returns ``tensor`` as it is.
    """
    length = _length(tensor, size)
    return tensor if size == 1 else _padded(tensor, size).narrow(0, rank * length, length).clone()


def cut_blocks(param: Tensor, group: ProcessGroup | None) -> tuple[ShardBlock, ...]:
    """``cut_shard(param, group)`` by the blocks of a fused parameter, counted in elements; empty for any other.

    What pads the shard is a block of nothing.
    """
    blocks: tuple[ShardBlock, ...] = getattr(param, "blocks", None) or ()
    size = backend.group_size(group)
    if not blocks or size == 1:
        return blocks
    row_elements = param[0].numel()
    length = _length(param, size)
    first = backend.group_rank(group) * length
    cut, start = [], 0
    for block in blocks:
        stop = start + block.rows * row_elements
        elements = max(min(stop, first + length) - max(start, first), 0)
        cut.append(ShardBlock(block.full_rows * row_elements, elements, block.replicas))
        start = stop
    padding = length - sum(block.rows for block in cut)
    return (*cut, ShardBlock(0, padding, 1))


def reduce_scatter_mean(tensors: Sequence[Tensor], group: ProcessGroup | None, *, bucket_bytes: int) -> list[Tensor]:
    """This rank's shard of the mean over ``group`` of each tensor, in its dtype; every rank passes the same shapes."""
    size = backend.group_size(group)
    if size == 1:
        return list(tensors)
    shards = list(tensors)
    for bucket in bucket_indices(tensors, bucket_bytes):
        chunks = backend.reduce_scatter_mean_list([_padded(tensors[i], size) for i in bucket], group)
        for i, chunk in zip(bucket, chunks, strict=True):
            shards[i] = chunk
    return shards


def all_gather_into(
    tensors: Sequence[Tensor], shards: Sequence[Tensor], group: ProcessGroup | None, *, bucket_bytes: int
) -> None:
    """Overwrite each tensor with its shards of all ranks, cast to its dtype before they travel."""
    size = backend.group_size(group)
    for bucket in bucket_indices(tensors, bucket_bytes):
        if size == 1:
            for i in bucket:
                tensors[i].copy_(shards[i])
            continue
        gathered = backend.all_gather_list([shards[i].to(tensors[i].dtype) for i in bucket], group)
        for i, padded in zip(bucket, gathered, strict=True):
            tensors[i].copy_(padded[: tensors[i].numel()].view_as(tensors[i]))


def _length(tensor: Tensor, size: int) -> int:
    return padded_size(tensor.numel(), size) // size


def _padded(tensor: Tensor, size: int) -> Tensor:
    flat = tensor.reshape(-1)
    return F.pad(flat, (0, padded_size(flat.numel(), size) - flat.numel()))
