"""The work of a training step on one rank: FLOPs of matmuls and attention, bytes of memory and of collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nxd_memopt.architectures.parameters import ExpertShape
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.layer_tensors import merges_branches
from nxd_memopt.planner.sizes.rank_model import RankModel
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes
from nxd_memopt.planner.sizes.states import StateLayout
from nxd_memopt.planner.techniques.recomputation import Recomputation
from nxd_memopt.planner.timing.collectives import micro_batch_collectives, sent_bytes
from nxd_memopt.planner.timing.step_shape import micro_batch_shape

# Attention's backward has 5 matmuls where forward has 2.
_ATTENTION_BACKWARD = 2.5
# Kernels of norms move rows of this many elements at full bandwidth, and shorter ones in the same time.
_NORM_ROW = 1024


def layer_matmul_elements(sizes: RankSizes) -> dict[str, int]:
    """Return the elements of each weight of a layer on this rank that a token uses, by projection."""
    return sizes.weight_elements(_active_width(sizes))


def _active_width(sizes: RankSizes) -> int:
    """Return the MLP's columns that a token passes on this rank: its k experts and the shared one."""
    if sizes.moe is None:
        return sizes.width
    return sizes.moe.top_k * sizes.moe.width + sizes.moe.shared_width


def _head_elements(sizes: RankSizes) -> int:
    """Return the elements of the head on this rank."""
    if not sizes.has_head:
        return 0
    return sizes.vocab * sizes.hidden


def matmul_flops(sizes: RankSizes, memory: MemoryConfig) -> float:
    """Return the FLOPs of a micro-batch's matmuls on one rank, recomputation included.

    2 FLOPs for each weight and token in forward, 4 in backward; the same for the head. A recomputed
    layer runs its forward again but its last projection, at which PyTorch's checkpoint stops.
    """
    weights = layer_matmul_elements(sizes)
    layer = sum(weights.values())
    head = _head_elements(sizes)
    factor = per_weight = 6
    # In fp16 backward computes the logits again.
    if sizes.is_fp16:
        factor = 8
    # Frozen weights have no gradient; the adapters' own matmuls are r / H of the layers'.
    if sizes.adapters is not None:
        per_weight = 4
        factor -= 2
    flops = per_weight * layer * sizes.num_layers + factor * head
    return sizes.tokens * (flops + 2.0 * _recomputed_elements(sizes, memory, weights))


def _rounding(sizes: RankSizes) -> tuple[dict[str, int], float]:
    """Return the elements of linear layers that round to float8, and in which part of the decoder layers."""
    by_layer = [sizes.fp8_linears(index) for index in range(sizes.num_layers)]
    # All layers that round at all are alike.
    names = max(by_layer, key=len)
    weights = {name: count if name in names else 0 for name, count in sizes.linear_elements.items()}
    return weights, sum(map(bool, by_layer)) / sizes.num_layers


def fp8_flops(sizes: RankSizes, memory: MemoryConfig) -> float:
    """Return the FLOPs of ``matmul_flops`` whose operands are float8."""
    per_weight = 6 if sizes.adapters is None else 4
    flops = 0.0
    for weights, part in (_rounding(sizes), _rounding_experts(sizes)):
        elements = per_weight * sum(weights.values()) * sizes.num_layers
        flops += part * sizes.tokens * (elements + 2.0 * _recomputed_elements(sizes, memory, weights))
    return flops


def _rounding_experts(sizes: RankSizes) -> tuple[dict[str, int], float]:
    """Return ``layer_matmul_elements`` of experts that round to float8, and in which part of the decoder layers."""
    elements = dict.fromkeys(sizes.linear_elements, 0)
    rounds = sum(sizes.fp8_experts(index) for index in range(sizes.num_layers))
    if rounds:
        elements |= {
            name: layer_matmul_elements(sizes)[name] - sizes.linear_elements[name] for name in ("mlp in", "mlp out")
        }
    return elements, rounds / sizes.num_layers


