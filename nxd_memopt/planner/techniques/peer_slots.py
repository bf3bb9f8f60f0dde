"""Bytes of the slots of peer memory, through which the ranks of a host gather and reduce activations."""

from __future__ import annotations

from functools import lru_cache

from nxd_memopt.planner.sizes.rank_sizes import RankSizes
from nxd_memopt.planner.techniques.loss_chunks import DEFAULT_LOGITS_BYTES, chunk_ranges

MIN_BYTES = 20 << 20
"""Smallest shard that ``backends/cuda/backend.py`` sends through peer memory instead of NCCL."""
MIN_BYTES_AHEAD = 1 << 20
"""The same in CUDA graphs and in the fused loss, whose launches are ahead of the device."""
_SLOTS = 2
"""Slots of gathers, and of reductions, of a full activation each."""


# A search asks for the same sizes with every memory technique.
@lru_cache(maxsize=512)
def longest_loss_chunk(sizes: RankSizes) -> int:
    """Return the tokens of the fused loss's longest chunk, of all ranks whose tokens are gathered."""
    return max(stop - start for start, stop in loss_chunks(sizes)) * sizes.shards


def loss_chunks(sizes: RankSizes) -> list[tuple[int, int]]:
    """Return the ranges of local rows of the fused loss's chunks, as the loss itself computes them."""
    exchanged = 0
    # Per token of a chunk: gathered input, partial dX and reduced dX.
    if sizes.tensor_model_parallel_size > 1:
        exchanged = 3 * sizes.hidden
    return chunk_ranges(
        sizes.shard_tokens,
        gathered=sizes.shards,
        vocab=sizes.vocab,
        exchanged=exchanged,
        logits_bytes=DEFAULT_LOGITS_BYTES,
        element_bytes=sizes.element_bytes,
    )


def holds_layers(sizes: RankSizes, *, cuda_graph: bool, element_bytes: int | None = None) -> bool:
    """Return whether the activations of layers pass through slots.

    Args:
        sizes: sizes of the rank.
        cuda_graph: forward and backward are one CUDA graph.
        element_bytes: bytes of an element that is sent; default ``RankSizes.gathered_element_bytes``.
    """
    # The launches of a graph are ahead of the device, so that smaller shards gain from peer memory too.
    smallest = MIN_BYTES
    if cuda_graph:
        smallest = MIN_BYTES_AHEAD
    shard = sizes.shard_tokens * sizes.hidden * (element_bytes or sizes.gathered_element_bytes)
    # Without sequence parallelism there are all-reduces only, which NCCL computes.
    return sizes.shards > 1 and shard >= smallest


def holds_loss(sizes: RankSizes, *, element_bytes: int | None = None) -> bool:
    """Return whether the chunks of the fused loss pass through slots; arguments as ``holds_layers``."""
    shard = longest_loss_chunk(sizes) // sizes.shards * sizes.hidden * (element_bytes or sizes.element_bytes)
    return sizes.shards > 1 and shard >= MIN_BYTES_AHEAD


def slot_bytes(sizes: RankSizes, *, fused_loss: bool, cuda_graph: bool) -> int:
    """Return the bytes of all slots of a rank.

    Args:
        sizes: sizes of the rank.
        fused_loss: ``fused_linear_cross_entropy``.
        cuda_graph: forward and backward are one CUDA graph.
    """
    total = 0
    # Of gathers and of reductions, which the backend decides by their own bytes. The loss gathers in its own dtype.
    for of_layers, of_loss in (
        (sizes.gathered_element_bytes, sizes.element_bytes),
        (sizes.reduced_element_bytes, sizes.reduced_element_bytes),
    ):
        row_bytes = 0
        if holds_layers(sizes, cuda_graph=cuda_graph, element_bytes=of_layers):
            row_bytes = sizes.tokens * of_layers
        if fused_loss and holds_loss(sizes, element_bytes=of_loss):
            row_bytes = max(row_bytes, longest_loss_chunk(sizes) * of_loss)
        # A head that computes all logits gathers all tokens at once.
        if not fused_loss and sizes.has_head and holds_layers(sizes, cuda_graph=cuda_graph, element_bytes=of_loss):
            row_bytes = max(row_bytes, sizes.tokens * of_loss)
        total += _SLOTS * sizes.hidden * row_bytes
    return total
