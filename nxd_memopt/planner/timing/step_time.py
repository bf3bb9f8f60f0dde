"""The time of a training step by term: matmuls, attention, memory-bound operations, links, the host.

Every term is an estimate: work divided by a rate of ``hardware.py`` times the part of it that this
library reaches. The parts for GPUs are fitted to the rows of docs/benchmarks on H200; those for Trainium
are not calibrated, because no device was available.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.hardware import Device
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
    fp8_cast_bytes,
    fp8_flops,
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
        matmul_fp8: of twice the matmul rate, over a layer's matmuls with float8 operands.
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
    matmul_fp8: float = 0.0


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
        # 12 matmuls of a layer of LLaMA-3-8B take 8.5 ms in float8 and 15.40 in bf16: 0.677 * 15.40 / 8.5 / 2.
        matmul_fp8=0.613,
    ),
    "neuron": Rates(0.45, 0.45, 0.25, 0.60, 0.60, 0.60, 0.60),
    "cpu": Rates(0.50, 0.50, 0.50, 0.50, 0.50, 0.50, 1.00),
}
"""Rates by kind of device."""
MEASURED = {"matmul": 708 / 989, "matmul_fp32": 51.1 / 67, "memory": 4.208 / 4.8, "link": 0.68}
"""Parts of H200's published rates that ``plan --calibrate`` measures. Elsewhere its measurements replace them."""


# Fitted once to the 128 rows of docs/benchmarks/planned_memory.csv whose steps launches may limit, so that the steps
# lie between these launches and twice as many: 110 do, 12 are faster, and 6 slower (groups of heads, small tiles).
LAUNCHES = 60
"""Small operations, of ``Device.launch_s`` each, that a host launches for a pass of a decoder layer: forward, backward
or recomputed forward. Tensor parallelism launches as many again, float8 too, and experts twice as many."""
LAUNCH_RANGE = 2
"""Times these launches that a step may take: hosts, their load, and memory techniques differ."""
COPY_INTERFERENCE = 0.06
"""Part of the copies' time by which they slow the computation that hides them (fitted: LLaMA-3-8B,
32,768 tokens, 12 layers offloaded)."""


