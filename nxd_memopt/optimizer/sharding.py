"""Equal shards of flat tensors over one group, and the bucketed collectives between tensors and shards.

A tensor of n elements, flattened and padded to a multiple of the group size D, is ``[A_1 .. A_D]``.
Rank i stores ``A_i`` of ceil(n / D) elements. A bucket of several tensors is the matrix
``[D, sum of ceil(n / D)]``, so one collective over the rows of the matrix shards or gathers all of
them (arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers.grads import bucket_indices
from nxd_memopt.parallel_layers.utils import ShardBlock, blocks_within, padded_size


def cut_shard(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return this rank's elements of ``tensor``, 1-D of ceil(n / D); may share storage with
    ``tensor``.

    A group of size 1 returns ``tensor`` in its own shape.
    """
    size = backend.group_size(group)
    if size == 1:
        return tensor
    return backend.shard(_padded(tensor, size), 0, group)


def flat_shard(tensor: Tensor, rank: int, size: int) -> Tensor:
    """Return the elements of ``tensor`` that ``rank`` of ``size`` stores, 1-D of ceil(n / size), as
    a copy.

    ``size`` 1 returns ``tensor`` itself.
    """
    if size == 1:
        return tensor
    length = _length(tensor, size)
    return _padded(tensor, size).narrow(0, rank * length, length).clone()


def cut_blocks(param: Tensor, group: ProcessGroup | None) -> tuple[ShardBlock, ...]:
    """Return the blocks of ``cut_shard(param, group)``, counted in elements; empty for an unfused
    parameter.

    The padding at the end of a shard is a block with ``full_rows`` 0.
    """
    blocks: tuple[ShardBlock, ...] = getattr(param, "blocks", None) or ()
    size = backend.group_size(group)
    if not blocks or size == 1:
        return blocks
    # This shard is the flat range [first, first + length).
    row_elements = param[0].numel()
    length = _length(param, size)
    first = backend.group_rank(group) * length
    in_elements = [
        ShardBlock(block.full_rows * row_elements, block.rows * row_elements, block.replicas) for block in blocks
    ]
    return blocks_within(in_elements, first, first + length)


def reduce_scatter_mean(tensors: Sequence[Tensor], group: ProcessGroup | None, *, bucket_bytes: int) -> list[Tensor]:
    """Return this rank's shard of the mean over ``group`` of each tensor, in the dtype of the
    tensor.

    Every rank passes the same shapes and dtypes.

    Args:
        tensors: gradients of any shape.
        group: the sharding group; a group of size 1 returns ``tensors`` unchanged.
        bucket_bytes: size of the tensors in one reduce-scatter, in bytes.
    """
    size = backend.group_size(group)
    if size == 1:
        return list(tensors)
    shards = list(tensors)
    for bucket in bucket_indices(tensors, bucket_bytes):
        # One collective per bucket. A chunk is [ceil(n / D)], the average of A_i over the ranks.
        padded = [_padded(tensors[i], size) for i in bucket]
        chunks = backend.reduce_scatter_mean_list(padded, group)
        for i, chunk in zip(bucket, chunks, strict=True):
            shards[i] = chunk
    return shards


def all_gather_into(
    tensors: Sequence[Tensor], shards: Sequence[Tensor], group: ProcessGroup | None, *, bucket_bytes: int
) -> None:
    """Overwrite each tensor with the shards of all ranks.

    The shards are cast to the tensor's dtype before the all-gather: bf16 parameters need half of
    the traffic of their fp32 masters.
    """
    size = backend.group_size(group)
    for bucket in bucket_indices(tensors, bucket_bytes):
        if size == 1:
            for i in bucket:
                tensors[i].copy_(shards[i])
            continue
        # [D ceil(n / D)] per tensor; the padding at the end is cut off.
        gathered = backend.all_gather_list([shards[i].to(tensors[i].dtype) for i in bucket], group)
        for i, padded in zip(bucket, gathered, strict=True):
            tensors[i].copy_(padded[: tensors[i].numel()].view_as(tensors[i]))
        # Otherwise the last tensor of this bucket would still exist while the next one is gathered.
        del padded


def _length(tensor: Tensor, size: int) -> int:
    return padded_size(tensor.numel(), size) // size


def _padded(tensor: Tensor, size: int) -> Tensor:
    flat = tensor.reshape(-1)
    missing = padded_size(flat.numel(), size) - flat.numel()
    # Padding by nothing copies too.
    return F.pad(flat, (0, missing)) if missing else flat
