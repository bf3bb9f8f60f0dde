"""Arranges the ranks of the world in a grid of parallel dimensions."""

from __future__ import annotations

RankGroups = list[list[int]]
"""Partition of the world: the global ranks of each group."""


def rank_grid(sizes: dict[str, int], device_order: list[int]) -> dict[str, RankGroups]:
    """Partition ``device_order`` along each dimension of a grid, with the last dimension fastest.

    ``rank_grid({"data": 2, "tensor": 2}, [0, 1, 2, 3])`` returns
    ``{"data": [[0, 2], [1, 3]], "tensor": [[0, 1], [2, 3]]}``.
    """
    groups: dict[str, RankGroups] = {}
    stride = len(device_order)
    for name, size in sizes.items():
        # Neighbors along this dimension are ``stride`` positions apart; groups start where the
        # coordinate of this dimension, (i // stride) % size, is 0.
        stride //= size
        starts = [i for i in range(len(device_order)) if (i // stride) % size == 0]
        groups[name] = [[device_order[start + j * stride] for j in range(size)] for start in starts]
    return groups


def remaining_ranks(world_size: int, **sizes: int) -> int:
    """Return ``world_size`` divided by the product of ``sizes``.

    Raises:
        ValueError: a size is below 1, or the product does not divide ``world_size``.
    """
    product = 1
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} parallel size must be at least 1, got {size}")
        product *= size
    if world_size % product:
        spelled = " x ".join(f"{name} parallel size {size}" for name, size in sizes.items())
        raise ValueError(
            f"world size {world_size} is not divisible by {product} ({spelled}): "
            f"start a multiple of {product} processes (--nproc_per_node x --nnodes) or lower a size"
        )
    return world_size // product
