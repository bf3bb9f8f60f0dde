"""The temporary tensors of the last decoder layer's forward pass on GPUs, when its MLP computes its output.

All layers before it keep their storages then, so that long sequences may have their peak here and not in the loss or
in backward. The sizes follow ``parallel_layers/functional/gated_mlp.py`` and ``ops/cuda/experts.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from nxd_memopt.architectures.experts import MoESizes
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.expert_tensors import expert_tensors, has_expert_kernels
from nxd_memopt.planner.memory.layer_tensors import Kernels, Tensors
from nxd_memopt.planner.sizes.rank_sizes import RankSizes


def forward_temporaries(
    sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, kept: Mapping[str, int], *, has_slots: bool
) -> Tensors:
    """Return what exists at the end of the last layer's MLP besides ``kept``.

    Empty for cases whose peak is in the loss or in backward: full recompute, tiles, MLPs without a gate,
    plain operations, experts that run in a loop, adapters with dropout, and rows that are sent to the ranks of their
    experts.

    Args:
        sizes: sizes of the rank.
        memory: memory techniques.
        kernels: operations and attention.
        kept: storages that the layer keeps for backward.
        has_slots: partial sums lie in the slots of peer memory.
    """
    if not kernels.fused or not sizes.is_gated or memory.mlp_tile_tokens is not None:
        return {}
    if sizes.adapters is not None and sizes.adapters.has_dropout:
        return {}
    if sizes.moe is None:
        tensors = _mlp(sizes, has_slots=has_slots)
        # The activation of all rows is rounded at once, before the first output.
        if "mlp out" in sizes.fp8_linears(sizes.num_layers - 1):
            tensors = {"activation": sizes.tokens * sizes.width * (sizes.element_bytes + 1)}
        # The MLP's input exists until it returns, also if backward does not read it, or in float8.
        if "normed mlp input" not in kept:
            tensors["normed mlp input"] = sizes.residual_bytes
        saved = {"gate, up": 2 * sizes.column_bytes(sizes.width)}
    elif has_expert_kernels(sizes, sizes.moe) and not sizes.moe.sends_rows:
        tensors = _experts(sizes, sizes.moe)
        if sizes.fp8_experts(sizes.num_layers - 1):
            tensors = _rounded_experts(sizes, sizes.moe, tensors)
        # The shared expert follows the routed ones.
        found = expert_tensors(sizes, sizes.moe, fused=True)
        saved = {name: size for name, size in found.items() if "shared" not in name}
    else:
        return {}
    missing = {name: size for name, size in saved.items() if name not in kept}
    return {} if missing and memory.recompute_granularity == "full" else tensors | missing


def _mlp(sizes: RankSizes, *, has_slots: bool) -> Tensors:
    """Return the activation of the rows whose output is computed, and the output."""
    # Through peer memory the rows of each rank are computed and sent one after the other.
    rows = sizes.shard_tokens if has_slots else sizes.tokens
    tensors = {
        "activation": rows * sizes.width * sizes.element_bytes,
        "output": sizes.residual_bytes,
    }
    if sizes.tensor_model_parallel_size > 1 and not has_slots:
        tensors["partial sums"] = sizes.column_bytes(sizes.hidden)
    return tensors


def _experts(sizes: RankSizes, moe: MoESizes) -> Tensors:
    """Return the activation and the outputs of all rows, and their sums over each token's experts."""
    rows = moe.rows(sizes.tokens)
    row_bytes = sizes.hidden * sizes.element_bytes
    return {
        "activation of the rows": rows * moe.width * sizes.element_bytes,
        "outputs of the rows": rows * row_bytes,
        "sums of the rows": moe.gathered_tokens(sizes.tokens) * row_bytes,
    }


def _rounded_experts(sizes: RankSizes, moe: MoESizes, tensors: Tensors) -> Tensors:
    """Return ``tensors`` of ``_experts`` with the activation in float8, which is freed in the dtype of the run."""
    activation = "activation of the rows"
    others = sum(tensors.values()) - tensors[activation]
    elements, weight = moe.rows(sizes.tokens) * moe.width, moe.local_experts * sizes.hidden * moe.width
    # Both forms exist before the outputs, then the activation and the weight in float8 next to them.
    both = (sizes.element_bytes + 1) * elements
    return tensors | {activation: max(both - others, elements + weight)}
