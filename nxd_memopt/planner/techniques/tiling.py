"""Sizes of what is computed in pieces: tiles of tokens of an MLP, and groups of attention heads."""

from __future__ import annotations

from collections.abc import Sequence

from nxd_memopt.planner.sizes.states import FP32_BYTES

ACTIVATION_TILE_BYTES = 256 << 20
"""Largest gradient of a gated activation in backward; each further tile adds one pass over dW."""


def mlp_tile_bytes(
    *,
    hidden_size: int,
    columns_per_partition: int,
    width_per_partition: int,
    element_bytes: int,
    gathers: bool = True,
    overwrites: bool = False,
) -> int:
    """Return the bytes of each token of a tile of the MLP while its backward runs.

    The gathered input and gradient, the partial gradient of the input (H each), the outputs of the
    column-parallel layers, which their gradients overwrite, and the gradient and the recomputed
    value of the activation.

    Args:
        hidden_size: H.
        columns_per_partition: output columns of the first layer on a rank: 2 F/T for gate and up.
        width_per_partition: F/T.
        element_bytes: bytes of an activation.
        gathers: whether ranks gather input and gradient; one rank reads views of them.
        overwrites: whether the recomputed value overwrites the activation's gradient, and is free
            before the gradient of the input exists, as with the gated kernel.
    """
    gathered = 2 * hidden_size * int(gathers)
    # The gated kernel writes the gradients of gate and up over them.
    if overwrites:
        return (gathered + columns_per_partition + max(hidden_size, width_per_partition)) * element_bytes
    columns = columns_per_partition + 2 * width_per_partition
    return (gathered + hidden_size + columns) * element_bytes


def auto_tile_tokens(free_bytes: int | None, bytes_per_token: int) -> int:
    """Return the tokens of a tile: 32,768, or less if a tile would exceed an eighth of free memory.

    Matmuls of tiles of 32,768 tokens run at the speed of the full sequence; tiles of a few thousand
    tokens were measured 3.2 times slower. At least 1,024 tokens.

    Args:
        free_bytes: free bytes of the device, or None if they are not known.
        bytes_per_token: see ``mlp_tile_bytes``.
    """
    tokens = 32768
    if free_bytes is None:
        return tokens
    # Halved until a tile fits: 7 of 8 parts are left for the layer's other tensors, which exist next to the tile.
    while tokens > 1024 and tokens * bytes_per_token > free_bytes // 8:
        tokens //= 2
    return tokens


def head_group_bytes(
    num_tokens: int,
    *,
    query_size: int,
    kv_size: int,
    num_heads: int,
    element_bytes: int,
    num_groups: int = 1,
) -> int:
    """Return the bytes of a group of attention heads while its backward runs.

    Queries, keys, values, the attention result and their gradients, and what flash kernels need in
    fp32: dQ, the log-sum-exps and the row sums of dO * O.

    Args:
        num_tokens: tokens of a micro-batch, S * B.
        query_size: columns of all query heads of a rank, h * d / T.
        kv_size: columns of all KV heads of a rank.
        num_heads: query heads of a rank.
        element_bytes: bytes of an activation.
        num_groups: groups into which the heads are divided.
    """
    # Values and gradients of Q, O (each as wide as the queries), K and V; then dQ and two numbers a head in fp32.
    per_token = 2 * (2 * query_size + 2 * kv_size) * element_bytes + (query_size + 2 * num_heads) * FP32_BYTES
    return num_tokens * per_token // num_groups


def head_group_counts(num_heads: Sequence[int]) -> list[int]:
    """Return the numbers of groups into which a rank's heads can be divided, ascending.

    Args:
        num_heads: heads of each projection: queries, and keys and values if they have their own.
    """
    queries = max(num_heads)
    return [
        count
        for count in range(1, queries + 1)
        if queries % count == 0 and all(heads % count == 0 or count % heads == 0 for heads in num_heads)
    ]


def require_head_groups(num_groups: int, num_heads: Sequence[int]) -> None:
    """Raise ``ValueError`` unless a rank's heads can be divided into ``num_groups``.

    Args:
        num_groups: number of groups.
        num_heads: see ``head_group_counts``.
    """
    if num_groups not in head_group_counts(num_heads):
        queries, kv_heads = max(num_heads), min(num_heads)
        raise ValueError(
            f"attention_head_groups {num_groups} does not divide a rank's {queries} query heads "
            f"and {kv_heads} KV heads evenly: use a divisor of {queries} that divides "
            f"{kv_heads} or is a multiple of it"
        )


def auto_head_groups(free_bytes: int | None, group_counts: Sequence[int], bytes_of_all: int) -> int:
    """Return the fewest groups of heads of which one takes at most an eighth of free memory.

    Fewer groups are faster: each gathers the layer's input and runs its projections again.

    Args:
        free_bytes: free bytes of the device; None, if they are not known, takes the fewest groups.
        group_counts: possible numbers of groups, ascending; the last one if none is enough.
        bytes_of_all: see ``head_group_bytes``, of one group.
    """
    for count in group_counts:
        if free_bytes is None or bytes_of_all // count <= free_bytes // 8:
            return count
    return group_counts[-1]
