"""The point of the layers' backward with the most memory: which layer, which of its moments, and what exists then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.activations import Activations, activations
from nxd_memopt.planner.memory.backward import ATTENTION_SAVED, layer_moments
from nxd_memopt.planner.memory.gradient_reduction import BackwardReduction
from nxd_memopt.planner.memory.layer_moment import Moment, with_fp32_sums
from nxd_memopt.planner.memory.layer_parts import layer_parts
from nxd_memopt.planner.memory.layer_tensors import ROUTER_STATISTICS, Kernels, layer_kernels, layer_runs
from nxd_memopt.planner.memory.step import ABSENT, Step
from nxd_memopt.planner.sizes.rank_sizes import RankSizes
from nxd_memopt.planner.sizes.states import StateLayout, elements, gradient_bytes
from nxd_memopt.planner.techniques.recomputation import Recomputation


def backward_peak(step: Step) -> tuple[str, dict[str, int]]:
    """Return the terms at the point of the layers' backward with the most memory."""
    model, layout, kept, sizes = step.model, step.layout, step.kept, step.sizes
    standing = step.accumulated_gradients
    has_adapters = sizes.adapters is not None
    casts_to_sums = step.casts_gradients and not standing and not has_adapters
    candidates = _candidate_layers(sizes, step.memory, step.kernels)
    techniques = [each for count, each in layer_runs(step.memory, sizes.num_layers) for _ in range(count)]
    per_layer = gradient_bytes(model.layer_shapes, layout)
    reduction = BackwardReduction.of(model, step.memory, layout, accumulates=standing > 0)
    finished = tied_head_bytes = 0
    # The gradients of head and norm come first. With ZeRO-3 they are reduced together with the embedding's.
    if not reduction.reduces_units:
        finished = gradient_bytes((*model.final_norm, *model.head), layout)
    # The gradient of a tied head is kept until the embedding's backward, in the dtype of the weights.
    if model.is_tied:
        tied_head_bytes = elements(model.embedding) * layout.element_bytes
    remaining = step.kept_in_backward
    found = _in_reduction_of_head(step, reduction, standing or finished)
    highest = sum(found[1].values())
    for index in reversed(range(sizes.num_layers)):
        remaining -= kept.layer_bytes[index]
        if index not in candidates and not reduction.is_bucket_boundary(index):
            finished += per_layer
            continue
        position = 0 if sizes.are_layers_alike else index
        layer = _layer_backward(sizes, techniques[index], step.kernels, position, casts_to_sums=casts_to_sums)
        # A layer that is recomputed has all of its tensors again, including its checkpointed input.
        live = remaining + max(kept.layer_bytes[index], layer.all_bytes)
        # What recomputation restored for earlier layers of the chunk exists next to this layer's tensors.
        live += _restored(kept, reduction.recomputation, index, layer.all_bytes, layer.input_bytes)
        live += tied_head_bytes + _prefetched(kept, reduction.recomputation, index)
        # The last layer's moments have the gradient of its output.
        if index < sizes.num_layers - 1:
            live += step.received_bytes
        absent = step.absent_weights(index)
        gathered = reduction.gathered_bytes(index)
        for moment, freed, temporary, in_slots in layer.moments:
            gradients = standing or finished
            if not standing and not reduction.reduces_units:
                own = _finished_bytes(moment, layout, sizes.element_bytes)
                # The gradients of adapters are small: count all of them at every moment.
                if has_adapters:
                    own = per_layer
                gradients += min(own, per_layer)
            # Tensors in slots of peer memory are counted with the library's buffers.
            if step.has_slots:
                temporary -= in_slots
            buckets = reduction.bucket_bytes(index, moment.finished_gradients)
            total = absent + gradients + live - freed + temporary + buckets + gathered
            # Of equal moments the first one counts. The terms are built for a new maximum only: a search asks often.
            if total > highest:
                highest = total
                terms = {
                    ABSENT: absent,
                    "gradients": gradients,
                    "activations": live - freed,
                    "temporary tensors": temporary,
                    "gradient buckets": buckets,
                    "gathered weights": gathered,
                }
                found = (f"backward of layer {index}: {moment.name}", terms)
        finished += per_layer
    return found


