"""The memory of one rank: a term for each purpose, their sum, and extrapolation over depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nxd_memopt.config import require_divisible
from nxd_memopt.planner.architectures import ExpertShape
from nxd_memopt.planner.hardware import GIB, RESERVE_GIB
from nxd_memopt.planner.states import (
    FP32_BYTES,
    StateLayout,
    gradient_bytes,
    master_bytes,
    moment_bytes,
    weight_bytes,
)


@dataclass(frozen=True)
class OptimizerState:
    """Memory that AdamW uses in addition to the parameters.

    Args:
        master_weights: fp32 copies of bf16 or fp16 parameters; gradients then accumulate in fp32
            too.
        zero1: shard moments and master weights over the data-parallel ranks (arXiv:1910.02054).
        data_parallel_size: D, number of data-parallel ranks.
        expert_ranks: EP; ``zero1`` shards the experts' states over the D/EP ranks that have the same ones.

    Raises:
        ValueError: D is less than 1, greater than 1 without ``zero1``, or with it not divisible by EP.
    """

    master_weights: bool = False
    zero1: bool = False
    data_parallel_size: int = 1
    expert_ranks: int = 1

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1:
            raise ValueError(f"data_parallel_size must be at least 1, got {self.data_parallel_size}")
        if self.zero1:
            size = self.data_parallel_size
            require_divisible("data_parallel_size", size, "expert_model_parallel_size", self.expert_ranks)
        if self.data_parallel_size > 1 and not self.zero1:
            raise ValueError(
                f"data_parallel_size {self.data_parallel_size} changes one rank's memory only "
                "with zero1: switch zero1 on, or leave data_parallel_size out"
            )


@dataclass(frozen=True)
class MemoryTerms:
    """Memory of one rank in bytes, by purpose.

    Args:
        terms: purpose -> bytes.
        capacity_bytes: memory of the device.
    """

    terms: dict[str, int]
    capacity_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of all terms in bytes."""
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        """Whether the sum of all terms is at most the device's memory."""
        return self.total_bytes <= self.capacity_bytes


def memory_terms(
    *,
    num_parameters: int,
    element_bytes: int,
    optimizer: OptimizerState,
    temporary_bytes: int,
    input_bytes: int,
    capacity_gib: float,
    reserve_gib: float = RESERVE_GIB,
    num_expert_parameters: int = 0,
) -> MemoryTerms:
    """Add up one rank's memory at the peak of a step.

    Args:
        num_parameters: number of parameters on this rank, those of experts included.
        element_bytes: bytes of a parameter and, without master weights, of its gradient.
        optimizer: memory options of AdamW.
        temporary_bytes: activations and scratch memory at the peak.
        input_bytes: bytes of the token ids and labels.
        capacity_gib: memory of the device in GiB.
        reserve_gib: memory in GiB that tensors cannot use.
        num_expert_parameters: number of parameters of this rank's experts.
    """
    # fp32 parameters are their own master weights.
    layout = StateLayout(
        element_bytes,
        master_weights=optimizer.master_weights and element_bytes < FP32_BYTES,
        sharding="zero1" if optimizer.zero1 else "none",
        data_parallel_size=optimizer.data_parallel_size,
        expert_ranks=optimizer.expert_ranks if optimizer.zero1 else 1,
    )
    shapes = [(num_parameters - num_expert_parameters,), ExpertShape((num_expert_parameters,))]
    terms = {
        "parameters": weight_bytes(shapes, layout),
        "gradients": gradient_bytes(shapes, layout),
        "optimizer moments": moment_bytes(shapes, layout),
        "master weights": master_bytes(shapes, layout),
        "activations and temporaries": temporary_bytes,
        "inputs": input_bytes,
        "reserve": int(reserve_gib * GIB),
    }
    return MemoryTerms(terms, int(capacity_gib * GIB))


