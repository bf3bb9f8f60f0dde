"""The peak of a rank's memory in a training step, by term, at the moment at which it is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.activations import SHARED_TENSORS, Activations, activations, host_pool_bytes
from nxd_memopt.planner.memory.allocator import (
    CUBLAS_WORKSPACE_BYTES,
    fragment_bytes,
    fragment_bytes_with_graph,
    graph_pool_bytes,
    unplaced_bytes,
)
from nxd_memopt.planner.memory.backward_peak import ABSENT, casts_gradients, in_backward
from nxd_memopt.planner.memory.forward import forward_temporaries
from nxd_memopt.planner.memory.gradient_reduction import BackwardReduction, gathered_bytes
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.memory.loss import loss_temporaries
from nxd_memopt.planner.sizes.rank_model import RankModel, elements
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes
from nxd_memopt.planner.sizes.states import (
    ADAM_MOMENTS,
    CHUNK_ELEMENTS,
    StateLayout,
    gradient_bytes,
    master_bytes,
    moment_bytes,
    offloaded_state_bytes,
    optimizer_element_bytes,
    shard_bytes,
    stream_bytes,
    weight_bytes,
)
from nxd_memopt.planner.techniques import peer_slots
from nxd_memopt.planner.techniques.buckets import GRADIENT_BUCKET_BYTES
from nxd_memopt.planner.techniques.offloaded_weights import OffloadedWeights
from nxd_memopt.planner.techniques.recomputation import Recomputation

SMALL_TENSORS_BYTES = 8 << 20
"""Tensors below 1 MiB that no term counts: sums over tokens, parts of sums, statistics. At most 3 MiB measured."""
SEGMENT_BYTES = 2 << 20
"""PyTorch's allocator takes memory in multiples of this."""
GRAPH_POOL = "CUDA graph's pool"
"""Term of the pool of a CUDA graph, besides its gradients."""
_STAGE1_BUCKET_BYTES = 128 << 20
_UNSORTED_TOKENS = 3072
"""PyTorch's embedding on a GPU sorts more tokens than these, to add up the gradients of each row in fp32."""
_ROWS_PER_PARTIAL_SUM = 10
"""Gradients that it adds up to one partial sum."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank at the peak of a step.

    Args:
        moment: where in the step the peak is.
        device: purpose -> bytes on the device.
        host: purpose -> bytes of host memory for offloading.
        forward_backward_bytes: bytes on the device at the peak of forward and backward, without the update.
        fragment_bytes: what PyTorch's caching allocator needs besides, of a GPU.
    """

    moment: str
    device: dict[str, int]
    host: dict[str, int]
    forward_backward_bytes: int
    fragment_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """Sum of the device's terms."""
        return sum(self.device.values())

    @property
    def reserved_bytes(self) -> int:
        """What PyTorch's caching allocator needs of a GPU: also parts of its segments that no tensor uses.

        While memory is left it takes more, up to a tenth (measured), and returns that before it fails.
        """
        reserved = self.device_bytes + self.fragment_bytes
        return -(-reserved // SEGMENT_BYTES) * SEGMENT_BYTES

    @property
    def host_bytes(self) -> int:
        """Sum of the host's terms."""
        return sum(self.host.values())


def step_memory(
    model: RankModel,
    memory: MemoryConfig,
    kernels: Kernels,
    layout: StateLayout,
    *,
    accumulation_steps: int = 1,
    cuda_graph: bool = False,
) -> StepMemory:
    """Return the peak memory of a training step.

    Args:
        model: the rank's share of the model.
        memory: memory techniques.
        kernels: operations and attention.
        layout: weights, gradients and states.
        accumulation_steps: micro-batches per step; from the second on, gradients stand in forward.
        cuda_graph: forward and backward are one CUDA graph.
    """
    kept = activations(model.sizes, memory, kernels)
    on_host = _offloaded_states(model, layout)
    standing = _standing(model, layout, on_host)
    gradients = model.total(gradient_bytes, layout)
    # A compiled program has the memory of its results, the gradients, from its first operation on.
    start = gradients if accumulation_steps > 1 or kernels.compiles_steps else 0
    offloaded = OffloadedWeights.of(model.layer_shapes, memory, layout, model.sizes.num_layers)
    buffers = _library_buffers(model.sizes, memory, kernels, cuda_graph=cuda_graph)
    has_slots = kernels.fused and peer_slots.holds_layers(model.sizes, cuda_graph=cuda_graph)
    candidates = [
        _in_forward(model, memory, kernels, kept, start, offloaded, has_slots=has_slots),
        _in_loss(model, memory, kernels, kept, layout, start, offloaded),
        in_backward(model, memory, kernels, kept, layout, start, offloaded, has_slots=has_slots),
        *_in_embedding(model, memory, kernels, layout, gradients, start),
        ("update", _in_update(model, layout, gradients)),
    ]
    _add_gathered_weights(candidates, model, memory, layout)
    moment, transient = max(candidates, key=lambda each: sum(each[1].values()))
    before_update = max(sum(terms.values()) for _, terms in candidates[:-1]) - sum(transient.values())
    # Of the weights, which a moment has without those that wait in host memory.
    absent = -transient.pop(ABSENT, 0)
    standing["weights"] -= absent
    if cuda_graph:
        moment, before_update = "update", 0
        transient = _with_graph(model, memory, kernels, kept, layout, candidates[-1][1], accumulation_steps)
    host = {
        "optimizer states": on_host,
        "activations": host_pool_bytes(kept, memory),
        "weights": offloaded.host_bytes(model.sizes.num_layers),
    }
    device = {**standing, **buffers, **transient}
    fragments = _fragment_bytes(model, memory, layout, device, cuda_graph=cuda_graph, streams_states=on_host > 0)
    return StepMemory(moment, device, host, sum(device.values()) + before_update, fragments)


def _fragment_bytes(
    model: RankModel,
    memory: MemoryConfig,
    layout: StateLayout,
    device: Mapping[str, int],
    *,
    cuda_graph: bool,
    streams_states: bool,
) -> int:
    """Return what a GPU's allocator needs besides the terms of ``device``; other arguments as ``step_memory``."""
    sizes = model.sizes
    total = sum(device.values())
    if cuda_graph:
        # The pool, with most of the gradients, counts with its fragments.
        return fragment_bytes_with_graph(
            total,
            total - device[GRAPH_POOL] - device["gradients"],
            has_masters=layout.master_weights,
            layers=sizes.num_layers,
            layer_weight_bytes=weight_bytes(model.layer_shapes, layout),
        )
    return fragment_bytes(
        total,
        memory,
        layers=sizes.num_layers,
        stream_bytes=sizes.shard_tokens * sizes.hidden * sizes.element_bytes,
        layer_gradient_bytes=gradient_bytes(model.layer_shapes, layout),
        streams_states=streams_states,
    )


def _with_graph(
    model: RankModel,
    memory: MemoryConfig,
    kernels: Kernels,
    kept: Activations,
    layout: StateLayout,
    update: Mapping[str, int],
    accumulation_steps: int,
) -> dict[str, int]:
    """Return the terms in the update after a CUDA graph of forward and backward, whose pool no other tensor uses.

    The graph has gradients in the dtype of the weights in its pool; sums in fp32 exist besides it.

    Args:
        model: the rank's share of the model; the next arguments as ``step_memory``.
        memory: memory techniques.
        kernels: operations and attention.
        kept: activations.
        layout: weights, gradients and states.
        update: terms of the update without a graph.
        accumulation_steps: micro-batches per step.
    """
    in_graph = replace(layout, grad_reduce_in_fp32=False)
    offloaded = OffloadedWeights.of(model.layer_shapes, memory, layout, model.sizes.num_layers)
    has_slots = peer_slots.holds_layers(model.sizes, cuda_graph=True)
    gradients = model.total(gradient_bytes, in_graph)
    sums = model.total(gradient_bytes, layout) if casts_gradients(layout) else 0
    # From the second micro-batch on, the graph adds to the gradients in its pool, unless hooks have moved them
    # to sums besides it.
    standing = gradients if accumulation_steps > 1 and not sums else 0
    forward = _in_forward(model, memory, kernels, kept, standing, offloaded, has_slots=has_slots)
    loss = _in_loss(model, memory, kernels, kept, in_graph, standing, offloaded)
    backward = in_backward(model, memory, kernels, kept, in_graph, standing, offloaded, has_slots=has_slots)
    in_embedding = gradients + _embedding_temporaries(model, memory, kernels, in_graph)
    peak = max(in_embedding, *(sum(terms.values()) for _, terms in (forward, loss, backward)))
    # The gradients of a large model leave room for it elsewhere.
    is_wide = peak - standing > 2 * gradients
    is_last = backward[0].startswith(f"backward of layer {model.sizes.num_layers - 1}:")
    width = _recomputed_width_bytes(model.sizes, memory) if is_wide else 0
    if not is_last:
        # Of a chunk of layers, which exist again at the same time, half of it (the only one measured).
        width = width // 2 if memory.recompute_method == "uniform" else 0
    pool = graph_pool_bytes(
        peak,
        gradients,
        largest=max((gradient_bytes([shape], in_graph) for shape in model.other_shapes), default=0),
        layer=gradient_bytes(model.layer_shapes, in_graph) * model.sizes.tensor_model_parallel_size,
        recomputed_width_bytes=width,
        captures=2 if standing else 1,
        micro_batches=accumulation_steps,
        recomputes=_recomputes_all_layers(model.sizes, memory),
        tensor_model_parallel_size=model.sizes.tensor_model_parallel_size,
    )
    if model.sizes.is_fp16:
        # 23 and 37 MiB more were measured: a workspace for the head's gradients, which backward computes.
        pool += CUBLAS_WORKSPACE_BYTES // 2
    if not standing:
        pool = max(pool, _grown_pool(model, memory, kernels, kept, in_graph, offloaded))
        if not model.sizes.is_gated and memory.recompute_granularity != "full":
            before = sum(loss[1].values())
            layer = gradient_bytes(model.layer_shapes, in_graph)
            pool = max(pool, before + sum(unplaced_bytes(layer, sum(own.values())) for own in kept.layers))
    buffers = {name: size for name, size in update.items() if name not in ("gradients", "temporary tensors")}
    return {"gradients": gradients + sums, **buffers, GRAPH_POOL: pool - gradients}


def _grown_pool(
    model: RankModel,
    memory: MemoryConfig,
    kernels: Kernels,
    kept: Activations,
    layout: StateLayout,
    offloaded: OffloadedWeights,
) -> int:
    """Return the pool of a graph that recomputes all layers, if gradients are larger than what these keep.

    The tensors of every layer lie where those of the layer before were. A gradient of a weight finds room in the
    checkpoints that are free by then only if it is not larger than one; the pool grows by all others.
    """
    sizes = model.sizes
    if not _recomputes_all_layers(sizes, memory):
        return 0
    checkpoint = sizes.shard_tokens * sizes.hidden * sizes.element_bytes
    grown = [size for shape in model.layer_shapes if (size := gradient_bytes([shape], layout)) > checkpoint]
    if not grown:
        return 0
    without_gradients = replace(layout, in_backward=True)
    _, last_layer = in_backward(model, memory, kernels, kept, without_gradients, 0, offloaded, has_slots=False)
    # The largest gradient of the last layer counts among its temporary tensors.
    layers = sizes.num_layers * sum(grown) - max(grown)
    others = gradient_bytes(model.other_shapes, layout)
    return sum(last_layer.values()) + layers + others + CUBLAS_WORKSPACE_BYTES


def _recomputes_all_layers(sizes: RankSizes, memory: MemoryConfig) -> bool:
    """Return whether full recompute covers every layer; ``block`` may cover the first ones only."""
    if memory.recompute_granularity != "full":
        return False
    return memory.recompute_method != "block" or (memory.recompute_num_layers or 0) >= sizes.num_layers


def _recomputed_width_bytes(sizes: RankSizes, memory: MemoryConfig) -> int:
    """Return the bytes of the MLP's activation if the last layer computes it again, for all tokens at once."""
    if not _recomputes_all_layers(sizes, memory) or memory.mlp_tile_tokens is not None:
        return 0
    if sizes.moe is not None:
        return sizes.moe.rows(sizes.tokens) * sizes.moe.width * sizes.element_bytes
    return sizes.tokens * sizes.width * sizes.element_bytes


def _library_buffers(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, *, cuda_graph: bool) -> dict[str, int]:
    """Return what libraries and peer memory allocate on GPUs, next to tensors."""
    if not kernels.fused:
        return {}
    buffers = {"cuBLAS workspaces": CUBLAS_WORKSPACE_BYTES, "small tensors": SMALL_TENSORS_BYTES}
    slots = peer_slots.slot_bytes(sizes, fused_loss=memory.fused_linear_cross_entropy, cuda_graph=cuda_graph)
    return buffers | ({"peer memory": slots} if slots else {})


def _standing(model: RankModel, layout: StateLayout, on_host: int) -> dict[str, int]:
    """Return what exists throughout the step, with ``on_host`` bytes of the states in host memory."""
    states = {
        "weights": model.total(weight_bytes, layout) + model.frozen_bytes(layout),
        "master weights": model.total(master_bytes, layout),
        "optimizer moments": model.total(moment_bytes, layout),
    }
    # Of 12 bytes in host memory 4 are masters and 8 moments, of 10 bytes 2 and 8.
    element_bytes = optimizer_element_bytes(param_remainders=layout.param_remainders)
    count = on_host // element_bytes
    states["master weights"] -= count * layout.master_element_bytes
    states["optimizer moments"] -= count * ADAM_MOMENTS * layout.optimizer_bytes
    if on_host:
        states["staging of optimizer states"] = stream_bytes(
            count,
            chunk_elements=CHUNK_ELEMENTS,
            staging_bytes=layout.staging_bytes,
            element_bytes=element_bytes,
        )
    if on_host and layout.sharding == "zero1" and layout.shards > 1:
        # Updated weights of the rank's shards, from which parameters are gathered.
        states["inputs of the all-gather"] = (
            model.total(shard_bytes, layout) // layout.optimizer_bytes * layout.element_bytes
        )
    return states


# A search asks for the same states with every memory technique.
@lru_cache(maxsize=512)
def _offloaded_states(model: RankModel, layout: StateLayout) -> int:
    """Return the bytes of optimizer states in host memory."""
    if not layout.optimizer_offload_fraction:
        return 0
    return offloaded_state_bytes(model.shapes, layout)


def _in_forward(
    model: RankModel,
    memory: MemoryConfig,
    kernels: Kernels,
    kept: Activations,
    gradients: int,
    offloaded: OffloadedWeights,
    *,
    has_slots: bool,
) -> tuple[str, dict[str, int]]:
    """Return the terms at the end of the last layer's MLP in forward; no terms if another moment always has more."""
    own = {**kept.layers[-1], **kept.offloaded[-1]}
    temporaries = forward_temporaries(model.sizes, memory, kernels, own, has_slots=has_slots)
    if not temporaries:
        return "forward", {}
    shared = sum(kept.around.get(name, 0) for name in SHARED_TENSORS)
    return "forward of the last layer", {
        ABSENT: -offloaded.absent_bytes(model.sizes.num_layers, model.sizes.num_layers - 1),
        "gradients": gradients,
        "activations": sum(kept.layer_bytes) + sum(kept.offloaded[-1].values()) + shared,
        "temporary tensors": sum(temporaries.values()),
    }


def _in_loss(
    model: RankModel,
    memory: MemoryConfig,
    kernels: Kernels,
    kept: Activations,
    layout: StateLayout,
    gradients: int,
    offloaded: OffloadedWeights,
) -> tuple[str, dict[str, int]]:
    """Return the terms while the loss is computed: all activations exist."""
    temporaries = sum(loss_temporaries(model.sizes, kernels, fused=memory.fused_linear_cross_entropy).values())
    # In fp16 the gradient of the head is computed in backward, and so does not count as kept.
    if model.sizes.is_fp16 and memory.fused_linear_cross_entropy and model.sizes.adapters is None:
        temporaries += model.sizes.vocab * model.sizes.hidden * model.sizes.element_bytes
    # The host runs ahead of the device, and leaves the copy of the last checkpoint to it.
    in_flight = sum(kept.offloaded[-1].values()) if kernels.fused and memory.cpu_offloading_activations else 0
    # The head's gradient is cast before that of any layer.
    if not gradients and casts_gradients(layout):
        temporaries = max(temporaries, gradient_bytes(model.head, layout))
    return "loss", {
        ABSENT: -offloaded.absent_bytes(model.sizes.num_layers),
        "gradients": gradients,
        "activations": kept.device_bytes + in_flight,
        "temporary tensors": temporaries,
    }


def _in_update(model: RankModel, layout: StateLayout, gradients: int) -> dict[str, int]:
    """Return the terms while the optimizer runs: all gradients, and the buffers of its collectives."""
    update = {"gradients": gradients, "temporary tensors": 0}
    counts = [math.prod(shape) for shape in (*model.layer_shapes, *model.other_shapes)]
    largest = max(counts) * layout.gradient_element_bytes
    if layout.sharding == "zero1" and layout.shards > 1:
        # This rank's reduced shards, and a copy of a bucket's gradients; a second, padded one of gradients
        # that do not divide.
        copies = 1
        if any(count % layout.shards for count in counts):
            copies = 2
        update["reduced gradients"] = model.total(shard_bytes, layout)
        # Then weights are gathered: a bucket's of all ranks, the rank's own, and a copy of these next to each other.
        weights = model.total(weight_bytes, layout)
        gathered = max(min(_STAGE1_BUCKET_BYTES, weights), max(counts) * layout.element_bytes)
        gathered += 2 * gathered // layout.shards
        bucket = max(min(_STAGE1_BUCKET_BYTES, gradients), largest)
        update["gradient buckets"] = max(copies * bucket, gathered)
    elif layout.sharding == "none" and layout.data_parallel_size > 1 and not layout.overlaps_reduction:
        # A copy of a bucket's gradients, and its sum over the ranks.
        update["gradient buckets"] = 2 * min(max(GRADIENT_BUCKET_BYTES, largest), gradients)
    offloaded = layout.optimizer_offload_fraction > 0
    if layout.shards == 1 and layout.gradient_element_bytes < layout.optimizer_bytes and not offloaded:
        # All gradients are cast before the first update, because the norm is of all of them. The
        # optimizer with states on the host casts those of a chunk at a time instead.
        update["reduced gradients"] = model.total(shard_bytes, layout)
    return update


def _add_gathered_weights(
    candidates: Sequence[tuple[str, dict[str, int]]], model: RankModel, memory: MemoryConfig, layout: StateLayout
) -> None:
    """Add the weights that stage 3 has gathered to the terms of forward, loss and the embedding's backward."""
    if layout.sharding != "zero3" or layout.shards == 1:
        return
    forward, loss, _, embedding, *_ = candidates
    depth = model.sizes.num_layers
    unit = Recomputation.of(memory, depth).unit(depth - 1)
    for _, terms in (forward, loss):
        terms["gathered weights"] = gathered_bytes(model, layout, depth if layout.keeps_gathered else len(unit))
    embedding[1]["gathered weights"] = gathered_bytes(model, layout, 0)


def _in_embedding(
    model: RankModel, memory: MemoryConfig, kernels: Kernels, layout: StateLayout, gradients: int, start: int
) -> list[tuple[str, dict[str, int]]]:
    """Return the terms in the embedding's backward, which computes the last gradient, and while this is reduced."""
    reduction = BackwardReduction.of(model, memory, layout, accumulates=start > 0).buckets
    temporary = _embedding_temporaries(model, memory, kernels, layout)
    backward = {"gradients": gradients, "temporary tensors": temporary, "gradient buckets": reduction.in_embedding}
    reduced = {"gradients": gradients, "gradient buckets": reduction.after_embedding}
    return [("backward of the embedding", backward), ("reduction of the embedding's gradient", reduced)]


def _embedding_temporaries(model: RankModel, memory: MemoryConfig, kernels: Kernels, layout: StateLayout) -> int:
    """Return the bytes of the embedding's backward besides all gradients."""
    sizes = model.sizes
    # The gradient of its output, and with sequence parallelism that of all tokens.
    temporary = sizes.shard_tokens * sizes.hidden * sizes.element_bytes
    if sizes.shards > 1:
        temporary += sizes.tokens * sizes.hidden * sizes.element_bytes
    if kernels.fused and sizes.tokens > _UNSORTED_TOKENS:
        rows = sizes.tokens // _ROWS_PER_PARTIAL_SUM + min(sizes.tokens, sizes.vocab)
        temporary += rows * sizes.hidden * FP32_BYTES
    if casts_gradients(layout) and model.embedding:
        # Its gradient exists before its fp32 sum, and next to it; so does that of a tied head.
        own = elements(model.embedding) * layout.element_bytes
        existing = temporary + own
        if model.is_tied:
            existing += own
        return max(own, existing - gradient_bytes(model.embedding, layout))
    # Weights return from host memory after backward: the update has more of them.
    return 0 if memory.cpu_offloading_weights else temporary
