"""The time of a training step by term: matmuls, attention, memory-bound operations, links, the host.

Every term is an estimate: work divided by a rate of ``hardware.py`` times the part of it that this
library reaches. The parts for GPUs are fitted to the rows of docs/benchmarks on H200; those for Trainium
are not calibrated, because no device was available.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.formulas import nested_chunk_layers
from nxd_memopt.planner.hardware import Device
from nxd_memopt.planner.layer_tensors import layer_runs, merges_branches
from nxd_memopt.planner.peak import StepMemory
from nxd_memopt.planner.rank_model import RankModel
from nxd_memopt.planner.rank_sizes import RankSizes
from nxd_memopt.planner.states import StateLayout


@dataclass(frozen=True)
class Rates:
    """Parts of a device's published rates that a training step reaches.

    Args:
        matmul: of the matmul rate, over a layer's matmuls.
        attention: of the matmul rate, forward and backward of causal attention.
        memory: of the memory bandwidth, in elementwise kernels and the optimizer.
        link: of the link's bandwidth, in collectives.
        exposed: part of the collectives' time that no computation hides.
        latency_s: seconds of a layer's forward and backward besides its work: gaps between kernels.
        host_s: seconds that the host needs to launch a layer's forward and backward without a graph.
        is_calibrated: whether the parts come from measurements.
    """

    matmul: float
    attention: float
    memory: float
    link: float
    exposed: float
    latency_s: float
    host_s: float
    is_calibrated: bool


RATES = {
    # Fitted: LLaMA-3-8B, 8,192 tokens, T=1, none: 735 ms; attention.csv: 628 of 989 TFLOP/s;
    # all-gathers reach 305 of 450 GB/s; SmolLM2 eager: 3.7 ms a layer.
    "cuda": Rates(0.645, 0.60, 0.80, 0.68, 0.40, 2.0e-4, 3.7e-3, is_calibrated=True),
    "neuron": Rates(0.45, 0.25, 0.60, 0.60, 0.60, 0.0, 0.0, is_calibrated=False),
    "cpu": Rates(0.50, 0.50, 0.50, 0.50, 1.00, 0.0, 0.0, is_calibrated=False),
}
"""Rates by kind of device."""
MEASURED_MATMUL = 0.90
"""Part of the rate of large matmuls that a step's matmuls reach: on H200 638 TFLOP/s (fitted) of the 706 of
the floor in docs/benchmarks/linear_cross_entropy.csv, 36.6 ms for 8,192 tokens."""
COPY_INTERFERENCE = 0.06
"""Part of the copies' time by which they slow the computation that hides them (fitted: LLaMA-3-8B,
32,768 tokens, 12 layers offloaded)."""
# Attention's backward has 5 matmuls where forward has 2.
_ATTENTION_BACKWARD = 2.5
# Bytes that the optimizer moves for an element whose states are on the device: reads of weight,
# gradient and moments, writes of weight and moments.
_UPDATE_READS_AND_WRITES = 7


def rates_of(device: Device) -> Rates:
    """Return the parts of a device's rates that a step reaches; of measured rates, what was measured."""
    rates = RATES[device.kind]
    if not device.measured:
        return rates
    attention = MEASURED_MATMUL * rates.attention / rates.matmul
    return replace(rates, matmul=MEASURED_MATMUL, attention=attention, memory=1.0, link=1.0, is_calibrated=True)


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
    peak = device.matmul_flops[dtype]
    matmul_s = matmul_flops(sizes, memory) / (peak * rates.matmul)
    attention_s = attention_flops(sizes, memory) / (peak * rates.attention)
    elementwise_s = elementwise_bytes(sizes) / (device.memory_bytes_per_s * rates.memory)
    latency_s = sizes.num_layers * rates.latency_s
    compute_s = matmul_s + attention_s + elementwise_s + latency_s
    link_s = device.link_bytes_per_s
    if sizes.tensor_model_parallel_size > device.ranks_per_host:
        link_s = device.host_link_bytes_per_s
    tensor_s = tensor_parallel_bytes(sizes, memory) / (link_s * rates.link) * rates.exposed
    # The experts wait for their rows, and the next layer for theirs.
    across_hosts = ranks > device.ranks_per_host
    expert_link_s = device.host_link_bytes_per_s if across_hosts else device.link_bytes_per_s
    experts_s = expert_parallel_bytes(sizes, memory) / (expert_link_s * rates.link)
    # Offloaded activations go out and come back while the layers compute.
    host_copy_s = 2 * used.host["activations"] / device.host_copy_bytes_per_s
    # Weights arrive twice and leave once; the two directions do not wait for each other.
    host_copy_s += 2 * used.host["weights"] / device.host_copy_bytes_per_s
    terms = {
        "matmuls": matmul_s,
        "attention": attention_s,
        "elementwise": elementwise_s + latency_s,
        "tensor-parallel collectives": tensor_s,
        "expert-parallel collectives": experts_s,
        "copies to and from the host": max(host_copy_s - compute_s, COPY_INTERFERENCE * host_copy_s),
    }
    if device.kind == "cuda" and not cuda_graph:
        terms["waiting for the host"] = max(0.0, sizes.num_layers * rates.host_s - compute_s - tensor_s)
    terms = {name: seconds * accumulation_steps for name, seconds in terms.items()}
    # All weights are on the device for the update, and nothing hides that copy.
    terms["copies to and from the host"] += used.host["weights"] / device.host_copy_bytes_per_s
    terms["data-parallel collectives"] = _data_parallel_s(model, layout, device, ranks, accumulation_steps)
    terms["optimizer"] = _optimizer_s(
        model,
        layout,
        used,
        device,
        compute_s=accumulation_steps * compute_s,
        forward_s=model_flops(sizes) / 3 / (peak * rates.matmul),
    )
    return StepTime(terms)


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
    if "mlp" in modules:
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
            again *= 2
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


