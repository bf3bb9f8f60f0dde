"""The time of a training step by term: matmuls, attention, memory-bound operations, links, the host.

Every term is an estimate: work divided by a rate of ``hardware.py`` times the part of it that this
library reaches. The parts for GPUs are fitted to the rows of docs/benchmarks on H200; those for Trainium
are not calibrated, because no device was available.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.hardware import LAUNCH_S, Device
from nxd_memopt.planner.memory.peak import StepMemory
from nxd_memopt.planner.sizes.rank_model import RankModel
from nxd_memopt.planner.sizes.rank_sizes import RankSizes
from nxd_memopt.planner.sizes.states import StateLayout
from nxd_memopt.planner.timing.state_copies import host_copy_rate, state_copies_s
from nxd_memopt.planner.timing.step_work import (
    attention_flops,
    data_parallel_bytes,
    elementwise_bytes,
    expert_parallel_bytes,
    expert_passes,
    matmul_flops,
    model_flops,
    recomputed_layers,
    tensor_parallel_bytes,
    update_bytes,
)


@dataclass(frozen=True)
class Rates:
    """Parts of a device's published rates that a training step reaches.

    Args:
        matmul: of the matmul rate, over a layer's matmuls, in a step of matmuls and attention only.
        matmul_fp32: the same in fp32.
        attention: of the matmul rate, forward and backward of causal attention over a long sequence.
        memory: of the memory bandwidth, in elementwise kernels.
        update: of the memory bandwidth, in clipping and the optimizer.
        link: of the link's bandwidth, in collectives.
        exposed: part of the collectives' time that no computation hides.
        half_length: tokens of a sequence with which attention reaches half its rate.
        short_heads: part of attention's rate with heads of 64, which grows to 1 with heads of 128.
        attention_fp32: part of attention's rate in fp32.
        power: relative speed-up of matmuls when elementwise kernels take more of the step (power limit).
        latency_s: seconds of a layer's forward and backward besides its work: gaps between kernels.
        routing_s: seconds of the small kernels of router and dispatch, for each pass of a layer with experts.
        step_s: seconds between two steps in which the device waits.
        is_calibrated: whether the parts come from measurements.
    """

    matmul: float
    matmul_fp32: float
    attention: float
    memory: float
    update: float
    link: float
    exposed: float
    half_length: float = 0.0
    short_heads: float = 1.0
    attention_fp32: float = 1.0
    power: float = 0.0
    latency_s: float = 0.0
    routing_s: float = 0.0
    step_s: float = 0.0
    is_calibrated: bool = False


RATES = {
    # Fitted to 100 steps, 86 of docs/benchmarks/planned_memory.csv on H200s (formulas of b053a2f);
    # all-gathers reach 305 of 450 GB/s. The exposed part is fitted to the 34 of them with T=2 that the GPU limits.
    "cuda": Rates(
        matmul=0.677,
        matmul_fp32=0.703,
        attention=0.631,
        memory=0.829,
        update=0.833,
        link=0.68,
        exposed=0.5,
        half_length=1288,
        short_heads=0.869,
        attention_fp32=0.928,
        power=0.256,
        latency_s=2.15e-4,
        routing_s=6e-4,
        step_s=8.4e-3,
        is_calibrated=True,
    ),
    "neuron": Rates(0.45, 0.45, 0.25, 0.60, 0.60, 0.60, 0.60),
    "cpu": Rates(0.50, 0.50, 0.50, 0.50, 0.50, 0.50, 1.00),
}
"""Rates by kind of device."""
MEASURED = {"matmul": 708 / 989, "matmul_fp32": 51.1 / 67, "memory": 4.208 / 4.8, "link": 0.68}
"""Parts of H200's published rates that ``plan --calibrate`` measures: what it measures elsewhere stands for them."""


@dataclass(frozen=True)
class HostRates:
    """Seconds in which the host launches the kernels of a step without a graph, if an operation takes ``LAUNCH_S``.

    On the same host they differ by up to 20 % between runs.

    Args:
        layer: forward and backward of a layer.
        collectives: besides, of a layer with tensor parallelism.
        recomputed: besides, of a recomputed layer.
        kept: besides, of a recomputed layer that keeps the results of its attention.
        selective: besides, of a layer that recomputes some of its modules.
        offloaded: besides, of a layer with activations in host memory.
        group: besides, for each group of heads.
        experts: besides, of a layer with experts.
        parameter: hooks and update of a parameter, once a step.
    """

    layer: float = 3.6e-3
    collectives: float = 2.6e-3
    recomputed: float = 2.35e-3
    kept: float = 1.7e-3
    selective: float = 3.2e-3
    offloaded: float = 1.4e-3
    group: float = 5.9e-3
    experts: float = 5.5e-3
    parameter: float = 2.4e-6


