"""Bytes of weights, gradients and optimizer states on one rank, by precision, ZeRO stage and offload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.architectures.parameters import ExpertShape, parameters
from nxd_memopt.config import require_divisible
from nxd_memopt.options import require_one_of

FP32_BYTES = 4
REMAINDER_BYTES = 2
"""Bytes of what an fp32 master has beyond its bf16 parameter (``ops/param_remainders.py``)."""
ADAM_MOMENTS = 2
STAGES = ("none", "zero1", "zero2", "zero3")
RESIDENT_ELEMENTS = 1 << 16
"""Parameters with fewer elements keep their states on the device: norms and biases, which are
0.003 % of LLaMA-3-8B's elements."""
STAGING_BYTES = 2 << 30
"""Device memory for optimizer states on their way from and to the host."""
CHUNK_ELEMENTS = 16 << 20
"""Elements of each state that travel together: 64 MiB in fp32, which take 1.2 ms at 55 GB/s. Next to
that the 10 us of a copy's launch and of the update's kernels do not count."""


@dataclass(frozen=True)
class StateLayout:
    """How a training run stores weights, gradients and the states of AdamW.

    Args:
        element_bytes: bytes of a parameter.
        master_weights: fp32 masters, moments and gradient sums for bf16 and fp16 parameters.
        sharding: ZeRO stage over the data-parallel ranks (arXiv:1910.02054).
        data_parallel_size: D, ranks over which the stage shards.
        expert_ranks: EP; the stage shards experts over the D/EP ranks that have the same ones.
        keeps_gathered: stage 3 keeps the gathered weights of all layers until their backward.
        overlaps_reduction: without sharding, gradients are averaged during backward.
        param_remainders: masters are stored as what they have beyond the bf16 parameters.
        optimizer_offload_fraction: part of masters and moments in host memory.
        in_backward: the optimizer runs inside backward, which frees each gradient.
        grad_reduce_in_fp32: False adds up gradients in the parameters' dtype, without sharding of
            gradients; with masters they are otherwise fp32 sums.
        staging_bytes: device memory for states on their way from and to the host.
        update_in_forward: the forward of each layer updates its states in host memory first. The
            peak stays: while gradients go, activations come, so that the sum is largest at an end.

    Raises:
        ValueError: the stage is unknown, or EP does not divide D.
    """

    element_bytes: int
    master_weights: bool = False
    sharding: str = "none"
    data_parallel_size: int = 1
    optimizer_offload_fraction: float = 0.0
    in_backward: bool = False
    grad_reduce_in_fp32: bool = True
    update_in_forward: bool = False
    staging_bytes: int = STAGING_BYTES
    expert_ranks: int = 1
    keeps_gathered: bool = False
    overlaps_reduction: bool = False
    param_remainders: bool = False

    def __post_init__(self) -> None:
        require_one_of("sharding", self.sharding, STAGES)
        replicas = self.data_parallel_size
        require_divisible("data_parallel_size", replicas, "expert_model_parallel_size", self.expert_ranks)

    # Cached: a search asks for it for every parameter.
    @cached_property
    def shards(self) -> int:
        """Ranks that share the states of a parameter; 1 without sharding."""
        # Without sharding every rank updates every parameter, and so has all of its states.
        if self.sharding == "none":
            return 1
        return self.data_parallel_size

    def shards_of(self, shape: Sequence[int]) -> int:
        """Return ``shards`` of a parameter of ``shape``, an ``ExpertShape`` for experts."""
        # Of D ranks only the D / EP ranks with the same experts have a gradient to reduce and states to share: with
        # 8 ranks and EP = 4 the two ranks of each expert store a half of its states each.
        if self.shards == 1 or not isinstance(shape, ExpertShape):
            return self.shards
        return self.shards // self.expert_ranks

    @property
    def gradient_element_bytes(self) -> int:
        """Bytes of an element of the gradients that backward leaves."""
        # Stages 2 and 3 add up the shards of micro-batches in the optimizer's dtype.
        return self.reduced_element_bytes if self.sharding in ("none", "zero1") else self.optimizer_bytes

    @property
    def reduced_element_bytes(self) -> int:
        """Bytes of an element of gradients that ranks reduce."""
        return self.optimizer_bytes if self.grad_reduce_in_fp32 else self.element_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of a moment's element: fp32 with masters, else the dtype of the parameter."""
        return FP32_BYTES if self.master_weights else self.element_bytes

    @property
    def master_element_bytes(self) -> int:
        """Bytes of an element of a master."""
        return REMAINDER_BYTES if self.param_remainders else self.optimizer_bytes


