"""The temporary tensors of head and loss."""

from __future__ import annotations

from nxd_memopt.planner.memory.layer_tensors import Kernels, Tensors
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes
from nxd_memopt.planner.techniques.peer_slots import holds_loss, longest_loss_chunk


def loss_temporaries(sizes: RankSizes, kernels: Kernels, *, fused: bool) -> Tensors:
    """Return what exists while the loss is computed, besides what forward keeps for backward.

    Args:
        sizes: sizes of the rank.
        kernels: plain operations have four fp32 tensors of a chunk: the logits, their
            softmax, the one-hot labels and the difference (``ops/cross_entropy.py``).
        fused: ``fused_linear_cross_entropy``.
    """
    stream = sizes.residual_bytes
    if not fused:
        # The logits, and their fp32 copy, which becomes the gradient in place.
        logits = sizes.tokens * sizes.vocab
        gathered = sizes.column_bytes(sizes.hidden) * int(sizes.shards > 1)
        return {"logits": logits * sizes.element_bytes, "logits in fp32": logits * FP32_BYTES, "gathered": gathered}
    # Chunks run one after the other, so that the longest one decides.
    longest = longest_loss_chunk(sizes)
    hidden = longest * sizes.hidden * sizes.element_bytes
    # dX of all tokens, into which a chunk without collectives writes its rows, counts with what is kept.
    chunk = {"logits of a chunk": longest * sizes.vocab * sizes.element_bytes}
    if not kernels.fused:
        count = 4
        # Compiled, one of them: the exponentials, of which the sum and the gradient are computed.
        if kernels.compiles_steps:
            count = 1
        chunk["logits in fp32"] = count * longest * sizes.vocab * FP32_BYTES
    if sizes.tensor_model_parallel_size > 1:
        # The next chunk's input arrives in a slot of peer memory or in a tensor.
        gathered = hidden if kernels.fused and holds_loss(sizes) else 2 * hidden
        chunk |= {"dX of a chunk": hidden, "gathered input of a chunk": gathered}
        if sizes.shards > 1:
            chunk["reduced dX of a chunk"] = hidden // sizes.shards
        if sizes.reduces_in_fp32:
            chunk["dX of a chunk in fp32"] = hidden // sizes.element_bytes * FP32_BYTES
    # The parts of dX are joined where views have memory of their own.
    if kernels.compiles_steps and sum(chunk.values()) < stream:
        chunk = {"parts of dX": stream}
    return {"input of the head": stream} | chunk