def _in_reduction_of_head(step: Step, reduction: BackwardReduction, gradients: int) -> tuple[str, dict[str, int]]:
    """Return the terms while the head's gradient is reduced, before any layer's backward; empty if that is later."""
    if not reduction.buckets.head:
        return "", {}
    return "reduction of the head's gradient", {
        ABSENT: step.absent_weights(),
        "gradients": gradients,
        "activations": step.kept_in_backward,
        "temporary tensors": step.sizes.residual_bytes,
        "gradient buckets": reduction.buckets.head,
    }


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
            are free by then, the bytes of its temporary tensors, and the part of the latter that lies in
            slots if peer memory gathers.
    """

    all_bytes: int
    input_bytes: int
    moments: tuple[tuple[Moment, int, int, int], ...]


# A search plans the same layers with many ZeRO stages and fractions of offloaded states.
@lru_cache(maxsize=4096)
def _layer_backward(
    sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, index: int = 0, *, casts_to_sums: bool = False
) -> _LayerBackward:
    """Return the backward of layer ``index`` under the techniques of ``layer_runs``."""
    layer = layer_parts(sizes, memory, kernels, index)
    everything = layer.kept()
    found = layer_moments(sizes, memory, layer_kernels(sizes, kernels, index), index)
    if casts_to_sums:
        found = with_fp32_sums(found, routes=sizes.moe is not None)
    # Selective recompute computes attention again after the backward of the MLP.
    not_yet_recomputed: frozenset[str] = frozenset()
    if memory.recompute_granularity == "selective":
        kept = layer.kept(memory.recompute_modules or ())
        not_yet_recomputed = frozenset(name for name in everything if name in ATTENTION_SAVED and name not in kept)
    moments = [
        (
            moment,
            sum(
                size
                for name, size in everything.items()
                if name in moment.freed or (name in not_yet_recomputed and moment.before_attention)
            ),
            sum(moment.temporary.values()),
            moment.temporary.get("gathered", 0),
        )
        for moment in found
    ]
    return _LayerBackward(sum(everything.values()), sum(layer.inputs.values()), tuple(moments))


@lru_cache(maxsize=512)
def _candidate_layers(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels) -> frozenset[int]:
    """Return the layers in which the peak may be."""
    layers = activations(sizes, memory, kernels).layers
    return frozenset(index for index in range(len(layers)) if _is_candidate(layers, index, memory, sizes))


def _is_candidate(layers: Sequence[Mapping[str, int]], index: int, memory: MemoryConfig, sizes: RankSizes) -> bool:
    """Return whether the peak may be in this layer.

    Within a run of identical layers memory is linear in the layer index, so only the run's ends can be the peak,
    and with several layers per checkpoint the ends of chunks. The statistics of routers grow by the same bytes from
    layer to layer: memory then is a convex function of the index, which is highest at an end too.
    """
    if index in (0, len(layers) - 1) or memory.recompute_method in ("uniform", "nested"):
        return True
    # From layer to layer other weights are in host memory.
    if memory.cpu_offloading_weights:
        return True
    # Layer 1's backward prefetches the tensors that layer 0 has in host memory; layer 0 prefetches nothing.
    if index == 1 and memory.num_offloaded_layers(len(layers)):
        return True
    # With LoRA and full recompute layer 0 keeps the same as the others but restores less: what is before its first
    # adapter needs no gradient.
    if sizes.adapters is not None and index == 1:
        return True
    # What a recomputed layer restores depends on its window too.
    window = sizes.window(index)
    return any(
        window != sizes.window(other)
        or sizes.fp8_linears(index) != sizes.fp8_linears(other)
        or sizes.fp8_experts(index) != sizes.fp8_experts(other)
        or not _keep_alike(layers[index], layers[other])
        for other in (index - 1, index + 1)
    )


def _keep_alike(first: Mapping[str, int], second: Mapping[str, int]) -> bool:
    """Return whether two layers keep the same, apart from the number of statistics of routers."""
    if first == second:
        return True
    # Other keys: one of them keeps no statistics, or has them in host memory.
    return first.keys() == second.keys() and all(
        size == second[name] for name, size in first.items() if name != ROUTER_STATISTICS
    )


def _restored(kept: Activations, recomputation: Recomputation, index: int, layer_bytes: int, input_bytes: int) -> int:
    """Return what recomputation of a chunk of layers restores besides this layer's own tensors.

    ``uniform`` restores all layers of a chunk, of which those before this layer still exist;
    ``nested`` the inputs of the chunk's layers.
    """
    before = recomputation.position(index)
    if not before:
        return 0
    # The input of the first layer is the checkpoint, which counts already unless it was in host memory.
    checkpoint = 0 if kept.offloaded[index - before] else input_bytes
    if recomputation.is_nested:
        return before * input_bytes - checkpoint
    return before * layer_bytes - checkpoint


def _prefetched(kept: Activations, recomputation: Recomputation, index: int) -> int:
    """Return what is fetched from host memory while layer ``index`` runs, for the layer or the chunk before it."""
    start = recomputation.unit(index)[0]
    if start == 0:
        return 0
    return sum(kept.offloaded_bytes[recomputation.unit(start - 1)[0] : start])