def fp8_cast_bytes(sizes: RankSizes, memory: MemoryConfig) -> float:
    """Return the bytes that magnitudes and casts of float8 operands read and write in a micro-batch.

    Magnitudes read a tensor, a cast reads it again and writes a byte for each of rows and columns. Gradients of
    outputs and inputs of column-parallel layers are cast to both at once; weights, and inputs of row-parallel layers,
    to rows in forward and to columns in backward. Layers with frozen weights have no columns: an upper bound. Merged
    branches read their weights for the biases of the norms, and read and write gradients of weights, which contain the
    norms' (``ops/folded_norm.py``); the activation is computed again.
    """
    weights, part = _rounding(sizes)
    element = sizes.element_bytes
    forward = dict.fromkeys(weights, 0)
    backward = 0
    for name, weight in weights.items():
        if not weight:
            continue
        own, stream = sizes.tokens * (weight // sizes.hidden), sizes.shard_tokens * sizes.hidden
        if name in ("qkv", "mlp in"):
            forward[name] = (2 * element + 2) * stream + (2 * element + 1) * weight
            backward += (2 * element + 2) * own + (element + 1) * weight
        else:
            forward[name] = (2 * element + 1) * (own + weight)
            backward += (2 * element + 2) * stream + (element + 1) * (own + weight)
    if merges_branches(sizes, memory) and weights["qkv"] and weights["mlp in"]:
        backward += 4 * element * (weights["qkv"] + weights["mlp in"])
        backward += 2 * element * sizes.tokens * sizes.width
    once = (sum(forward.values()) + backward) * sizes.num_layers
    return part * (once + _recomputed_elements(sizes, memory, forward)) + _expert_cast_bytes(sizes, memory)


def _expert_cast_bytes(sizes: RankSizes, memory: MemoryConfig) -> float:
    """Return ``fp8_cast_bytes`` of experts, which cast rows: tokens and activation to rows, and later to columns."""
    _, part = _rounding_experts(sizes)
    if sizes.moe is None or not part:
        return 0.0
    element, rows = sizes.element_bytes, sizes.moe.rows(sizes.tokens)
    weight = sizes.moe.local_experts * sizes.hidden * sizes.moe.width
    hidden, width = rows * sizes.hidden, rows * sizes.moe.width
    forward = dict.fromkeys(sizes.linear_elements, 0)
    forward["mlp in"] = (2 * element + 1) * (hidden + 2 * weight)
    forward["mlp out"] = (2 * element + 1) * (width + weight)
    # Gradients of outputs and of gate and up to both forms; the weighted activation is measured again.
    backward = (2 * element + 2) * (hidden + 2 * width) + (2 * element + 1) * width
    backward += (element + 1) * (hidden + 3 * weight)
    once = (sum(forward.values()) + backward) * sizes.num_layers
    return part * (once + _recomputed_elements(sizes, memory, forward))


def model_flops(sizes: RankSizes, *, attention: bool = True) -> float:
    """Return the FLOPs of a micro-batch's forward and backward that the model itself needs, without recomputation.

    6 FLOPs for each weight of a matmul and token, and three times the forward of causal attention
    (arXiv:2204.02311, appendix B, which counts attention without the causal mask).

    Args:
        sizes: sizes of one rank's tensors.
        attention: whether the products of queries, keys and values count.
    """
    weights = sum(layer_matmul_elements(sizes).values()) * sizes.num_layers + _head_elements(sizes)
    pairs = 0.0
    if attention:
        pairs = sum(_attended_pairs(sizes, index) for index in range(sizes.num_layers))
    return 6.0 * sizes.tokens * weights + 3 * 4.0 * sizes.micro_batch_size * pairs * sizes.query


def _recomputed_elements(sizes: RankSizes, memory: MemoryConfig, weights: dict[str, int]) -> float:
    """Return the weight elements whose product is computed again, over all layers."""
    elements = _recomputed_by_technique(sizes, memory, weights)
    # A group of heads runs its projection again, whatever else is recomputed.
    if memory.attention_head_groups is not None:
        elements += weights["qkv"] * sizes.num_layers
    return elements


def _recomputed_by_technique(sizes: RankSizes, memory: MemoryConfig, weights: dict[str, int]) -> float:
    """Return the weight elements whose product recompute and tiles compute again, over all layers."""
    tiles = 0
    # The backward of tiles recomputes the first projections of all layers.
    if memory.mlp_tile_tokens is not None:
        tiles = sizes.num_layers * weights["mlp in"]
    if memory.recompute_granularity == "full":
        last = weights["mlp out"]
        if merges_branches(sizes, memory):
            last += weights["attention output"]
        # A tiled MLP saves its input alone: a recomputation that stops early does not run it.
        if memory.mlp_tile_tokens is not None:
            last += weights["mlp in"]
        recomputation = Recomputation.of(memory, sizes.num_layers)
        return recomputation.forwards * sum(weights.values()) - recomputation.stopped * last + tiles
    modules = set(memory.recompute_modules or ())
    recomputed = memory.num_selective_layers(sizes.num_layers)
    again = 0
    if "attn" in modules:
        again += recomputed * weights["qkv"]
    # The last projection is not run again: nothing in backward needs its output.
    if modules & {"mlp", "moe"}:
        again += recomputed * weights["mlp in"]
    return again + tiles


def attention_flops(sizes: RankSizes, memory: MemoryConfig) -> float:
    """Return the FLOPs of causal attention of a micro-batch: 2 S^2 columns forward, 2.5 times that backward.

    With windows, which layers are recomputed is not looked at: each counts as the mean of all layers.
    """
    pairs = [_attended_pairs(sizes, index) for index in range(sizes.num_layers)]
    forward = 4.0 * sizes.micro_batch_size * sum(pairs) / sizes.num_layers * sizes.query
    again = 0.0
    modules = set(memory.recompute_modules or ())
    # Kept results of attention are not computed again.
    if memory.recompute_granularity == "full":
        again = recomputed_layers(sizes, memory) - len(memory.layers_keeping_attention(sizes.num_layers))
    elif modules & {"core_attn", "attn"}:
        again = memory.num_selective_layers(sizes.num_layers)
    if memory.attention_head_groups is not None:
        again += sizes.num_layers
    return forward * ((1 + _ATTENTION_BACKWARD) * sizes.num_layers + again)


def _attended_pairs(sizes: RankSizes, index: int) -> float:
    """Return the pairs of a query and a key that it sees, of one sequence: S^2 / 2 without a window."""
    # The first w queries see 1 to w keys, w^2 / 2 together, and the other S - w queries see w keys each:
    # w^2 / 2 + (S - w) w = S w - w^2 / 2, which is S^2 / 2 with w = S.
    length = sizes.sequence_length
    window = sizes.window(index) or length
    return length * window - window**2 / 2


def elementwise_bytes(sizes: RankSizes, memory: MemoryConfig) -> float:
    """Return the bytes that norms, residuals, RoPE and activations read and write in a micro-batch.

    Measured elements of a token and layer on an H200, forward and backward: 26 H of norms and residual stream
    (GPT-NeoX 45), 4 times the rotated columns, 9 of the MLP's width (GPT-NeoX 5), 18 H for each expert of a token;
    for each forward of full recompute 8 H (GPT-NeoX 20), and the activation if the forward runs to its end.
    """
    hidden = sizes.hidden
    width = _active_width(sizes)
    # Short rows of norms take the time of longer ones.
    norms = max(hidden, _NORM_ROW)
    stream, activation, again = 45 * hidden, 5 * width, 20 * hidden
    if sizes.is_gated:
        stream, activation, again = 26 * norms, 9 * width, 8 * norms
    if sizes.moe is not None:
        activation += 18 * sizes.moe.top_k * hidden
    layers = sizes.num_layers
    recomputed = 0.0
    if memory.recompute_granularity == "full":
        recomputation = Recomputation.of(memory, layers)
        recomputed = float(recomputation.forwards * again + recomputation.complete * 3 * width)
    elif memory.recompute_granularity == "selective":
        recomputed = float(memory.num_selective_layers(layers) * 6 * norms)
    if memory.attention_head_groups is not None:
        recomputed += layers * 42 * hidden
    gathered = 4 * (sizes.query + sizes.kv) + activation
    elements = sizes.shard_tokens * stream * layers + sizes.tokens * (gathered * layers + recomputed)
    return float(elements * sizes.element_bytes)


def recomputed_layers(sizes: RankSizes, memory: MemoryConfig) -> int:
    """Return how many layers' forwards full recompute runs again: with ``nested`` a layer counts up to twice."""
    return Recomputation.of(memory, sizes.num_layers).forwards


def expert_passes(sizes: RankSizes, memory: MemoryConfig) -> int:
    """Return how many times a micro-batch passes a layer with experts: forward, backward, and what is recomputed."""
    passes = 2 * sizes.num_layers + recomputed_layers(sizes, memory)
    if "moe" in (memory.recompute_modules or ()):
        passes += memory.num_selective_layers(sizes.num_layers)
    return passes


def update_bytes(model: RankModel, layout: StateLayout, accumulation_steps: int) -> float:
    """Return the bytes that clipping and AdamW read and write in a step, of the states on the device.

    The norm reads the gradients, clipping reads and writes them. AdamW reads weight, gradient and moments and
    writes weight and moments. With masters the weights are rounded from them, and each micro-batch's gradients
    are cast, which moves 6 bytes at half the bandwidth, or added to the fp32 sums.
    """
    # Sharded states are updated by the rank that stores them.
    elements = model.num_parameters / layout.shards
    resident = elements * (1 - layout.optimizer_offload_fraction)
    size = layout.optimizer_bytes
    # 4 reads and 3 writes of AdamW, of the states on the device; the norm's read and clipping's read and write, of all
    # gradients.
    moved = 7 * size * resident + 3 * size * elements
    if not layout.master_weights:
        return moved
    moved += (FP32_BYTES + layout.element_bytes) * resident
    if layout.gradient_element_bytes > layout.element_bytes:
        moved += model.num_parameters * (12 + 10 * (accumulation_steps - 1))
    if model.sizes.is_fp16:
        # The scale of the loss is taken out, and overflows are looked for.
        moved += 2 * size * elements
    return moved


# A search asks for the same collectives with many ZeRO stages and fractions of offloaded states.
@lru_cache(maxsize=512)
def tensor_parallel_bytes(sizes: RankSizes, memory: MemoryConfig, *, stops_early: bool = True) -> float:
    """Return what a rank sends to the other tensor-parallel ranks in a micro-batch's forward and backward.

    ``planner/timing/collectives.py`` counts the collectives.

    Args:
        sizes: sizes of the rank's tensors.
        memory: recompute, tiles and groups of heads.
        stops_early: see ``Recomputation.forwards_of``.
    """
    if sizes.tensor_model_parallel_size == 1:
        return 0.0
    if sizes.moe is not None:
        sizes = replace(sizes, moe=replace(sizes.moe, expert_ranks=1))
    return sent_bytes(micro_batch_collectives(micro_batch_shape(sizes, memory), memory, stops_early=stops_early))


@lru_cache(maxsize=512)
def expert_parallel_bytes(sizes: RankSizes, memory: MemoryConfig, *, stops_early: bool = True) -> float:
    """Return what a rank sends to the other expert-parallel ranks in a micro-batch's forward and backward.

    ``planner/timing/collectives.py`` counts the collectives; arguments as ``tensor_parallel_bytes``.
    """
    # Groups of one rank send nothing.
    if sizes.moe is None or sizes.moe.expert_ranks == 1:
        return 0.0
    # Without the collectives of tensor-parallel ranks.
    shape = micro_batch_shape(replace(sizes, tensor_model_parallel_size=1), memory)
    return sent_bytes(micro_batch_collectives(shape, memory, stops_early=stops_early))


@dataclass(frozen=True)
class DataParallelBytes:
    """Bytes that a rank sends to data-parallel ranks in a step.

    Args:
        during: overlapped with forward and backward.
        after: between the last backward and the next forward.
        across_during: to other instances of hybrid sharding, overlapped with backward.
        across_after: to other instances, after backward.
    """

    during: float = 0.0
    after: float = 0.0
    across_during: float = 0.0
    across_after: float = 0.0


def data_parallel_bytes(
    model: RankModel, layout: StateLayout, accumulation_steps: int, *, instances: int = 1
) -> DataParallelBytes:
    """Return what a rank sends to reduce gradients and to gather parameters, over rings.

    An all-reduce of all gradients once a step, overlapped with the last backward if ``overlaps_reduction``
    is set. zero1: a reduce-scatter of the gradients and an all-gather of the updated weights, zero2 the same
    with a reduce-scatter in each micro-batch. zero3 gathers the weights of the layers in forward and, unless
    they are kept, in backward, and the weights of embedding, final norm and head once. The gradients of experts
    are reduced over the ranks that have the same ones.

    Args:
        model: the rank's share of the model.
        layout: ZeRO stage, ranks over which it shards, and dtypes.
        accumulation_steps: micro-batches per step.
        instances: of hybrid sharding, over which the shards' gradients are reduced too: with zero2 once a
            step, with zero3 in each micro-batch.
    """
    layers = model.sizes.num_layers
    trained = layers * _sent_elements(model.layer_shapes, layout) + _sent_elements(model.other_shapes, layout)
    gradient_bytes = layout.reduced_element_bytes
    gradients = trained * gradient_bytes
    weights = trained * layout.element_bytes
    if layout.sharding == "none":
        if layout.overlaps_reduction:
            return DataParallelBytes(during=2 * gradients)
        return DataParallelBytes(after=2 * gradients)
    # Gradients are scattered and updated weights gathered, once a step.
    if layout.sharding == "zero1":
        return DataParallelBytes(after=gradients + weights)
    # The all-reduce of a rank's shards over n instances: over a ring each element is sent 2 (n - 1) / n times.
    across = 2 * (instances - 1) / instances * model.num_parameters / layout.shards
    if layout.sharding == "zero2":
        return DataParallelBytes(
            during=gradients * accumulation_steps,
            after=weights,
            across_after=across * layout.optimizer_bytes,
        )
    in_layers = layers * _sent_elements((*model.layer_shapes, *model.frozen_layer_shapes), layout)
    in_others = _sent_elements((*model.other_shapes, *model.frozen_other_shapes), layout)
    # In forward, and again in backward unless they are kept.
    gathers = 2 - int(layout.keeps_gathered)
    gathered = (gathers * in_layers + in_others) * layout.element_bytes
    return DataParallelBytes(
        during=(gradients + gathered) * accumulation_steps,
        across_during=across * gradient_bytes * accumulation_steps,
    )


def _sent_elements(shapes: Sequence[Sequence[int]], layout: StateLayout) -> float:
    """Return the elements of parameters that a rank sends in one reduce-scatter or all-gather of them."""
    total = 0.0
    for shape in shapes:
        ranks = layout.data_parallel_size
        if isinstance(shape, ExpertShape):
            ranks //= layout.expert_ranks
        total += (ranks - 1) / ranks * math.prod(shape)
    return total
