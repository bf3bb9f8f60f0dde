"""Memory of a GPU that no tensor uses: free parts of the allocator's pages, and of a CUDA graph's pool.

PyTorch's allocator, with expandable segments, maps pages of 2 MiB for small and of 20 MiB for large tensors, and
returns a page only when all of it is free. The figures here are fitted to steps on H200s that may not reserve
more (docs/benchmarks/planned_memory.csv).
"""

from __future__ import annotations

from nxd_memopt.config import MemoryConfig

FRAGMENT_FRACTION = 0.019
"""Part of the tensors' bytes that is free in pages of many tensors: 1.8 % measured at most."""
_FRACTION_OF_UNEQUAL_LAYERS = 0.0215
_FRACTION_OF_HEAD_GROUPS = 0.025
_FRACTION_OF_OFFLOADED_WEIGHTS = 0.023
_FRACTION_WITH_GRAPH = 0.015
_FRACTION_WITH_GRAPH_AND_MASTERS = 0.012
_FEWEST_BYTES = 136 << 20
_FEWEST_BYTES_OF_MANY_LAYERS = 192 << 20
_FEWEST_BYTES_OF_STREAMS = 208 << 20
_MANY_LAYERS = 12
_LARGE_STREAM_BYTES = 8 << 20
_LARGER_STREAM_BYTES = 32 << 20
_BESIDES_GRAPH_BYTES = 128 << 20
_BESIDES_GRAPH_AND_MASTERS_BYTES = 48 << 20
_PAGE_BYTES = 20 << 20
_HOLE_OF_GRADIENTS_BYTES = 28 << 20
_SMALL_IN_POOL_BYTES = 8 << 20
CUBLAS_WORKSPACE_BYTES = 64 << 20
"""cuBLAS workspaces of the threads of forward and backward, 32 MiB each on Hopper (PyTorch's default)."""