def rates_of(device: Device) -> Rates:
    """Return the parts of a device's rates that a step reaches; of measured rates, what was measured.

    What a step reaches of measured rates is known of GPUs alone. On other devices the GPUs' parts stand for
    theirs, which orders the settings, and the rates are not calibrated.
    """
    # Published rates are peaks; measured ones are what a kernel alone reaches.
    rates = RATES[device.kind]
    if not device.measured:
        return rates
    matmul, memory = MEASURED["matmul"], MEASURED["memory"]
    gpu = RATES["cuda"]
    return replace(
        rates,
        matmul=gpu.matmul / matmul,
        matmul_fp32=gpu.matmul_fp32 / MEASURED["matmul_fp32"],
        matmul_fp8=gpu.matmul_fp8 / matmul,
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
        uncertain_s: seconds that the step may take besides: launches of a step that may wait for the host, and copies
            of offloaded activations, which stay on the device while memory is left.
    """

    terms: dict[str, float]
    uncertain_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Expected seconds of the step."""
        return sum(self.terms.values())

    @property
    def most_s(self) -> float:
        """Seconds that the step may take."""
        return self.step_s + self.uncertain_s

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
    stages: int = 1,
    chunks: int = 1,
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
        stages: P, ranks of a pipeline, which are taken to be equally fast.
        chunks: V, stages of each of them.
    """
    rates = rates_of(device)
    sizes = model.sizes
    compute = _compute_terms(sizes, memory, device, rates, dtype)
    compute_s = sum(compute.values())
    links = _link_terms(sizes, memory, device, rates, ranks=ranks, stages=stages, chunks=chunks)
    # Offloaded activations go out and come back while the layers compute.
    copy_rate = host_copy_rate(device, ranks)
    activations_s = 2 * used.host["activations"] / copy_rate
    # Weights arrive twice and leave once; the two directions do not wait for each other.
    weights_s = 2 * used.host["weights"] / copy_rate
    copies_s = activations_s + weights_s
    late_s = max(0.0, copies_s * (1 - COPY_INTERFERENCE) - compute_s)
    uncertain_s = 0.0
    # Without recompute of them, activations stay on the device while memory is left, so that nothing waits.
    if used.host["activations"] and not memory.cpu_offloading_activations:
        uncertain_s = late_s
        late_s = 0.0
    terms = {
        **compute,
        **links,
        "copies to and from the host": COPY_INTERFERENCE * copies_s + late_s,
    }
    micro_batch_s = sum(terms.values())
    terms = {name: seconds * accumulation_steps for name, seconds in terms.items()}
    if stages > 1:
        # The first micro-batch on its way to the last stage, and the last one on its way back.
        terms["waiting for other stages"] = (stages - 1) / chunks * micro_batch_s
    uncertain_s *= accumulation_steps
    # All weights are on the device for the update, and nothing hides that copy.
    terms["copies to and from the host"] += used.host["weights"] / copy_rate
    terms["data-parallel collectives"] = _data_parallel_s(model, layout, device, ranks // stages, accumulation_steps)
    # Only the forward hides the copies of states that are updated in it.
    # A third of the model's FLOPs: backward has twice the matmuls of forward.
    forward_s = model_flops(sizes) / 3 / (device.matmul_flops[dtype] * rates.matmul)
    on_device_s = update_bytes(model, layout, accumulation_steps) / (device.memory_bytes_per_s * rates.update)
    # Copies of activations and weights have the link first; the rest of the computation hides copies of states.
    free = max(0.0, 1 - copies_s / compute_s)
    terms["optimizer"] = on_device_s + state_copies_s(
        model, layout, used, copy_rate, compute_s=accumulation_steps * compute_s * free, forward_s=forward_s * free
    )
    if device.kind == "cuda":
        device_s = sum(terms.values()) + rates.step_s
        # One launch starts the kernels of a graph.
        host_s = 0.0
        if not cuda_graph:
            host_s = accumulation_steps * launches(sizes, memory) * device.launch_s
        terms["waiting for the host"] = rates.step_s + max(0.0, host_s - device_s)
        # Host and device work at the same time: the step lasts as long as the slower of both, and the host may take
        # LAUNCH_RANGE times the expected launches. Only what exceeds the expected step is uncertain.
        uncertain_s += max(0.0, LAUNCH_RANGE * host_s - max(host_s, device_s))
    return StepTime(terms, uncertain_s)


def _link_terms(
    sizes: RankSizes, memory: MemoryConfig, device: Device, rates: Rates, *, ranks: int, stages: int, chunks: int
) -> dict[str, float]:
    """Return the seconds that a micro-batch waits for links; arguments as ``step_time``."""
    link = _link_of(device, sizes.tensor_model_parallel_size)
    # On XLA a recomputation runs to its end.
    stops_early = device.kind != "neuron"
    tensor_bytes = tensor_parallel_bytes(sizes, memory, stops_early=stops_early)
    # The experts wait for their rows, and the next layer for theirs.
    expert_link = _link_of(device, ranks // stages)
    experts_s = expert_parallel_bytes(sizes, memory, stops_early=stops_early) / (expert_link * rates.link)
    # Gathers and reductions of a layer overlap with its matmuls in part: the exposed part was fitted over steps with
    # T = 2 whose limit is the GPU.
    terms = {
        "tensor-parallel collectives": tensor_bytes / (link * rates.link) * rates.exposed,
        "expert-parallel collectives": experts_s,
    }
    if stages > 1:
        # Hidden states come in while others go out, and so do their gradients; nothing hides either.
        sent = 2 * chunks * sizes.residual_bytes
        terms["messages between stages"] = sent / (_link_of(device, ranks) * rates.link)
    return terms


def launches(sizes: RankSizes, memory: MemoryConfig) -> int:
    """Return the small operations that the host launches for the decoder layers of a micro-batch."""
    passes = 2 * sizes.num_layers + recomputed_layers(sizes, memory)
    if memory.recompute_granularity == "selective":
        passes += memory.num_selective_layers(sizes.num_layers)
    # Attention and MLP; the casts of float8 operands; collectives; router, dispatch and experts.
    parts = 1
    has_fp8 = sizes.fp8 is not None
    if has_fp8 and any(sizes.fp8_linears(index) or sizes.fp8_experts(index) for index in range(sizes.num_layers)):
        parts += 1
    if sizes.tensor_model_parallel_size > 1:
        parts += 1
    if sizes.moe is not None:
        parts += 2
    return LAUNCHES * parts * passes


def _compute_terms(
    sizes: RankSizes, memory: MemoryConfig, device: Device, rates: Rates, dtype: str
) -> dict[str, float]:
    """Return the seconds of a micro-batch's kernels by term."""
    peak = device.matmul_flops[dtype]
    length = sizes.sequence_length
    matmul_rate = rates.matmul
    # Short sequences reach a smaller part of the rate.
    attention_rate = rates.attention * length / (length + rates.half_length)
    # From heads of 64 to heads of 128, which fill the kernels' tiles.
    attention_rate *= rates.short_heads + (1 - rates.short_heads) * min(1.0, max(0.0, sizes.head_dim / 64 - 1))
    if dtype == "float32":
        matmul_rate = rates.matmul_fp32
        attention_rate *= rates.attention_fp32
    in_fp8 = fp8_flops(sizes, memory)
    matmul_s = (matmul_flops(sizes, memory) - in_fp8) / (peak * matmul_rate)
    # Published rates of float8 are twice those of bf16 ([h100], [h200], [b200]); devices without have no such matmuls.
    if in_fp8:
        matmul_s += in_fp8 / (2 * peak * rates.matmul_fp8)
    attention_s = attention_flops(sizes, memory) / (peak * attention_rate)
    moved = elementwise_bytes(sizes, memory) + fp8_cast_bytes(sizes, memory)
    elementwise_s = moved / (device.memory_bytes_per_s * rates.memory)
    elementwise_s += sizes.num_layers * rates.latency_s
    # Router and dispatch are many small kernels, whatever their bytes.
    if sizes.moe is not None:
        elementwise_s += expert_passes(sizes, memory) * rates.routing_s
    # Power limits the clock of matmuls and attention.
    others = elementwise_s / (matmul_s + attention_s + elementwise_s)
    return {
        "matmuls": matmul_s / (1 + rates.power * others),
        "attention": attention_s,
        "elementwise": elementwise_s,
    }


def _link_of(device: Device, ranks: int) -> float:
    """Return the bytes per second that a rank sends in a group of ``ranks`` consecutive ranks."""
    # A ring passes through every rank: one slow hop between two hosts sets the rate of all of them.
    if ranks > device.ranks_per_host:
        return device.host_link_bytes_per_s
    return device.link_bytes_per_s


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
    # Hybrid sharding has several groups of shards.
    instances = max(1, ranks // tensor_ranks // layout.data_parallel_size)
    sent = data_parallel_bytes(model, layout, accumulation_steps, instances=instances)
    # The instances of hybrid sharding are runs of consecutive ranks, such as a host's ranks.
    link = across_link = _link_of(device, ranks)
    if instances > 1 and tensor_ranks * layout.data_parallel_size <= device.ranks_per_host:
        link = device.link_bytes_per_s
    seconds = (sent.after + rates.exposed * sent.during) / link
    seconds += (sent.across_after + rates.exposed * sent.across_during) / across_link
    return seconds / rates.link