def elementwise_bytes(sizes: RankSizes) -> float:
    """Return the bytes that norms, residuals, RoPE and activations read and write in a micro-batch.

    Of a token and layer, forward and backward: 17 H of norms and residual stream (GPT-NeoX's merged
    branches 20), 4 times the rotated columns, and 9 of the MLP's width (GPT-NeoX 5).
    """
    stream, width = (17, 9) if sizes.is_gated else (20, 5)
    rotated = 4 * (sizes.query + sizes.kv)
    elements = sizes.shard_tokens * stream * sizes.hidden + sizes.tokens * (rotated + width * _active_width(sizes))
    return float(elements * sizes.element_bytes * sizes.num_layers)


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


def _data_parallel_s(
    model: RankModel, layout: StateLayout, device: Device, ranks: int, accumulation_steps: int
) -> float:
    """Return the time of gradient reduction and parameter gathering over the data-parallel ranks."""
    size = layout.data_parallel_size
    if size == 1:
        return 0.0
    rates = rates_of(device)
    link = device.link_bytes_per_s
    if ranks > device.ranks_per_host:
        link = device.host_link_bytes_per_s
    share = (size - 1) / size
    gradients = model.num_parameters * layout.gradient_element_bytes
    weights = model.num_parameters * layout.element_bytes
    frozen = model.num_frozen * layout.element_bytes
    # Reduce-scatter and all-gather of all gradients, or of gradients and then parameters.
    sent = 2 * gradients
    hidden = 0.0
    if layout.sharding == "zero1":
        sent = gradients + weights
    elif layout.sharding == "zero2":
        sent = gradients * accumulation_steps + weights
        hidden = 1 - rates.exposed
    elif layout.sharding == "zero3":
        sent = (gradients + 2 * (weights + frozen)) * accumulation_steps
        hidden = 1 - rates.exposed
    return share * sent / (link * rates.link) * (1 - hidden)


def _optimizer_s(
    model: RankModel, layout: StateLayout, used: StepMemory, device: Device, *, compute_s: float, forward_s: float
) -> float:
    """Return the time of the update: memory bandwidth on the device, or the link for states on the host.

    Args:
        model: the rank's share of the model.
        layout: states of the optimizer.
        used: the step's memory, for the bytes on the host and those of the staging buffers.
        device: rates of memory and link.
        compute_s: computation of all micro-batches.
        forward_s: forward of one micro-batch.
    """
    elements = model.num_parameters / layout.shards
    moved = elements * _UPDATE_READS_AND_WRITES * layout.optimizer_bytes
    on_device = moved / (device.memory_bytes_per_s * rates_of(device).memory)
    copied_s = used.host["optimizer states"] / device.host_copy_bytes_per_s
    if not copied_s:
        return on_device
    # All states pass in and out at once. What fits the staging buffers arrives before the norm of the
    # gradients is known, the rest only after it, when updated states leave room for it.
    staged_s = used.device.get("staging of optimizer states", 0) / device.host_copy_bytes_per_s
    late_s = copied_s - min(staged_s, compute_s)
    if layout.update_in_forward:
        # A layer's states must have arrived before its next forward, so that only the forward of the
        # first micro-batch hides them; they go back to the host at any time until the next norm.
        late_s = max(late_s - forward_s, copied_s - compute_s)
    return max(on_device, late_s)