def elements(shapes: Sequence[Sequence[int]]) -> int:
    """Return the elements of parameters of ``shapes``."""
    return sum(math.prod(shape) for shape in shapes)


def optimizer_element_bytes(*, param_remainders: bool) -> int:
    """Return the bytes of an element's states: fp32 master, or its remainder, and AdamW's two fp32 moments."""
    moments = ADAM_MOMENTS * FP32_BYTES
    # 2 x 4 + 4 = 12 bytes; a remainder is the lower half of the master, whose upper half is the bf16 parameter: 10.
    if param_remainders:
        return moments + REMAINDER_BYTES
    return moments + FP32_BYTES


def local_shapes(
    spec: ModelSpec, tensor_model_parallel_size: int, expert_model_parallel_size: int = 1
) -> list[tuple[int, ...]]:
    """Return the shape of each parameter on one rank, in the model's order."""
    replicas = spec.kv_replicas(tensor_model_parallel_size)
    sizes = (tensor_model_parallel_size, replicas, expert_model_parallel_size)
    return [parameter.local_shape(*sizes) for parameter in parameters(spec)]


def shard_elements(shape: Sequence[int], layout: StateLayout) -> int:
    """Return the elements of a parameter of ``shape`` whose states this rank stores.

    Stages 1 and 2 split the flat parameter into D parts of ceil(n / D) elements. Stage 3 splits its
    rows (FSDP2): the first ranks store ceil(rows / D) of them.
    """
    # Both round up: the first ranks have most, and a plan must fit on every rank. Of 33 rows and D = 2 the first
    # rank stores 17 rows.
    shards = layout.shards_of(shape)
    if shards == 1:
        return math.prod(shape)
    if layout.sharding == "zero3":
        return -(-shape[0] // shards) * math.prod(shape[1:])
    return -(-math.prod(shape) // shards)


def shard_bytes(shapes: Sequence[Sequence[int]], layout: StateLayout) -> int:
    """Return the bytes of this rank's shards, in the optimizer's dtype."""
    return sum(shard_elements(shape, layout) for shape in shapes) * layout.optimizer_bytes


def weight_bytes(shapes: Sequence[Sequence[int]], layout: StateLayout) -> int:
    """Return the bytes of the weights between steps; with stage 3 the masters are the weights."""
    # The optimizer's shards are gathered where they are used.
    if layout.sharding == "zero3" and layout.shards > 1:
        return 0
    return elements(shapes) * layout.element_bytes


def frozen_weight_bytes(shapes: Sequence[Sequence[int]], layout: StateLayout) -> int:
    """Return the bytes between steps of weights that are not trained; stage 3 shards them in their own dtype."""
    # FSDP2 shards all parameters of a unit, trained or not.
    if layout.sharding == "zero3":
        return sum(shard_elements(shape, layout) for shape in shapes) * layout.element_bytes
    return elements(shapes) * layout.element_bytes


def initialization_bytes(shapes: Sequence[Sequence[int]], layout: StateLayout) -> int:
    """Return the host memory in which a rank initializes or loads its weights at stage 3, before they are sharded."""
    if layout.sharding != "zero3":
        return 0
    return elements(shapes) * layout.element_bytes


def gradient_bytes(shapes: Sequence[Sequence[int]], layout: StateLayout) -> int:
    """Return the bytes of all gradients when backward is done.

    With master weights they are accumulated in fp32 (``optimizer/main_grad.py``), unless
    ``grad_reduce_in_fp32`` is False. Stages 2 and 3
    keep this rank's shards only, and an optimizer in backward keeps none.
    """
    # Each gradient is used up by its update before the next one exists.
    if layout.in_backward:
        return 0
    if layout.sharding in ("zero2", "zero3"):
        return shard_bytes(shapes, layout)
    return elements(shapes) * layout.gradient_element_bytes


def master_bytes(shapes: Sequence[Sequence[int]], layout: StateLayout) -> int:
    """Return the bytes of the tensors that the optimizer updates instead of the parameters.

    Without sharding, parameters in the optimizer's dtype are updated themselves. Every sharded
    optimizer has shards of its own, also in the parameters' dtype.
    """
    # Without sharding and in one dtype the parameter is its own master. A shard is a tensor of its own: the
    # parameter is gathered from the shards, and so cannot share their memory.
    if layout.shards == 1 and layout.optimizer_bytes == layout.element_bytes:
        return 0
    return sum(shard_elements(shape, layout) for shape in shapes) * layout.master_element_bytes


def moment_bytes(shapes: Sequence[Sequence[int]], layout: StateLayout) -> int:
    """Return the bytes of AdamW's two moments."""
    return ADAM_MOMENTS * shard_bytes(shapes, layout)


def parameters_on_host(
    sizes: Sequence[int], fraction: float, *, resident_elements: int = RESIDENT_ELEMENTS
) -> set[int]:
    """Return which parameters have their optimizer states in host memory.

    They are spread evenly over the order of the updates, so that copies go on while parameters on
    the device are updated. With the first parameters on the host, the link would be idle then.

    Args:
        sizes: elements of each parameter, in the order of the updates.
        fraction: part of all elements, in [0, 1], rounded up to a whole parameter.
        resident_elements: parameters of fewer elements stay on the device; they do not count.

    Raises:
        ValueError: ``fraction`` is outside [0, 1].
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"optimizer_offload_fraction must be between 0 and 1, got {fraction}")
    chosen: set[int] = set()
    on_host = 0
    total = 0
    for index, size in enumerate(sizes):
        if size < resident_elements:
            continue
        total += size
        # Bresenham's rule: take a parameter when the part so far is below the fraction, so that at every index the
        # part on the host is at least the fraction and exceeds it by less than one parameter.
        if on_host < fraction * total:
            chosen.add(index)
            on_host += size
    return chosen


def offloaded_state_bytes(shapes: Sequence[Sequence[int]], layout: StateLayout) -> int:
    """Return the bytes of masters and moments in host memory: 12 for each element, 10 with remainders."""
    # The updates are ordered so: AdamW has a group with weight decay, and one of vectors without.
    ordered = sorted(shapes, key=lambda shape: len(shape) < 2)
    sizes = [shard_elements(shape, layout) for shape in ordered]
    chosen = parameters_on_host(sizes, layout.optimizer_offload_fraction)
    return sum(sizes[index] for index in chosen) * optimizer_element_bytes(param_remainders=layout.param_remainders)


def stream_slots(chunk_elements: int, staging_bytes: int, *, element_bytes: int) -> int:
    """Return the chunks of optimizer states that are on the device at a time, at least 2.

    With one chunk, its update, its way back and the next one's arrival would wait for each other.

    Args:
        chunk_elements: elements of a chunk.
        staging_bytes: device memory for chunks on their way.
        element_bytes: ``states.optimizer_element_bytes``.
    """
    return max(2, staging_bytes // (chunk_elements * element_bytes))


def stream_bytes(host_elements: int, *, chunk_elements: int, staging_bytes: int, element_bytes: int) -> int:
    """Return the device memory in bytes that optimizer states on the host need on their way.

    Args:
        host_elements: elements whose states are on the host.
        chunk_elements: see ``stream_slots``.
        staging_bytes: see ``stream_slots``.
        element_bytes: see ``stream_slots``.
    """
    if not host_elements:
        return 0
    # A ring of chunks, of which no more are allocated than there are: a small model has one chunk, as long as its
    # states, and the ring of a large one fills the staging memory.
    chunk_elements = min(chunk_elements, host_elements)
    num_chunks = -(-host_elements // chunk_elements)
    slots = min(stream_slots(chunk_elements, staging_bytes, element_bytes=element_bytes), num_chunks)
    return slots * chunk_elements * element_bytes
