"""The peak of a rank's memory in a training step, by term, at the moment at which it is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.activations import SHARED_TENSORS, Activations, activations, host_pool_bytes
from nxd_memopt.planner.adapted_layers import layer_parts
from nxd_memopt.planner.backward import (
    ATTENTION_SAVED,
    Moment,
    layer_moments,
    loss_temporaries,
    precedes_attention,
    with_fp32_sums,
)
from nxd_memopt.planner.collectives import GRADIENT_BUCKET_BYTES
from nxd_memopt.planner.formulas import nested_chunk_layers, optimizer_state_bytes, stream_bytes
from nxd_memopt.planner.hardware import FRAGMENT_FRACTION, fragment_bytes
from nxd_memopt.planner.layer_tensors import (
    ROUTER_STATISTICS,
    Kernels,
    layer_kernels,
    layer_runs,
)
from nxd_memopt.planner.offloaded_weights import OffloadedWeights
from nxd_memopt.planner.rank_model import RankModel
from nxd_memopt.planner.rank_sizes import RankSizes
from nxd_memopt.planner.states import (
    CHUNK_ELEMENTS,
    StateLayout,
    gradient_bytes,
    master_bytes,
    moment_bytes,
    offloaded_state_bytes,
    shard_bytes,
    weight_bytes,
)

CUBLAS_WORKSPACE_BYTES = 64 << 20
"""cuBLAS workspaces of the threads of forward and backward, 32 MiB each on Hopper (PyTorch's default)."""
SMALL_TENSORS_BYTES = 8 << 20
"""Tensors below 1 MiB that no term counts: sums over tokens, parts of sums, statistics. At most 3 MiB measured."""
SEGMENT_BYTES = 2 << 20
"""PyTorch's allocator takes memory in multiples of this."""
_FRAGMENTS_BESIDES_GRAPH = 48 << 20
PEER_MEMORY_MIN_BYTES = 20 << 20
"""Smallest chunk that ``backends/cuda/peer_memory.py`` sends instead of NCCL."""
_PEER_SLOTS = 4
"""Slots of peer memory: two for gathers and two for reductions, of a full activation each."""
GRAPH_POOL = "CUDA graph's pool"
"""Term of the pool of a CUDA graph, besides its gradients."""
_ABSENT = "weights in host memory"
"""Term of a moment that is subtracted from the weights."""
_BUCKET_BYTES = 25 << 20
OVERLAPPED_BUCKETS = 4
"""Buckets of ``parallel_layers/overlapped_grads.py`` that are reduced at the same time."""
_STAGE1_BUCKET_BYTES = 128 << 20


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank at the peak of a step.

    Args:
        moment: where in the step the peak is.
        device: purpose -> bytes on the device.
        host: purpose -> bytes of host memory for offloading.
        forward_backward_bytes: bytes on the device at the peak of forward and backward, without the update.
    """

    moment: str
    device: dict[str, int]
    host: dict[str, int]
    forward_backward_bytes: int

    @property
    def device_bytes(self) -> int:
        """Sum of the device's terms."""
        return sum(self.device.values())

    @property
    def reserved_bytes(self) -> int:
        """What PyTorch's caching allocator needs of a GPU: also parts of its segments that no tensor uses.

        While memory is left it takes more, up to a tenth (measured), and returns that before it fails.
        """
        fragments = fragment_bytes(self.device_bytes)
        if GRAPH_POOL in self.device:
            # The pool, with most of the gradients, counts with its fragments.
            others = self.device_bytes - self.device[GRAPH_POOL] - self.device["gradients"]
            fragments = max(_FRAGMENTS_BESIDES_GRAPH, int(others * FRAGMENT_FRACTION))
        reserved = self.device_bytes + fragments
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
    candidates = [
        _in_loss(model, memory, kernels, kept, layout, start, offloaded),
        _in_backward(model, memory, kernels, kept, layout, start, offloaded),
        _in_update(model, memory, layout, gradients),
    ]
    moment, transient = max(candidates, key=lambda each: sum(each[1].values()))
    before_update = max(sum(terms.values()) for _, terms in candidates[:-1]) - sum(transient.values())
    # Of the weights, which a moment has without those that wait in host memory.
    absent = -transient.pop(_ABSENT, 0)
    standing["weights"] -= absent
    if cuda_graph:
        moment, before_update = "update", 0
        transient = _with_graph(model, memory, kernels, kept, layout, candidates[-1][1])
    host = {
        "optimizer states": on_host,
        "activations": host_pool_bytes(kept, memory),
        "weights": offloaded.host_bytes(model.sizes.num_layers),
    }
    device = {**standing, **_library_buffers(model.sizes, kernels), **transient}
    return StepMemory(moment, device, host, forward_backward_bytes=sum(device.values()) + before_update)


def _with_graph(
    model: RankModel,
    memory: MemoryConfig,
    kernels: Kernels,
    kept: Activations,
    layout: StateLayout,
    update: Mapping[str, int],
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
    """
    in_graph = replace(layout, grad_reduce_in_fp32=False)
    offloaded = OffloadedWeights.of(model.layer_shapes, memory, layout, model.sizes.num_layers)
    passes = (
        _in_loss(model, memory, kernels, kept, in_graph, 0, offloaded),
        _in_backward(model, memory, kernels, kept, in_graph, 0, offloaded),
    )
    peak = max(sum(terms.values()) for _, terms in passes)
    gradients = model.total(gradient_bytes, in_graph)
    pool = graph_pool_bytes(
        peak,
        gradients,
        largest=max((gradient_bytes([shape], in_graph) for shape in model.other_shapes), default=0),
        layer=gradient_bytes(model.layer_shapes, in_graph),
    )
    sums = model.total(gradient_bytes, layout) if _sum_ratio(layout) else 0
    buffers = {name: size for name, size in update.items() if name not in ("gradients", "temporary tensors")}
    return {"gradients": gradients + sums, **buffers, GRAPH_POOL: pool - gradients}


def graph_pool_bytes(peak_bytes: int, gradients: int, *, largest: int, layer: int) -> int:
    """Return the memory pool of a CUDA graph of forward and backward.

    The pool is as large as the peak, or as all gradients, of which the last and largest, the embedding's, finds no
    room between the others, and cuBLAS workspaces of its own. The fragments are fitted to steps of LLaMA-3-8B and
    SmolLM2 on an H200: three quarters of a layer's gradients.

    Args:
        peak_bytes: peak of activations, gradients and temporary tensors without a graph.
        gradients: bytes of all gradients in the dtype of the weights; the next arguments likewise.
        largest: the gradient of the largest parameter outside the layers.
        layer: the gradients of a layer.
    """
    return max(peak_bytes, gradients + largest) + 3 * layer // 4 + CUBLAS_WORKSPACE_BYTES


def _library_buffers(sizes: RankSizes, kernels: Kernels) -> dict[str, int]:
    """Return what libraries and peer memory allocate on GPUs, next to tensors."""
    if not kernels.fused:
        return {}
    buffers = {"cuBLAS workspaces": CUBLAS_WORKSPACE_BYTES, "small tensors": SMALL_TENSORS_BYTES}
    full = sizes.tokens * sizes.hidden * sizes.element_bytes
    if sizes.tensor_model_parallel_size > 1 and full >= PEER_MEMORY_MIN_BYTES:
        buffers["peer memory"] = _PEER_SLOTS * full
    return buffers


def _standing(model: RankModel, layout: StateLayout, on_host: int) -> dict[str, int]:
    """Return what exists throughout the step, with ``on_host`` bytes of the states in host memory."""
    states = {
        "weights": model.total(weight_bytes, layout) + model.frozen_bytes(layout),
        "master weights": model.total(master_bytes, layout),
        "optimizer moments": model.total(moment_bytes, layout),
    }
    # Of 12 bytes in host memory 4 are masters and 8 moments.
    states["master weights"] -= on_host // 3
    states["optimizer moments"] -= on_host - on_host // 3
    if on_host:
        states["staging of optimizer states"] = stream_bytes(
            on_host // optimizer_state_bytes(1), chunk_elements=CHUNK_ELEMENTS, staging_bytes=layout.staging_bytes
        )
    if layout.sharding == "zero3" and layout.shards > 1:
        # The root's unit is gathered throughout; of the layers, the running and the next one, or all.
        count = model.sizes.num_layers if layout.keeps_gathered else min(2, model.sizes.num_layers)
        states["gathered weights"] = model.gathered_elements(count) * layout.element_bytes
    return states


# A search asks for the same states with every memory technique.
@lru_cache(maxsize=512)
def _offloaded_states(model: RankModel, layout: StateLayout) -> int:
    """Return the bytes of optimizer states in host memory."""
    if not layout.optimizer_offload_fraction:
        return 0
    return offloaded_state_bytes(model.shapes, layout)


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
    # The head's gradient is cast before that of any layer.
    if not gradients and _sum_ratio(layout) and not _is_tied(model):
        temporaries = max(temporaries, gradient_bytes(model.other_shapes[-1:], layout))
    return "loss", {
        _ABSENT: -offloaded.absent_bytes(model.sizes.num_layers),
        "gradients": gradients,
        "activations": kept.device_bytes,
        "temporary tensors": temporaries,
    }


def _is_tied(model: RankModel) -> bool:
    """Return whether the embedding is the head too: the last parameter is the final norm's."""
    return bool(model.other_shapes) and len(model.other_shapes[-1]) == 1


def _sum_ratio(layout: StateLayout) -> int:
    """Return how many times larger a gradient's fp32 sum is, which is created next to it; 0 if there is none."""
    is_summed = layout.master_weights and layout.gradient_element_bytes > layout.element_bytes
    if not is_summed or layout.in_backward or layout.sharding in ("zero2", "zero3"):
        return 0
    return layout.gradient_element_bytes // layout.element_bytes


def _in_backward(
    model: RankModel,
    memory: MemoryConfig,
    kernels: Kernels,
    kept: Activations,
    layout: StateLayout,
    standing_gradients: int,
    offloaded: OffloadedWeights,
) -> tuple[str, dict[str, int]]:
    """Return the terms at the highest moment of the layers' backwards, from the last layer to the first."""
    sizes = model.sizes
    casts = not standing_gradients and _sum_ratio(layout) > 0 and sizes.adapters is None
    layers = _layer_backwards(sizes, memory, kernels, with_sums=casts)
    per_layer = gradient_bytes(model.layer_shapes, layout)
    # The head's gradient comes first. A tied one waits for the embedding's, in the dtype of the weights.
    finished = gradient_bytes(model.other_shapes[-1:], layout)
    waiting = math.prod(model.other_shapes[0]) * layout.element_bytes if _is_tied(model) else 0
    # The loss and the final norm are done.
    remaining = kept.device_bytes - sum(kept.around[name] for name in kept.around if name not in SHARED_TENSORS)
    has_slots = "peer memory" in _library_buffers(sizes, kernels)
    highest = -1
    found: tuple[str, dict[str, int]] = ("", {})
    for index in reversed(range(sizes.num_layers)):
        own = kept.layers[index]
        own_bytes = sum(own.values())
        if not _is_decisive(kept.layers, index, memory, sizes):
            remaining -= own_bytes
            finished += per_layer
            continue
        layer = layers[index]
        # A layer that is recomputed has all of its tensors again; its checkpoint is one of them.
        live = remaining - own_bytes + max(own_bytes, layer.all_bytes)
        live += _restored(kept, memory, index, layer.all_bytes, layer.input_bytes)
        live += waiting + _prefetched(kept, memory, index)
        absent = -offloaded.absent_bytes(sizes.num_layers, index)
        for moment, freed, temporary, in_slots in layer.moments:
            gradients = standing_gradients
            if not standing_gradients:
                own_gradients = min(_finished_bytes(moment, layout, sizes.element_bytes), per_layer)
                # Those of adapters are small: at each moment all of them count.
                gradients = finished + (per_layer if sizes.adapters is not None else own_gradients)
            if has_slots:
                temporary -= in_slots
            total = absent + gradients + live - freed + temporary
            # Of equal moments the first one; the terms are of the highest one only, because a search asks often.
            if total > highest:
                highest = total
                terms = {
                    _ABSENT: absent,
                    "gradients": gradients,
                    "activations": live - freed,
                    "temporary tensors": temporary,
                }
                found = (f"backward of layer {index}: {moment.name}", terms)
        remaining -= own_bytes
        finished += per_layer
    found[1]["gradient buckets"] = _reduction_buckets(model, layout)
    return found


def _reduction_buckets(model: RankModel, layout: StateLayout) -> int:
    """Return the bytes of the buckets in which gradients are reduced during backward."""
    if layout.sharding in ("zero2", "zero3") and layout.shards > 1:
        # A bucket that is filled, and one on its way.
        return 2 * max(_BUCKET_BYTES, _largest(model.layer_shapes) * model.sizes.element_bytes) * 2
    if layout.overlaps_reduction and layout.data_parallel_size > 1:
        # A copy of each bucket's gradients, and its sum over the ranks.
        bucket = max(_BUCKET_BYTES, _largest(model.layer_shapes) * layout.gradient_element_bytes)
        return 2 * OVERLAPPED_BUCKETS * bucket
    return 0


def _finished_bytes(moment: Moment, layout: StateLayout, element_bytes: int) -> int:
    """Return the bytes of the weight gradients of a layer that are complete at ``moment``."""
    if layout.in_backward:
        return 0
    if layout.master_weights:
        return moment.finished_gradients * layout.gradient_element_bytes // element_bytes
    return moment.finished_gradients


@dataclass(frozen=True)
class _LayerBackward:
    """A layer's backward.

    Args:
        all_bytes: bytes of a forward without recompute, which a recomputed layer has again.
        input_bytes: bytes of the layer's input.
        moments: the moments at which most memory is in use, each with the bytes of ``all_bytes`` that
            are free by then, the bytes of its temporary tensors, and those of them that lie in slots
            if peer memory gathers.
    """

    all_bytes: int
    input_bytes: int
    moments: tuple[tuple[Moment, int, int, int], ...]


@lru_cache(maxsize=512)
def _layer_backwards(
    sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, *, with_sums: bool
) -> tuple[_LayerBackward, ...]:
    """Return the backward of every layer; ``with_sums`` when gradients are cast to new fp32 sums."""
    layers: list[_LayerBackward] = []
    for count, techniques in layer_runs(memory, sizes.num_layers):
        # Only windows, and layer 0 before its first adapter, make layers of the same techniques different.
        if not sizes.windows and sizes.adapters is None:
            layers += [_layer_backward(sizes, techniques, kernels, with_sums=with_sums)] * count
            continue
        for index in range(len(layers), len(layers) + count):
            layers.append(_layer_backward(sizes, techniques, kernels, index, with_sums=with_sums))
    return tuple(layers)


def _layer_backward(
    sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, index: int = 0, *, with_sums: bool = False
) -> _LayerBackward:
    """Return the backward of layer ``index`` under the techniques of ``layer_runs``."""
    layer = layer_parts(sizes, memory, kernels, index)
    everything = layer.kept()
    found = layer_moments(sizes, memory, layer_kernels(sizes, kernels, index))
    if with_sums:
        found = with_fp32_sums(found, routes=sizes.moe is not None)
    # Selective recompute restores attention when its backward comes, after that of the MLP.
    waiting: frozenset[str] = frozenset()
    if memory.recompute_granularity == "selective":
        kept = layer.kept(memory.recompute_modules or ())
        waiting = frozenset(name for name in everything if name in ATTENTION_SAVED and name not in kept)
    moments = [
        (
            moment,
            sum(
                size
                for name, size in everything.items()
                if name in moment.freed or (name in waiting and precedes_attention(moment))
            ),
            sum(moment.temporary.values()),
            moment.temporary.get("gathered", 0),
        )
        for moment in found
    ]
    return _LayerBackward(sum(everything.values()), sum(layer.inputs.values()), tuple(moments))


def _is_decisive(layers: Sequence[Mapping[str, int]], index: int, memory: MemoryConfig, sizes: RankSizes) -> bool:
    """Return whether the peak may be in this layer.

    Between layers that keep the same, memory changes by the same bytes from one to the next: only
    the ends of such runs can be highest, and with several layers per checkpoint the ends of chunks.
    The statistics of routers grow by the same bytes from layer to layer, and the memory before a layer
    then is a convex function of its index, which is highest at an end too.
    """
    if index in (0, len(layers) - 1) or memory.recompute_method in ("uniform", "nested"):
        return True
    # From layer to layer other weights are in host memory.
    if memory.cpu_offloading_weights:
        return True
    # Layer 1 fetches what layer 0 has in host memory, and layer 0 nothing.
    if index == 1 and memory.num_offloaded_layers(len(layers)):
        return True
    # Under full recompute layer 0 keeps the same as the others, and restores less.
    if sizes.adapters is not None and index == 1:
        return True
    # What a recomputed layer restores depends on its window too.
    window = sizes.window(index)
    return any(
        window != sizes.window(other) or not _keep_alike(layers[index], layers[other])
        for other in (index - 1, index + 1)
    )


def _keep_alike(first: Mapping[str, int], second: Mapping[str, int]) -> bool:
    """Return whether two layers keep the same, apart from the number of statistics of routers."""
    if first == second:
        return True
    # Not if one of them keeps none, or has them in host memory.
    return first.keys() == second.keys() and all(
        size == second[name] for name, size in first.items() if name != ROUTER_STATISTICS
    )


def _largest(shapes: Sequence[Sequence[int]]) -> int:
    return max(math.prod(shape) for shape in shapes)


def _restored(kept: Activations, memory: MemoryConfig, index: int, layer_bytes: int, input_bytes: int) -> int:
    """Return what recomputation of a chunk of layers restores besides this layer's own tensors.

    ``uniform`` restores all layers of a chunk, of which those before this layer still exist;
    ``nested`` the inputs of the chunk's layers.
    """
    if memory.recompute_granularity != "full" or memory.recompute_method in (None, "block"):
        return 0
    chunk = memory.recompute_num_layers or nested_chunk_layers(len(kept.layers))
    before = index % chunk
    if not before:
        return 0
    # The input of the first layer is the checkpoint, which counts already unless it was in host memory.
    checkpoint = 0 if kept.offloaded[index - before] else input_bytes
    if memory.recompute_method == "nested":
        return before * input_bytes - checkpoint
    return before * layer_bytes - checkpoint


def _prefetched(kept: Activations, memory: MemoryConfig, index: int) -> int:
    """Return what is fetched from host memory while layer ``index`` runs, for the layer or the chunk before it."""
    chunk = 1
    if memory.cpu_offloading_activations and memory.recompute_method in ("uniform", "nested"):
        chunk = memory.recompute_num_layers or nested_chunk_layers(len(kept.layers))
    start = index // chunk * chunk
    return sum(sum(layer.values()) for layer in kept.offloaded[max(0, start - chunk) : start])


def _in_update(
    model: RankModel, memory: MemoryConfig, layout: StateLayout, gradients: int
) -> tuple[str, dict[str, int]]:
    """Return the terms while the optimizer runs: all gradients, and the buffers of its collectives."""
    # The embedding's backward comes before the update, with the gradient of its output.
    stream = model.sizes.shard_tokens * model.sizes.hidden * model.sizes.element_bytes
    gathered = model.sizes.tokens * model.sizes.hidden * model.sizes.element_bytes if model.sizes.shards > 1 else 0
    temporary = stream + gathered
    embedding = model.other_shapes[:1]
    if _sum_ratio(layout) and embedding:
        # Its gradient exists before its fp32 sum, and next to it.
        own = math.prod(embedding[0]) * layout.element_bytes
        temporary = max(own, temporary + own * (2 if _is_tied(model) else 1) - gradient_bytes(embedding, layout))
    elif memory.cpu_offloading_weights:
        # Weights return from host memory after backward.
        temporary = 0
    terms = {"gradients": gradients, "temporary tensors": temporary}
    if layout.sharding == "zero1" and layout.shards > 1:
        shards = model.total(shard_bytes, layout)
        # Padded copies of a bucket's gradients, and this rank's reduced shards.
        shapes = (*model.layer_shapes, *model.other_shapes)
        bucket = max(_STAGE1_BUCKET_BYTES, _largest(shapes) * layout.gradient_element_bytes)
        terms["reduced gradients"] = shards
        terms["gradient buckets"] = bucket
    elif layout.sharding == "none" and layout.data_parallel_size > 1 and not layout.overlaps_reduction:
        # A copy of a bucket's gradients, and its sum over the ranks.
        shapes = (*model.layer_shapes, *model.other_shapes)
        bucket = max(GRADIENT_BUCKET_BYTES, _largest(shapes) * layout.gradient_element_bytes)
        terms["gradient buckets"] = 2 * min(bucket, gradients)
    if layout.shards == 1 and layout.gradient_element_bytes < layout.optimizer_bytes:
        # All gradients are cast before the first update, because the norm is of all of them.
        terms["reduced gradients"] = model.total(shard_bytes, layout)
    return "update", terms
