"""The work of a training step on one rank: FLOPs of matmuls and attention, bytes of memory and of collectives."""

from __future__ import annotations

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.formulas import nested_chunk_layers
from nxd_memopt.planner.layer_tensors import layer_runs, merges_branches
from nxd_memopt.planner.rank_model import RankModel
from nxd_memopt.planner.rank_sizes import FP32_BYTES, RankSizes
from nxd_memopt.planner.states import StateLayout

# Attention's backward has 5 matmuls where forward has 2.
_ATTENTION_BACKWARD = 2.5
# Kernels of norms move rows of this many elements at full bandwidth, and shorter ones in the same time.
_NORM_ROW = 1024


def layer_matmul_elements(sizes: RankSizes) -> dict[str, int]:
    """Return the elements of each weight of a layer on this rank that a token uses, by projection."""
    columns = 2 if sizes.is_gated else 1
    return {
        "qkv": (sizes.query + 2 * sizes.kv) * sizes.hidden,
        "attention output": sizes.query * sizes.hidden,
        "mlp in": columns * _active_width(sizes) * sizes.hidden,
        "mlp out": _active_width(sizes) * sizes.hidden,
    }


def _active_width(sizes: RankSizes) -> int:
    """Return the MLP's columns that a token passes on this rank: those of its k experts and of the shared one."""
    return sizes.width if sizes.moe is None else sizes.moe.top_k * sizes.moe.width + sizes.moe.shared_width


def matmul_flops(sizes: RankSizes, memory: MemoryConfig) -> float:
    """Return the FLOPs of a micro-batch's matmuls on one rank, recomputation included.

    2 FLOPs for each weight and token in forward, 4 in backward; the same for the head. A recomputed
    layer runs its forward again but its last projection, at which PyTorch's checkpoint stops.
    """
    weights = layer_matmul_elements(sizes)
    layer = sum(weights.values())
    head = sizes.vocab * sizes.hidden
    factor = 6 if not sizes.is_fp16 else 8
    per_weight = 6.0
    # Frozen weights have no gradient; the adapters' own matmuls are r / H of the layers'.
    if sizes.adapters is not None:
        per_weight = 4.0
        factor -= 2
    flops = per_weight * layer * sizes.num_layers + factor * head
    return sizes.tokens * (flops + 2.0 * _recomputed_elements(sizes, memory, weights))


def model_flops(sizes: RankSizes, *, attention: bool = True) -> float:
    """Return the FLOPs of a micro-batch's forward and backward that the model itself needs, without recomputation.

    6 FLOPs for each weight of a matmul and token, and three times the forward of causal attention
    (arXiv:2204.02311, appendix B, which counts attention without the causal mask).

    Args:
        sizes: sizes of one rank's tensors.
        attention: whether the products of queries, keys and values count.
    """
    weights = sum(layer_matmul_elements(sizes).values()) * sizes.num_layers + sizes.vocab * sizes.hidden
    pairs = sum(_attended_pairs(sizes, index) for index in range(sizes.num_layers)) if attention else 0.0
    return 6.0 * sizes.tokens * weights + 3 * 4.0 * sizes.micro_batch_size * pairs * sizes.query


def _recomputed_elements(sizes: RankSizes, memory: MemoryConfig, weights: dict[str, int]) -> float:
    """Return the weight elements whose product is computed again, over all layers."""
    # A group of heads runs its projection again, whatever else is recomputed.
    again = weights["qkv"] if memory.attention_head_groups is not None else 0
    return again * sizes.num_layers + _recomputed_by_technique(sizes, memory, weights)


