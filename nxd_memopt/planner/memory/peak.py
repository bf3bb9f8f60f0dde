"""The peak of a rank's memory in a training step, by term, at the moment at which it is reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.activations import SHARED_TENSORS, activations, host_pool_bytes
from nxd_memopt.planner.memory.allocator import CUBLAS_WORKSPACE_BYTES, graph_pool_bytes, margin_bytes
from nxd_memopt.planner.memory.backward_peak import backward_peak
from nxd_memopt.planner.memory.compiled_graphs import graph_terms
from nxd_memopt.planner.memory.forward import forward_temporaries
from nxd_memopt.planner.memory.gradient_reduction import BackwardReduction, gathered_bytes
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.memory.loss import loss_temporaries
from nxd_memopt.planner.memory.pipeline_rank import Chunk
from nxd_memopt.planner.memory.step import ABSENT, Step
from nxd_memopt.planner.sizes.rank_model import RankModel
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES
from nxd_memopt.planner.sizes.states import (
    ADAM_MOMENTS,
    CHUNK_ELEMENTS,
    StateLayout,
    elements,
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
from nxd_memopt.planner.techniques.recomputation import Recomputation

SMALL_TENSORS_BYTES = 8 << 20
"""Tensors below 1 MiB that no term counts: sums over tokens, parts of sums, statistics. At most 3 MiB measured."""
SEGMENT_BYTES = 2 << 20
"""PyTorch's allocator takes memory in multiples of this."""
_STAGE1_BUCKET_BYTES = 128 << 20
_UNSORTED_TOKENS = 3072
"""Above this number of tokens the embedding's backward on a GPU sorts the ids, and adds up each row in fp32."""
_ROWS_PER_PARTIAL_SUM = 10
"""Gradients of one row that the sorted backward adds up to one partial sum."""