def fragment_bytes(
    tensors: int,
    memory: MemoryConfig,
    *,
    layers: int = 1,
    stream_bytes: int = 0,
    layer_gradient_bytes: int = 0,
    streams_states: bool = False,
) -> int:
    """Return what the allocator needs besides ``tensors`` bytes: 1.9 % of them, and at least a few pages.

    Few pages are free in parts after a backward that recomputes nothing (0 to 124 MiB measured, of 1 to 8 GiB of
    tensors) or few layers or tokens (to 112 MiB), more with at least 12 recomputed layers whose hidden states have 8
    MiB (to 176 MiB), or whose activations go to the host (to 156 MiB), and if weights or states come and go between
    larger ones (208 MiB, and of 60 GiB of tensors more than 1.9 %). Layers of which some keep their attention leave
    holes of two sizes (1.75 to 2 % measured), and attention by groups of heads has more tensors between those of the
    layers (1.5 and 2.3 %).

    Args:
        tensors: allocated bytes.
        memory: memory techniques.
        layers: decoder layers.
        stream_bytes: hidden states between two layers.
        layer_gradient_bytes: gradients of a layer's weights, of which each layer leaves a hole before the
            embedding's backward: 20 MiB measured, and 17 MiB of 104 MiB with T=4.
        streams_states: optimizer states in host memory pass through the device.
    """
    is_large = stream_bytes >= _LARGE_STREAM_BYTES
    fewest = _FEWEST_BYTES
    if (memory.cpu_offloading_weights or streams_states) and stream_bytes >= _LARGER_STREAM_BYTES:
        fewest = _FEWEST_BYTES_OF_STREAMS + stream_bytes
    elif layers >= _MANY_LAYERS and (streams_states or not _keeps_all_tensors(memory, layers)):
        is_copied = memory.num_offloaded_layers(layers) > 0
        fewest = _FEWEST_BYTES_OF_MANY_LAYERS if is_large or is_copied else _FEWEST_BYTES
    has_two_kinds = _has_unequal_layers(memory, layers)
    if is_large and has_two_kinds:
        fewest = max(fewest, _FEWEST_BYTES_OF_STREAMS)
    fraction = FRAGMENT_FRACTION
    if isinstance(memory.attention_head_groups, int):
        fraction = _FRACTION_OF_HEAD_GROUPS
    elif has_two_kinds:
        fraction = _FRACTION_OF_UNEQUAL_LAYERS
    elif memory.cpu_offloading_weights:
        fraction = _FRACTION_OF_OFFLOADED_WEIGHTS
    holes = layers * min(_HOLE_OF_GRADIENTS_BYTES, layer_gradient_bytes // 6)
    return max(fewest, holes, int(tensors * fraction))


def _has_unequal_layers(memory: MemoryConfig, layers: int) -> bool:
    """Return whether some recomputed layers keep attention's results or have their checkpoints in host memory.

    Layers of which ``block`` recomputes the first ones did not need more (measured).
    """
    if memory.recompute_granularity != "full":
        return False
    keeping = len(memory.layers_keeping_attention(layers))
    offloaded = memory.num_offloaded_layers(layers) if memory.cpu_offloading_activations else 0
    return 0 < keeping < layers or 0 < offloaded < layers


def _keeps_all_tensors(memory: MemoryConfig, layers: int) -> bool:
    """Return whether no layer is recomputed or offloaded; that of ``core_attn`` changes nothing under GPUs' kernels."""
    recomputed = set(memory.recompute_modules or ()) - {"core_attn"}
    is_full = memory.recompute_granularity == "full"
    return not (is_full or recomputed or memory.num_offloaded_layers(layers) or memory.cpu_offloading_weights)


def fragment_bytes_with_graph(
    tensors: int, outside: int, *, has_masters: bool, layers: int, layer_weight_bytes: int
) -> int:
    """Return what the allocator needs besides ``tensors`` bytes, which a CUDA graph's pool has in part.

    The update of weights with fp32 masters uses the memory of the gradients' sums: nothing to 24 MiB measured,
    without masters 24 to 123 MiB, of small models. LLaMA-3-8B with T=4, whose layers have 104 MiB in bf16, has as much
    free as the last page of each layer, 16 of 20 MiB; GPT-NeoX-20B with T=4, layers of 216 MiB, no more than others.
    The first update puts the states where activations of the steps before the graph were.

    Args:
        tensors: allocated bytes, with all of the pool.
        outside: those outside of the pool.
        has_masters: fp32 master weights.
        layers: decoder layers.
        layer_weight_bytes: weights of a layer.
    """
    fewest, fraction = _BESIDES_GRAPH_BYTES, _FRACTION_WITH_GRAPH
    if has_masters:
        fewest, fraction = _BESIDES_GRAPH_AND_MASTERS_BYTES, _FRACTION_WITH_GRAPH_AND_MASTERS
    holes = layers * min(-layer_weight_bytes % _PAGE_BYTES, layer_weight_bytes // 6)
    return max(holes, fewest, int(outside * FRAGMENT_FRACTION), int(tensors * fraction))


def graph_pool_bytes(
    peak_bytes: int,
    gradients: int,
    *,
    largest: int,
    layer: int,
    recomputed_width_bytes: int = 0,
    captures: int = 1,
    micro_batches: int = 1,
    recomputes: bool = False,
    tensor_model_parallel_size: int = 1,
) -> int:
    """Return the memory pool of a CUDA graph of forward and backward.

    The pool is as large as the peak, or as all gradients, of which the last and largest, the embedding's, finds no
    room between the others, and cuBLAS workspaces and fragments. The fragments are fitted to steps of LLaMA-3-8B,
    GPT-NeoX-20B and SmolLM2 on H200s with T=1 and 2: three quarters of a layer's gradients for each of at most two
    graphs, or, if all layers are recomputed, in all, with T above 1 five quarters.

    Args:
        peak_bytes: peak of activations, gradients and temporary tensors without a graph.
        gradients: bytes of all gradients in the dtype of the weights; the next arguments likewise.
        largest: the gradient of the largest parameter outside the layers.
        layer: the gradients of a layer, of all tensor-parallel ranks.
        recomputed_width_bytes: the widest activation, if the peak is in the last layer and this layer is recomputed.
            Its tensors do not fill the memory that the loss has freed: less than one of them, and a page, stay free.
        captures: graphs whose cuBLAS workspaces exist: two if the second one adds to the gradients of the first.
        micro_batches: micro-batches of a step; more than one have two graphs.
        recomputes: all layers are recomputed.
        tensor_model_parallel_size: T.
    """
    hole = recomputed_width_bytes + _PAGE_BYTES if recomputed_width_bytes else 0
    # A second graph of layers that keep their tensors leaves as much free as the first one.
    fragments = 3 * layer // 4 * min(micro_batches, 2)
    if recomputes:
        fragments = (3 if tensor_model_parallel_size == 1 else 5) * layer // 4
    others = captures * (CUBLAS_WORKSPACE_BYTES + _SMALL_IN_POOL_BYTES)
    return max(peak_bytes, gradients + largest) + hole + fragments + others


def unplaced_bytes(gradients: int, kept: int) -> int:
    """Return how many bytes of a layer's gradients find no room in a graph's pool, of GPT-NeoX without recompute.

    They are a third and a quarter of their sum each, and fill 0.9 - 0.2 r of the memory of the layer's tensors,
    r = kept / gradients: fitted to four steps of GPT-NeoX-20B, with 2,048 to 4,864 tokens, T=1 and 2 and r up to 0.9.
    What is left falls to nothing at r = 1.5, which is not measured. LLaMA's gradients have the sizes of its tensors.

    Args:
        gradients: bytes of the layer's gradients.
        kept: bytes that the layer keeps for backward.
    """
    # At r = 1 three tenths are left.
    if kept >= gradients:
        return max(0, 3 * (3 * gradients - 2 * kept) // 10)
    return gradients - kept * (9 * gradients - 2 * kept) // (10 * gradients)
