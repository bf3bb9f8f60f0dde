"""Computes which shard each rank holds, with KV replicas, and reorders columns gathered in rank order.

T ranks share a layer; each KV shard has m replicas (``replicas``, neuronx-distributed's
``kv_size_multiplier``). The shards of a full parameter have positions 0 to T-1 in the order of the
parameter. ``rank_stride`` maps ranks to positions: ranks that are ``rank_stride`` apart have
consecutive positions.

    position_of_rank(r) = (r mod rank_stride) * (T / rank_stride) + r // rank_stride

Rank r of a query projection holds query shard ``position_of_rank(r)`` of T (consecutive heads). An
output projection holds the columns of the same heads. A key or value projection holds KV shard
``position_of_rank(r) // m`` of T/m. Positions ``p * m`` to ``p * m + m - 1`` are the query shards
that attend to KV shard p, so every rank has the KV heads of its query heads, for every
``rank_stride`` that divides T.

Two values are used. ``rank_stride = 1``: replicas are on consecutive ranks
(``torch.repeat_interleave``; neuronx-distributed on trn2, and all other devices). ``rank_stride =
T/m``: replicas are T/m ranks apart (``Tensor.repeat``; neuronx-distributed on trn1, which has links
between cores at this distance): rank r holds KV shard ``r mod (T/m)``.

Example: T = 8, two KV heads, m = 4, eight query heads; query heads 0 to 3 attend to KV head 0::

    rank                          0  1  2  3  4  5  6  7
    rank_stride = 1: query head   0  1  2  3  4  5  6  7
                     KV head      0  0  0  0  1  1  1  1
    rank_stride = 2: query head   0  4  1  5  2  6  3  7
                     KV head      0  1  0  1  0  1  0  1      replicas: [0, 2, 4, 6], [1, 3, 5, 7]
"""

from __future__ import annotations

from torch import Tensor


def position_of_rank(rank: int, size: int, rank_stride: int) -> int:
    """Return the position of the query shard that ``rank`` of ``size`` ranks holds."""
    return rank % rank_stride * (size // rank_stride) + rank // rank_stride


def rank_at_position(position: int, size: int, rank_stride: int) -> int:
    """Return the rank with the query shard at ``position``; inverse of ``position_of_rank``."""
    shards_per_run = size // rank_stride
    return position % shards_per_run * rank_stride + position // shards_per_run


def kv_shard_of_rank(rank: int, size: int, replicas: int, rank_stride: int) -> int:
    """Return which of the ``size / replicas`` key and value shards ``rank`` holds."""
    return position_of_rank(rank, size, rank_stride) // replicas


def replica_ranks(size: int, replicas: int, rank_stride: int) -> list[list[int]]:
    """Return, for each KV shard in order, the ranks that hold it, in ascending order.

    ``replica_ranks(32, 4, 8)`` is ``[[0, 8, 16, 24], [1, 9, 17, 25], ...]``.
    ``replica_ranks(32, 4, 1)`` is ``[[0, 1, 2, 3], [4, 5, 6, 7], ...]``.
    """
    groups: list[list[int]] = []
    for first in range(0, size, replicas):
        positions = range(first, first + replicas)
        groups.append(sorted(rank_at_position(i, size, rank_stride) for i in positions))
    return groups


def replica_groups(tensor_groups: list[list[int]], replicas: int, rank_stride: int) -> list[list[int]]:
    """Return ``replica_ranks`` of each tensor-parallel group, as global ranks."""
    # ``replica_ranks`` counts within one tensor-parallel group; its numbers index that group's
    # ranks.
    local_groups = replica_ranks(len(tensor_groups[0]), replicas, rank_stride)
    return [[ranks[i] for i in group] for ranks in tensor_groups for group in local_groups]


def swap_blocks(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Reorder the last dimension from ``outer`` groups of ``inner`` blocks to the transposed order.

    The last dimension is viewed as ``[outer, inner, block]`` and becomes ``[inner, outer, block]``.
    For a weight with strided blocks, ``outer=T, inner=stride`` maps the concatenated columns of all
    ranks to the full order; ``outer=stride, inner=T`` is the inverse.
    """
    if outer == 1 or inner == 1:
        return tensor
    return tensor.unflatten(-1, (outer, inner, -1)).transpose(-3, -2).flatten(-3)


def columns_in_full_order(gathered: Tensor, size: int, *, replicas: int = 1, rank_stride: int = 1) -> Tensor:
    """Reorder columns gathered in rank order to the order of the full parameter.

    Args:
        gathered: ``[..., size * n]``, the n columns of each rank, concatenated in rank order.
        size: T, the number of ranks.
        replicas: number of ranks that hold the same shard; one copy of each shard is returned.
        rank_stride: see the top of this file.

    Returns:
        ``[..., size * n / replicas]``.
    """
    # Rank r = a * rank_stride + b holds position b * (size / rank_stride) + a: swapping the two
    # block dimensions sorts the shards by position. Replicas are then adjacent.
    columns = swap_blocks(gathered, size // rank_stride, rank_stride)
    if replicas == 1:
        return columns
    return columns.unflatten(-1, (size // replicas, replicas, -1))[..., 0, :].flatten(-2)