def extrapolate(measured: dict[int, int], num_layers: int, *, least_per_layer: int) -> int:
    """Return the bytes at ``num_layers`` by linear extrapolation from two measured depths.

    Every additional layer keeps the same tensors. The slope is the measured one, or
    ``least_per_layer`` if that is greater: the peak of a shallow model may be at a point where no
    layer's tensors are kept, and the line through two such peaks is too flat. With the slope
    ``least_per_layer`` the result is an upper bound.

    Args:
        measured: number of layers -> bytes, for two depths.
        num_layers: number of layers of the full model.
        least_per_layer: bytes that each layer keeps with any recomputation: its input.
    """
    (few, at_few), (many, at_many) = sorted(measured.items())
    # Start at the deeper model, from which fewer layers are extrapolated.
    per_layer = max((at_many - at_few) / (many - few), least_per_layer)
    return round(at_many + (num_layers - many) * per_layer)


def nested_chunk_layers(num_layers: int) -> int:
    """Return the layers per chunk n for which nested recompute keeps the fewest layer inputs.

    Forward keeps the inputs of ceil(L / n) chunks, and the backward of a chunk restores n - 1 more.
    The sum is smallest near n = sqrt(L). Of equal sums the smallest n is the fastest: backward runs
    all layers but the last of a chunk once more. For L = 32: n = 4, 8 + 3 inputs.
    """
    return min(range(1, num_layers + 1), key=lambda n: -(-num_layers // n) + n - 1)


def mlp_tile_bytes(
    num_tokens: int,
    *,
    hidden_size: int,
    columns_per_partition: int,
    width_per_partition: int,
    element_bytes: int,
    gathers: bool = True,
    overwrites: bool = False,
) -> int:
    """Return the bytes of a tile of the MLP while its backward runs.

    The gathered input and gradient, the partial gradient of the input (H each), the outputs of the
    column-parallel layers, which their gradients overwrite, and the gradient and the recomputed
    value of the activation.

    Args:
        num_tokens: tokens of the tile.
        hidden_size: H.
        columns_per_partition: output columns of the first layer on a rank: 2 F/T for gate and up.
        width_per_partition: F/T.
        element_bytes: bytes of an activation.
        gathers: whether ranks gather input and gradient; one rank reads views of them.
        overwrites: whether the recomputed value overwrites the activation's gradient, and is free
            before the gradient of the input exists, as with the gated kernel.
    """
    gathered = 2 * hidden_size if gathers else 0
    if overwrites:
        return num_tokens * (gathered + columns_per_partition + max(hidden_size, width_per_partition)) * element_bytes
    columns = columns_per_partition + 2 * width_per_partition
    return num_tokens * (gathered + hidden_size + columns) * element_bytes


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
    """Raise ``ValueError`` unless a rank's heads can be divided into ``num_groups``; arguments as above."""
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


def stream_slots(chunk_elements: int, staging_bytes: int, *, element_bytes: int) -> int:
    """Return the chunks of optimizer states that are on the device at a time, at least 2.

    With one chunk, its update, its way back and the next one's arrival would wait for each other.

    Args:
        chunk_elements: elements of a chunk.
        staging_bytes: device memory for chunks on their way.
        element_bytes: ``states.optimizer_element_bytes``.
    """
    return max(2, staging_bytes // (chunk_elements * element_bytes))


def stream_bytes(host_elements: int, *, chunk_elements: int, staging_bytes: int, element_bytes: int) -> int:
    """Return the device memory in bytes that optimizer states on the host need on their way.

    Args:
        host_elements: elements whose states are on the host.
        chunk_elements: see ``stream_slots``.
        staging_bytes: see ``stream_slots``; the next argument too.
        element_bytes: bytes of an element's states.
    """
    if not host_elements:
        return 0
    chunk_elements = min(chunk_elements, host_elements)
    num_chunks = -(-host_elements // chunk_elements)
    slots = min(stream_slots(chunk_elements, staging_bytes, element_bytes=element_bytes), num_chunks)
    return slots * chunk_elements * element_bytes