PeakCandidate = tuple[str, dict[str, int]]
"""Name of a point in the step, and the bytes of its terms."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank at the peak of a step.

    Args:
        moment: where in the step the peak is.
        device: purpose -> bytes on the device.
        host: purpose -> bytes of host memory for offloading.
        forward_backward_bytes: bytes of tensors on the device at the peak of forward and backward, without the update.
        margin_bytes: extra bytes that PyTorch's caching allocator may need on a GPU; 0 elsewhere.
    """

    moment: str
    device: dict[str, int]
    host: dict[str, int]
    forward_backward_bytes: int
    margin_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """Expected bytes on the device, the sum of its terms."""
        return sum(self.device.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes on the device with margin: the step runs in this much memory.

        With more available, reserved memory may grow by up to 10 % (measured); the allocator frees it before it fails.
        """
        # Other devices than GPUs have no such allocator.
        if not self.margin_bytes:
            return self.device_bytes
        return -(-(self.device_bytes + self.margin_bytes) // SEGMENT_BYTES) * SEGMENT_BYTES

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
    chunks: Sequence[Chunk] = (),
) -> StepMemory:
    """Return the peak memory of a training step.

    Args:
        model: the rank's share of the model.
        memory: memory techniques.
        kernels: operations and attention.
        layout: weights, gradients and states.
        accumulation_steps: micro-batches per step; with more than one, accumulated gradients exist during forward.
        cuda_graph: forward and backward are one CUDA graph.
        chunks: the stages of the rank, if the model is divided into those of a pipeline.
    """
    gradients = model.total(gradient_bytes, layout)
    accumulated_gradients = 0
    # A compiled program allocates its results, the gradients, at its start.
    if accumulation_steps > 1 or kernels.compiles_steps:
        accumulated_gradients = gradients
    step = Step.of(model, memory, kernels, layout, accumulated_gradients=accumulated_gradients, cuda_graph=cuda_graph)
    update = _in_update(model, layout, gradients)
    if cuda_graph:
        moment, transient = _with_graph(step, update)
        before_update = 0
    else:
        candidates = _before_update(step, gradients)
        if chunks:
            candidates = _of_chunks(step, chunks)
        candidates.append(update)
        moment, transient = max(candidates, key=_total)
        before_update = _total(max(candidates[:-1], key=_total)) - sum(transient.values())
    on_host = _offloaded_states(model, layout)
    persistent = _persistent(model, layout, on_host)
    # ABSENT is negative: it subtracts the weights that are in host memory at the peak.
    persistent["weights"] += transient.pop(ABSENT, 0)
    host = {
        "optimizer states": on_host,
        "activations": host_pool_bytes(step.kept, memory),
        "weights": step.offloaded.host_bytes(model.sizes.num_layers),
    }
    device = {**persistent, **_library_buffers(step, cuda_graph=cuda_graph), **transient}
    total = sum(device.values())
    if kernels.in_graphs:
        temporaries = sum(transient.values()) - transient["gradients"]
        weights = model.total(weight_bytes, layout)
        device |= graph_terms(temporaries, weights, master_weights=layout.master_weights)
    margin = 0
    if kernels.fused:
        margin = margin_bytes(total, cuda_graph=cuda_graph)
    return StepMemory(moment, device, host, total + before_update, margin)


def _total(moment: PeakCandidate) -> int:
    return sum(moment[1].values())


def _before_update(step: Step, gradients: int) -> list[PeakCandidate]:
    """Return the moments of forward and backward, of which one has the most memory."""
    forward, loss = _in_forward(step), _in_loss(step)
    embedding, reduction = _in_embedding(step, gradients)
    layout = step.layout
    if layout.sharding == "zero3" and layout.shards > 1:
        # The last unit of layers is gathered in forward and loss, unless all of them stay gathered.
        depth = step.sizes.num_layers
        layers = len(Recomputation.of(step.memory, depth).unit(depth - 1))
        if layout.keeps_gathered:
            layers = depth
        for _, terms in (forward, loss):
            terms["gathered weights"] = gathered_bytes(step.model, layout, layers)
        embedding[1]["gathered weights"] = gathered_bytes(step.model, layout, 0)
    return [forward, loss, backward_peak(step), embedding, reduction]


def _of_chunks(step: Step, chunks: Sequence[Chunk]) -> list[PeakCandidate]:
    """Return the moments of forward and backward of each stage, next to the micro-batches that are in flight."""
    steps = [
        replace(
            step,
            model=chunk.model,
            memory=chunk.memory,
            kept=activations(chunk.model.sizes, chunk.memory, step.kernels),
        )
        for chunk in chunks
    ]
    kept_bytes = [each.kept.device_bytes for each in steps]
    gradients = [chunk.model.total(gradient_bytes, step.layout) for chunk in chunks]
    found: list[PeakCandidate] = []
    for index, (chunk, each) in enumerate(zip(chunks, steps, strict=True)):
        for with_gradients, others in _in_flight_bytes(step, chunk, kept_bytes).items():
            # Gradients of other chunks exist throughout. In the first backward of a chunk its own appear one by one.
            of_others = sum(gradients[i] for i in with_gradients if i != index)
            standing = gradients[index] if index in with_gradients else 0
            # With several chunks a forward and a backward follow each other, and the output of the first waits.
            if len(chunks) > 1:
                others += step.sizes.residual_bytes
            received = 0 if each.sizes.has_head else each.sizes.residual_bytes
            of_case = replace(each, accumulated_gradients=standing, received_bytes=received)
            for moment, terms in _before_update(of_case, gradients[index]):
                if terms:
                    terms = {**terms, "gradients": terms["gradients"] + of_others, "other micro-batches": others}
                found.append((moment, terms))
    return found


def _in_flight_bytes(step: Step, chunk: Chunk, kept_bytes: Sequence[int]) -> dict[frozenset[int], int]:
    """Return the most bytes that other micro-batches keep, by the chunks whose gradients exist then.

    Left out are cases with fewer gradients and no more activations than another one, which are never the peak.
    """
    most: dict[frozenset[int], int] = {}
    for counts, with_gradients in chunk.others:
        # A compiled program has all gradients from its start.
        if step.kernels.compiles_steps:
            with_gradients = frozenset(range(len(kept_bytes)))
        others = sum(map(mul, counts, kept_bytes))
        most[with_gradients] = max(others, most.get(with_gradients, 0))
    return {
        own: others for own, others in most.items() if not any(own < more and others <= most[more] for more in most)
    }


def _with_graph(step: Step, update: PeakCandidate) -> PeakCandidate:
    """Return the terms in the update after a CUDA graph of forward and backward, whose pool no other tensor uses.

    The graph has gradients in the dtype of the weights in its pool; sums in fp32 exist besides it.
    """
    model = step.model
    layout = replace(step.layout, grad_reduce_in_fp32=False)
    gradients = model.total(gradient_bytes, layout)
    sums = 0
    if step.casts_gradients:
        sums = model.total(gradient_bytes, step.layout)
    # From the second micro-batch on, the graph adds to the gradients in its pool, unless hooks have moved them
    # to fp32 sums outside the pool.
    standing = 0
    if step.accumulated_gradients and not sums:
        standing = gradients
    graph = replace(step, layout=layout, accumulated_gradients=standing)
    embedding = gradients + _embedding_temporaries(graph)
    peak = max(embedding, *(_total(moment) for moment in (_in_forward(graph), _in_loss(graph), backward_peak(graph))))
    captures = 1
    if standing:
        captures = 2
    largest = max((gradient_bytes([shape], layout) for shape in model.other_shapes), default=0)
    pool = graph_pool_bytes(peak, gradients, largest=largest, captures=captures)
    name, terms = update
    buffers = {name: size for name, size in terms.items() if name not in ("gradients", "temporary tensors")}
    return name, {"gradients": gradients + sums, **buffers, "CUDA graph's pool": pool - gradients}


def _library_buffers(step: Step, *, cuda_graph: bool) -> dict[str, int]:
    """Return what libraries and peer memory allocate on GPUs, next to tensors."""
    if not step.kernels.fused:
        return {}
    buffers = {"cuBLAS workspaces": CUBLAS_WORKSPACE_BYTES, "small tensors": SMALL_TENSORS_BYTES}
    fused_loss = step.memory.fused_linear_cross_entropy
    slots = peer_slots.slot_bytes(step.sizes, fused_loss=fused_loss, cuda_graph=cuda_graph)
    if slots:
        buffers["peer memory"] = slots
    return buffers


def _persistent(model: RankModel, layout: StateLayout, on_host: int) -> dict[str, int]:
    """Return what exists throughout the step, with ``on_host`` bytes of the states in host memory."""
    states = {
        "weights": model.total(weight_bytes, layout) + model.frozen_bytes(layout),
        "master weights": model.total(master_bytes, layout),
        "optimizer moments": model.total(moment_bytes, layout),
    }
    # An offloaded element has an fp32 master and two moments, 4 + 8 bytes, or 2 + 8 with remainders. Masters and
    # moments leave the device by the same number of elements, because a parameter's states go to the host together.
    element_bytes = optimizer_element_bytes(param_remainders=layout.param_remainders)
    count = on_host // element_bytes
    states["master weights"] -= count * layout.master_element_bytes
    states["optimizer moments"] -= count * ADAM_MOMENTS * layout.optimizer_bytes
    # A ring of chunks on their way, whose size the user limits.
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


def _in_forward(step: Step) -> PeakCandidate:
    """Return the terms at the end of the last layer's MLP in forward; no terms if another moment always has more."""
    kept = step.kept
    own = {**kept.layers[-1], **kept.offloaded[-1]}
    temporaries = forward_temporaries(step.sizes, step.memory, step.kernels, own, has_slots=step.has_slots)
    if not temporaries:
        return "forward", {}
    # The MLP's output exists next to its multiple.
    if step.sizes.scales_blocks:
        temporaries = {**temporaries, "scaled output": step.sizes.residual_bytes}
    # RoPE's tables and the embedding's ids outlive the layers.
    shared = sum(kept.around.get(name, 0) for name in SHARED_TENSORS)
    return "forward of the last layer", {
        ABSENT: step.absent_weights(step.sizes.num_layers - 1),
        "gradients": step.accumulated_gradients,
        "activations": sum(kept.layer_bytes) + kept.offloaded_bytes[-1] + shared,
        "temporary tensors": sum(temporaries.values()),
    }


def _in_loss(step: Step) -> PeakCandidate:
    """Return the terms while the loss is computed: all activations exist."""
    sizes, is_fused = step.sizes, step.memory.fused_linear_cross_entropy
    if not sizes.has_head:
        return "loss", {}
    temporaries = sum(loss_temporaries(sizes, step.kernels, fused=is_fused).values())
    # In fp16 the fused loss computes the gradient of the head in backward, so that it is a temporary tensor here.
    if sizes.is_fp16 and is_fused and sizes.adapters is None:
        temporaries += sizes.vocab * sizes.hidden * sizes.element_bytes
    in_flight = 0
    # The host runs ahead of the device: the copy of the last checkpoint to the host has not ended yet.
    if step.kernels.fused and step.memory.cpu_offloading_activations:
        in_flight = step.kept.offloaded_bytes[-1]
    # The head's gradient is cast before the gradients of any layer.
    if not step.accumulated_gradients and step.casts_gradients:
        temporaries = max(temporaries, gradient_bytes(step.model.head, step.layout))
    return "loss", {
        ABSENT: step.absent_weights(),
        "gradients": step.accumulated_gradients,
        "activations": step.kept.device_bytes + in_flight,
        "temporary tensors": temporaries,
    }


def _in_update(model: RankModel, layout: StateLayout, gradients: int) -> PeakCandidate:
    """Return the terms while the optimizer runs: all gradients, and the buffers of its collectives."""
    update = {"gradients": gradients, "temporary tensors": 0}
    counts = [math.prod(shape) for shape in (*model.layer_shapes, *model.other_shapes)]
    largest = max(counts) * layout.gradient_element_bytes
    if layout.sharding == "zero1" and layout.shards > 1:
        # One copy of a bucket's gradients, and a second one where they are padded to divide by the ranks.
        copies = 1
        if any(count % layout.shards for count in counts):
            copies = 2
        # The reduced shards are what the optimizer reads.
        update["reduced gradients"] = model.total(shard_bytes, layout)
        # Then weights are gathered: a full bucket, the rank's shard of it, and a contiguous copy of the shard.
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
        # optimizer with states on the host casts the gradients of a chunk at a time instead.
        update["reduced gradients"] = model.total(shard_bytes, layout)
    return "update", update


def _in_embedding(step: Step, gradients: int) -> list[PeakCandidate]:
    """Return the terms in the embedding's backward, which computes the last gradient, and while this is reduced."""
    accumulates = step.accumulated_gradients > 0
    reduction = BackwardReduction.of(step.model, step.memory, step.layout, accumulates=accumulates).buckets
    backward = {
        "gradients": gradients,
        "temporary tensors": step.received_bytes + _embedding_temporaries(step),
        "gradient buckets": reduction.in_embedding,
    }
    reduced = {"gradients": gradients, "gradient buckets": reduction.after_embedding}
    return [("backward of the embedding", backward), ("reduction of the embedding's gradient", reduced)]


def _embedding_temporaries(step: Step) -> int:
    """Return the bytes of the embedding's backward besides all gradients."""
    sizes, model, layout = step.sizes, step.model, step.layout
    if not sizes.has_embedding:
        return 0
    # The gradient of its output, and with sequence parallelism the gathered gradient of all tokens.
    temporary = step.sizes.residual_bytes
    if sizes.shards > 1:
        temporary += sizes.column_bytes(sizes.hidden)
    # Tokens are sorted by their id; the partial sums of tokens // 10 groups and one sum for each id that can occur,
    # at most the smaller of tokens and V, are rows of H fp32 numbers.
    if step.kernels.fused and sizes.tokens > _UNSORTED_TOKENS:
        rows = sizes.tokens // _ROWS_PER_PARTIAL_SUM + min(sizes.tokens, sizes.vocab)
        temporary += rows * sizes.hidden * FP32_BYTES
    if step.casts_gradients and model.embedding:
        # Its gradient exists before its fp32 sum, and next to it; so does the gradient of a tied head.
        own = elements(model.embedding) * layout.element_bytes
        existing = temporary + own
        if model.is_tied:
            existing += own
        return max(own, existing - gradient_bytes(model.embedding, layout))
    # Weights return from host memory after backward: the update is always higher.
    if step.memory.cpu_offloading_weights:
        return 0
    return temporary