def _recomputed_by_technique(sizes: RankSizes, memory: MemoryConfig, weights: dict[str, int]) -> float:
    """Return the weight elements whose product recompute and tiles compute again, over all layers."""
    layer = sum(weights.values())
    last = weights["mlp out"]
    if merges_branches(sizes.model_type, memory, parallel_residual=sizes.mergeable):
        last += weights["attention output"]
    if memory.recompute_granularity == "full":
        resident = 0 if memory.cpu_offloading_activations else memory.num_offloaded_layers(sizes.num_layers)
        depth = sizes.num_layers - resident
        if memory.recompute_method == "block":
            return (memory.recompute_num_layers or depth) * (layer - last)
        chunk = memory.recompute_num_layers or 1
        if memory.recompute_method == "nested":
            chunk = memory.recompute_num_layers or nested_chunk_layers(depth)
            # Each layer once more, and all but the last of a chunk twice.
            return depth * (layer - last) + (depth - -(-depth // chunk)) * layer
        return depth * layer - depth // chunk * last
    modules = set(memory.recompute_modules or ())
    recomputed = memory.num_selective_layers(sizes.num_layers)
    again = 0
    if "attn" in modules:
        again += recomputed * weights["qkv"]
    if modules & {"mlp", "moe"}:
        again += recomputed * weights["mlp in"]
    if memory.mlp_tile_tokens is not None:
        again += sizes.num_layers * weights["mlp in"]
    return again


def attention_flops(sizes: RankSizes, memory: MemoryConfig) -> float:
    """Return the FLOPs of causal attention of a micro-batch: 2 S^2 columns forward, 2.5 times that backward.

    With windows, which layers are recomputed is not looked at: each counts as the mean of all layers.
    """
    pairs = [_attended_pairs(sizes, index) for index in range(sizes.num_layers)]
    forward = 4.0 * sizes.micro_batch_size * sum(pairs) / sizes.num_layers * sizes.query
    again = 0.0
    modules = set(memory.recompute_modules or ())
    if memory.recompute_granularity == "full":
        resident = 0 if memory.cpu_offloading_activations else memory.num_offloaded_layers(sizes.num_layers)
        again = sizes.num_layers - resident
        if memory.recompute_method == "block":
            again = memory.recompute_num_layers or again
        if memory.recompute_method == "nested":
            # Each layer once more, and all but the last of a chunk twice.
            chunk = memory.recompute_num_layers or nested_chunk_layers(sizes.num_layers)
            again += sizes.num_layers - -(-sizes.num_layers // chunk)
        again -= len(memory.layers_keeping_attention(sizes.num_layers))
    elif modules & {"core_attn", "attn"}:
        again = memory.num_selective_layers(sizes.num_layers)
    if memory.attention_head_groups is not None:
        again += sizes.num_layers
    return forward * ((1 + _ATTENTION_BACKWARD) * sizes.num_layers + again)


def _attended_pairs(sizes: RankSizes, index: int) -> float:
    """Return the pairs of a query and a key that it sees, of one sequence: S^2 / 2 without a window."""
    length = sizes.sequence_length
    window = sizes.window(index) or length
    return length * window - window**2 / 2


def elementwise_bytes(sizes: RankSizes, memory: MemoryConfig) -> float:
    """Return the bytes that norms, residuals, RoPE and activations read and write in a micro-batch.

    Measured elements of a token and layer on an H200, forward and backward: 26 H of norms and residual stream
    (GPT-NeoX 45), 4 times the rotated columns, 9 of the MLP's width (GPT-NeoX 5), 18 H for each expert of a token;
    again with full recompute 8 H (GPT-NeoX 20), and the activation if a chunk has several layers.
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
        count = memory.recompute_num_layers if memory.recompute_method == "block" else None
        recomputed = float((count or layers) * again)
        if memory.recompute_method in ("uniform", "nested"):
            recomputed += layers * 3 * width
        if memory.recompute_method == "nested":
            recomputed *= 2
    elif memory.recompute_granularity == "selective":
        recomputed = float(memory.num_selective_layers(layers) * 6 * norms)
    if memory.attention_head_groups is not None:
        recomputed += layers * 42 * hidden
    gathered = 4 * (sizes.query + sizes.kv) + activation
    elements = sizes.shard_tokens * stream * layers + sizes.tokens * (gathered * layers + recomputed)
    return float(elements * sizes.element_bytes)


def recomputed_layers(sizes: RankSizes, memory: MemoryConfig) -> int:
    """Return how many layers' forwards full recompute runs again: with ``nested`` a layer counts up to twice."""
    if memory.recompute_granularity != "full":
        return 0
    resident = 0 if memory.cpu_offloading_activations else memory.num_offloaded_layers(sizes.num_layers)
    depth = sizes.num_layers - resident
    if memory.recompute_method == "block":
        return memory.recompute_num_layers or depth
    if memory.recompute_method == "nested":
        chunk = memory.recompute_num_layers or nested_chunk_layers(depth)
        return 2 * depth - -(-depth // chunk)
    return depth


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
    elements = model.num_parameters / layout.shards
    resident = elements * (1 - layout.optimizer_offload_fraction)
    size = layout.optimizer_bytes
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


def tensor_parallel_bytes(sizes: RankSizes, memory: MemoryConfig) -> float:
    """Return what a rank sends to the others in a micro-batch's forward and backward.

    A block has an all-gather and a reduce-scatter in forward and two and one in backward with
    sequence parallelism, an all-reduce in each without it, which sends as much as two
    (``planner/collectives.py``). Recomputation gathers again.
    """
    if sizes.tensor_model_parallel_size == 1:
        return 0.0
    # The head gathers its input and scatters its gradient, the embedding scatters and gathers.
    transfers = 4
    for count, techniques in layer_runs(memory, sizes.num_layers):
        transfers += count * _layer_transfers(sizes, techniques)
    full = sizes.tokens * sizes.hidden * sizes.element_bytes
    share = (sizes.tensor_model_parallel_size - 1) / sizes.tensor_model_parallel_size
    return share * full * transfers


def expert_parallel_bytes(sizes: RankSizes, memory: MemoryConfig) -> float:
    """Return what a rank sends to the other expert-parallel ranks in a micro-batch's forward and backward.

    Forward and backward exchange twice each: tokens or rows on their way to the experts, and back.
    Recomputation does so as forward.
    """
    if sizes.moe is None or sizes.moe.expert_ranks == 1:
        return 0.0
    ranks = sizes.moe.expert_ranks
    tokens = ranks * sizes.tokens if sizes.moe.gathers_tokens else sizes.moe.rows(sizes.tokens)
    exchanges = 4 * sizes.num_layers
    if memory.recompute_granularity == "full":
        exchanges += 2 * sizes.num_layers
    elif "moe" in (memory.recompute_modules or ()):
        exchanges += 2 * memory.num_selective_layers(sizes.num_layers)
    return (ranks - 1) / ranks * tokens * sizes.hidden * sizes.element_bytes * exchanges


def _layer_transfers(sizes: RankSizes, memory: MemoryConfig) -> int:
    """Return how many times a layer gathers or scatters a full activation, forward and backward."""
    merged = merges_branches(sizes.model_type, memory, parallel_residual=sizes.mergeable)
    blocks = 1 if merged else 2
    if sizes.moe is not None and sizes.moe.shared_width:
        blocks += 1
    transfers = 5 if sizes.shards > 1 else 4
    if memory.recompute_granularity == "full":
        transfers += 2
    per_layer = blocks * transfers
    if sizes.shards > 1:
        # The recompute of a block gathers its input and stops before its reduction.
        per_layer += len({"attn", "mlp"} & set(memory.recompute_modules or ()))
    groups = memory.attention_head_groups
    if isinstance(groups, int):
        # Each group gathers the input and reduces its output, and its backward gathers once more.
        per_layer += (groups - 1) * transfers + 2 * groups
    return per_layer