HOST = HostRates()
OVERLAP = 6.3
"""Exponent of the norm of the device's and the host's time: the larger one decides, and near each other both do."""
COPY_INTERFERENCE = 0.06
"""Part of the copies' time by which they slow the computation that hides them (fitted: LLaMA-3-8B,
32,768 tokens, 12 layers offloaded)."""


def rates_of(device: Device) -> Rates:
    """Return the parts of a device's rates that a step reaches; of measured rates, what was measured.

    What a step reaches of measured rates is known of GPUs alone. On other devices the GPUs' parts stand for
    theirs, which orders the settings, and the rates are not calibrated.
    """
    rates = RATES[device.kind]
    if not device.measured:
        return rates
    matmul, memory = MEASURED["matmul"], MEASURED["memory"]
    gpu = RATES["cuda"]
    return replace(
        rates,
        matmul=gpu.matmul / matmul,
        matmul_fp32=gpu.matmul_fp32 / MEASURED["matmul_fp32"],
        attention=rates.attention / rates.matmul * gpu.matmul / matmul,
        memory=gpu.memory / memory,
        update=gpu.update / memory,
        link=1.0,
        is_calibrated=device.kind == "cuda",
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by term, which add up.

    Args:
        terms: term -> seconds.
    """

    terms: dict[str, float]

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return sum(self.terms.values())

    @property
    def limit(self) -> str:
        """The largest term."""
        return max(self.terms, key=lambda name: self.terms[name])


def step_time(
    model: RankModel,
    memory: MemoryConfig,
    layout: StateLayout,
    used: StepMemory,
    device: Device,
    *,
    dtype: str,
    accumulation_steps: int,
    ranks: int,
    cuda_graph: bool,
) -> StepTime:
    """Return the time of an optimizer step.

    Args:
        model: the rank's share of the model.
        memory: recompute and offload.
        layout: states of the optimizer.
        used: the step's memory, for the bytes that pass between device and host.
        device: rates of the device.
        dtype: dtype of the matmuls.
        accumulation_steps: micro-batches per step.
        ranks: ranks of the run.
        cuda_graph: one launch per micro-batch.
    """
    rates = rates_of(device)
    sizes = model.sizes
    compute = _compute_terms(sizes, memory, device, rates, dtype)
    compute_s = sum(compute.values())
    link_s = device.link_bytes_per_s
    if sizes.tensor_model_parallel_size > device.ranks_per_host:
        link_s = device.host_link_bytes_per_s
    # On XLA a recomputation runs to its end.
    stops_early = device.kind != "neuron"
    tensor_bytes = tensor_parallel_bytes(sizes, memory, stops_early=stops_early)
    tensor_s = tensor_bytes / (link_s * rates.link) * rates.exposed
    # The experts wait for their rows, and the next layer for theirs.
    across_hosts = ranks > device.ranks_per_host
    expert_link_s = device.host_link_bytes_per_s if across_hosts else device.link_bytes_per_s
    experts_s = expert_parallel_bytes(sizes, memory, stops_early=stops_early) / (expert_link_s * rates.link)
    # Offloaded activations go out and come back while the layers compute.
    copy_rate = host_copy_rate(device, ranks)
    host_copy_s = 2 * used.host["activations"] / copy_rate
    # Weights arrive twice and leave once; the two directions do not wait for each other.
    host_copy_s += 2 * used.host["weights"] / copy_rate
    terms = {
        **compute,
        "tensor-parallel collectives": tensor_s,
        "expert-parallel collectives": experts_s,
        "copies to and from the host": max(host_copy_s - compute_s, COPY_INTERFERENCE * host_copy_s),
    }
    terms = {name: seconds * accumulation_steps for name, seconds in terms.items()}
    # All weights are on the device for the update, and nothing hides that copy.
    terms["copies to and from the host"] += used.host["weights"] / copy_rate
    terms["data-parallel collectives"] = _data_parallel_s(model, layout, device, ranks, accumulation_steps)
    forward_s = model_flops(sizes) / 3 / (device.matmul_flops[dtype] * rates.matmul)
    on_device_s = update_bytes(model, layout, accumulation_steps) / (device.memory_bytes_per_s * rates.update)
    terms["optimizer"] = on_device_s + state_copies_s(
        model, layout, used, copy_rate, compute_s=accumulation_steps * compute_s, forward_s=forward_s
    )
    if device.kind == "cuda":
        device_s = accumulation_steps * (compute_s + tensor_s) + on_device_s
        host_s = _launching_s(model, memory, accumulation_steps, cuda_graph=cuda_graph) * device.launch_s / LAUNCH_S
        # The launches of the update follow the graph, while the device has no other work.
        waiting_s = host_s if cuda_graph else (device_s**OVERLAP + host_s**OVERLAP) ** (1 / OVERLAP) - device_s
        terms["waiting for the host"] = waiting_s + rates.step_s
    return StepTime(terms)


def _compute_terms(
    sizes: RankSizes, memory: MemoryConfig, device: Device, rates: Rates, dtype: str
) -> dict[str, float]:
    """Return the seconds of a micro-batch's kernels by term."""
    peak = device.matmul_flops[dtype]
    is_fp32 = dtype == "float32"
    matmul_s = matmul_flops(sizes, memory) / (peak * (rates.matmul_fp32 if is_fp32 else rates.matmul))
    length = sizes.sequence_length
    attention_rate = rates.attention * length / (length + rates.half_length)
    # From heads of 64 to heads of 128, which fill the kernels' tiles.
    attention_rate *= rates.short_heads + (1 - rates.short_heads) * min(1.0, max(0.0, sizes.head_dim / 64 - 1))
    if is_fp32:
        attention_rate *= rates.attention_fp32
    attention_s = attention_flops(sizes, memory) / (peak * attention_rate)
    elementwise_s = elementwise_bytes(sizes, memory) / (device.memory_bytes_per_s * rates.memory)
    elementwise_s += sizes.num_layers * rates.latency_s
    if sizes.moe is not None:
        elementwise_s += expert_passes(sizes, memory) * rates.routing_s
    # Power limits the clock of matmuls and attention.
    others = elementwise_s / (matmul_s + attention_s + elementwise_s)
    return {
        "matmuls": matmul_s / (1 + rates.power * others),
        "attention": attention_s,
        "elementwise": elementwise_s,
    }


def _launching_s(model: RankModel, memory: MemoryConfig, accumulation_steps: int, *, cuda_graph: bool) -> float:
    """Return the seconds in which a host of ``LAUNCH_S`` launches the kernels of a step.

    Args:
        model: the rank's share of the model.
        memory: techniques, of which several launch more kernels.
        accumulation_steps: micro-batches per step.
        cuda_graph: of forward and backward, so that the update alone is launched kernel by kernel.
    """
    sizes = model.sizes
    layers = sizes.num_layers
    num_parameters = layers * len(model.layer_shapes) + len(model.other_shapes)
    update_s = num_parameters * HOST.parameter
    if cuda_graph:
        return update_s
    passes_s = layers * HOST.layer
    if sizes.tensor_model_parallel_size > 1:
        passes_s += layers * HOST.collectives
    if memory.recompute_granularity == "full":
        recomputed = recomputed_layers(sizes, memory)
        # Forward's part of the launches of collectives and experts, taken as a half.
        again_s = HOST.recomputed
        if sizes.tensor_model_parallel_size > 1:
            again_s += HOST.collectives / 2
        if sizes.moe is not None:
            again_s += HOST.experts / 2
        passes_s += recomputed * again_s
        if memory.recompute_keep_core_attn:
            passes_s += len(memory.layers_keeping_attention(layers)) * HOST.kept
    elif memory.recompute_granularity == "selective":
        passes_s += memory.num_selective_layers(layers) * HOST.selective
        if "moe" in (memory.recompute_modules or ()):
            passes_s += memory.num_selective_layers(layers) * HOST.experts / 2
    if memory.cpu_offloading_activations or memory.cpu_offloading_num_layers:
        passes_s += layers * HOST.offloaded
    if isinstance(memory.attention_head_groups, int):
        passes_s += layers * memory.attention_head_groups * HOST.group
    if sizes.moe is not None:
        passes_s += layers * HOST.experts
    return accumulation_steps * passes_s + update_s


def _data_parallel_s(
    model: RankModel, layout: StateLayout, device: Device, ranks: int, accumulation_steps: int
) -> float:
    """Return the time of gradient reduction and parameter gathering over the data-parallel ranks.

    Args:
        model: the rank's share of the model.
        layout: ZeRO stage, ranks over which it shards, and dtypes.
        device: rates of the links.
        ranks: ranks of the run.
        accumulation_steps: micro-batches per step.
    """
    rates = rates_of(device)
    tensor_ranks = model.sizes.tensor_model_parallel_size
    instances = max(1, ranks // tensor_ranks // layout.data_parallel_size)
    sent = data_parallel_bytes(model, layout, accumulation_steps, instances=instances)
    # The instances of hybrid sharding are runs of consecutive ranks, such as those of a host.
    across_link = device.link_bytes_per_s if ranks <= device.ranks_per_host else device.host_link_bytes_per_s
    link = across_link
    if instances > 1 and tensor_ranks * layout.data_parallel_size <= device.ranks_per_host:
        link = device.link_bytes_per_s
    seconds = (sent.after + rates.exposed * sent.during) / link
    seconds += (sent.across_after + rates.exposed * sent.across_during) / across_link
    return seconds / rates.link
