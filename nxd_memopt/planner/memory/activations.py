"""The bytes that a forward pass leaves on a rank for backward, by layer and technique."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType

from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.planner.memory.layer_parts import layer_parts, rotates_with_grad
from nxd_memopt.planner.memory.layer_tensors import (
    KEEPABLE_ATTENTION,
    SINGLE_KERNELS,
    Kernels,
    Tensors,
    dropout_bytes,
    fp8_magnitudes,
    layer_kernels,
    layer_runs,
    norm_tensors,
)
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes, rank_sizes
from nxd_memopt.planner.techniques.recomputation import Recomputation

OFFLOADED_STORAGE_BYTES = 1 << 20
"""Smallest storage that is moved to the host: smaller ones would be many transfers for little memory."""
BLOCK_BYTES = 32 << 20
"""Size of the blocks of host memory. A power of two, because PyTorch rounds pinned allocations up to one."""
SHARED_TENSORS = (
    "rope cosine",
    "rope sine",
    "local ids",
    "foreign ids",
    "padding ids",
    "dropout of the embedding",
)
"""Storages that all layers share, or that only the embedding's backward needs."""
_INT64_BYTES = 8


@dataclass(frozen=True)
class Activations:
    """Storages between forward and backward of one micro-batch on one rank.

    Args:
        layers: for each decoder layer, the storages on the device.
        offloaded: for each decoder layer, the storages in host memory.
        around: storages of embedding, RoPE, final norm and loss on the device.
    """

    layers: tuple[Mapping[str, int], ...]
    offloaded: tuple[Mapping[str, int], ...]
    around: Mapping[str, int]

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of each decoder layer on the device."""
        return tuple(sum(layer.values()) for layer in self.layers)

    @cached_property
    def offloaded_bytes(self) -> tuple[int, ...]:
        """Bytes of each decoder layer in host memory."""
        return tuple(sum(layer.values()) for layer in self.offloaded)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return sum(self.layer_bytes) + sum(self.around.values())

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(self.offloaded_bytes)


def host_pool_bytes(kept: Activations, memory: MemoryConfig, *, block_bytes: int = BLOCK_BYTES) -> int:
    """Return the host memory in bytes that the offload of activations allocates, in blocks.

    What offloads together, a layer or a chunk of recomputed layers, is taken to be as large as the
    largest one (``memory/offload.py``).

    Args:
        kept: activations of a micro-batch.
        memory: recompute and offload.
        block_bytes: size of a block.
    """
    # n layers, or chunks, need n times the bytes of the largest one, rounded up to blocks once over all of them.
    depth = len(kept.offloaded)
    chunk = 1
    if memory.cpu_offloading_activations:
        chunk = Recomputation.of(memory, depth).chunk
    offloaded = memory.num_offloaded_layers(depth)
    together = [sum(kept.offloaded_bytes[start : start + chunk]) for start in range(0, offloaded, chunk)]
    return -(-max(together, default=0) * len(together) // block_bytes) * block_bytes


def offloaded_checkpoint_bytes(
    spec: ModelSpec,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    *,
    sequence_length: int,
    micro_batch_size: int,
    dtype: str,
    smallest_bytes: int = OFFLOADED_STORAGE_BYTES,
) -> int:
    """Return the host memory in bytes of the checkpoints that ``cpu_offloading_activations`` moves.

    The same on every device: inputs of layers, and results of attention that are kept.

    Args:
        spec: the model; the other arguments as ``rank_sizes``.
        parallel: T and sequence parallelism.
        memory: full recompute.
        sequence_length: S.
        micro_batch_size: B.
        dtype: dtype of activations.
        smallest_bytes: see ``activations``.

    Raises:
        ValueError: see ``rank_sizes`` and ``activations``.
    """
    sizes = rank_sizes(spec, parallel, sequence_length=sequence_length, micro_batch_size=micro_batch_size, dtype=dtype)
    # Every kernel that is one operator returns the same results, with dropout too.
    kernels = Kernels(fused=True, attention=SINGLE_KERNELS[0])
    return activations(sizes, memory, kernels, smallest_bytes=smallest_bytes).host_bytes


# A search plans the same activations with many ZeRO stages and fractions of offloaded states.
@lru_cache(maxsize=512)
def activations(
    sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, *, smallest_bytes: int = OFFLOADED_STORAGE_BYTES
) -> Activations:
    """Return the storages that forward leaves for backward.

    Args:
        sizes: sizes of the rank.
        memory: recompute, offload and tiles.
        kernels: fused or plain operations, and the implementation of attention.
        smallest_bytes: smaller storages stay on the device: they are not worth a transfer each.

    Raises:
        ValueError: recompute does not fit the number of layers, or attention is not one operator
            whose result could be kept.
    """
    # Read-only: all callers share the cached result.
    on_device: list[Mapping[str, int]] = []
    on_host: list[Mapping[str, int]] = []
    for kept, is_offloaded in _by_layer(sizes, memory, kernels):
        moved: Tensors = {}
        if is_offloaded:
            moved = {name: size for name, size in kept.items() if size >= smallest_bytes}
        on_host.append(MappingProxyType(moved))
        on_device.append(MappingProxyType({name: size for name, size in kept.items() if name not in moved}))
    return Activations(tuple(on_device), tuple(on_host), MappingProxyType(_around(sizes, memory, kernels)))


def _by_layer(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels) -> list[tuple[Tensors, bool]]:
    """Return for each layer what it keeps, and whether that waits in host memory."""
    depth = sizes.num_layers
    if memory.recompute_granularity != "full":
        by_layer: list[Tensors] = []
        for count, techniques in layer_runs(memory, depth):
            modules = techniques.recompute_modules or ()
            if sizes.moe is None and sizes.are_layers_alike:
                by_layer += [layer_parts(sizes, techniques, kernels).kept(modules)] * count
                continue
            for index in range(len(by_layer), len(by_layer) + count):
                by_layer.append(layer_parts(sizes, techniques, kernels, index).kept(modules))
        return [(kept, i < memory.num_offloaded_layers(depth)) for i, kept in enumerate(by_layer)]
    _require_kept_attention(sizes, memory, kernels)
    layer = layer_parts(sizes, memory, kernels)
    recomputation = Recomputation.of(memory, depth)
    offloaded = memory.num_offloaded_layers(depth)
    keeping = memory.layers_keeping_attention(depth)
    layers: list[tuple[Tensors, bool]] = []
    for index in range(depth):
        if not recomputation.is_recomputed(index):
            layers.append((layer_parts(sizes, memory, kernels, index).kept(), index < recomputation.first))
            continue
        # A chunk of layers keeps the input of its first layer, and the results of attention of all. A layer with
        # experts has the statistics of the layers before it in its input, which grow with its number.
        kept = fp8_magnitudes(sizes, memory, index)
        if recomputation.position(index) == 0:
            kept |= layer_parts(sizes, memory, kernels, index).inputs if sizes.moe else layer.inputs
        if index in keeping:
            kept |= layer.kept_results()
        # A chunk belongs to its first layer. Layers in host memory are no part of one.
        layers.append((kept, recomputation.unit(index).start < offloaded))
    return layers


def _require_kept_attention(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels) -> None:
    """Raise ``ValueError`` if full recompute is to keep results of attention that is no operator, or has dropout."""
    keeping = memory.layers_keeping_attention(sizes.num_layers)
    if keeping and sizes.attention_dropout:
        raise ValueError(
            "recompute_keep_core_attn needs attention without dropout: leave it out, or set attention_dropout to 0"
        )
    for index in keeping:
        name = layer_kernels(sizes, kernels, index).attention
        if name not in KEEPABLE_ATTENTION:
            raise ValueError(
                f"recompute_keep_core_attn needs attention by one operator, one of {list(KEEPABLE_ATTENTION)}, and it "
                f"is {name!r} in layer {index}: leave it out, or choose another attention_backend"
            )


def _around(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels) -> Tensors:
    """Return the storages that do not belong to a decoder layer."""
    # Cosine and sine of all positions, shared by all layers: S x d_rope elements each, whatever B is.
    table = sizes.sequence_length * sizes.rotary_dim * sizes.element_bytes
    tensors: Tensors = {}
    if rotates_with_grad(sizes, memory):
        tensors |= {"rope cosine": table, "rope sine": table}
    # Frozen, the embedding has no backward.
    if sizes.adapters is None and sizes.has_embedding:
        tensors |= _embedding_tensors(sizes, kernels)
    if not sizes.has_head:
        return tensors
    tensors |= norm_tensors(sizes, kernels, "final norm input").saves
    tensors |= loss_tensors(sizes, fused=memory.fused_linear_cross_entropy)
    if sizes.moe is not None and sizes.moe.has_hf_loss:
        # The divisor, and the experts' shares.
        shares = sizes.moe.num_experts * sizes.moe.number_bytes
        tensors |= {"tokens of the router": sizes.moe.number_bytes, "shares of the experts": shares}
    return tensors


def _embedding_tensors(sizes: RankSizes, kernels: Kernels) -> Tensors:
    """Return what the embedding and its dropout save."""
    tensors: Tensors = {}
    # A vocabulary-parallel lookup saves local ids, and a mask for the rows of other ranks.
    if sizes.tensor_model_parallel_size > 1:
        tensors |= {"local ids": sizes.tokens * _INT64_BYTES, "foreign ids": sizes.tokens}
    if sizes.hidden_dropout:
        tensors["dropout of the embedding"] = dropout_bytes(sizes, kernels)
    if sizes.pads:
        tensors["padding ids"] = sizes.tokens
    return tensors


def loss_tensors(sizes: RankSizes, *, fused: bool) -> Tensors:
    """Return what head and loss keep.

    The fused loss computes its gradients in forward and keeps them instead of its inputs; in fp16,
    where the loss scale must enter before rounding, it keeps the inputs and computes in backward.
    Without it, the head keeps its input unless it is frozen, and the loss the gradient of all logits and the number of
    labels.

    Args:
        sizes: sizes of the rank.
        fused: ``fused_linear_cross_entropy``.
    """
    stream = sizes.residual_bytes
    if not fused:
        logits = sizes.column_bytes(sizes.vocab)
        tensors = {"loss": FP32_BYTES, "labels": _INT64_BYTES, "gradient of the logits": logits}
        # A frozen head keeps no input.
        return tensors if sizes.adapters is not None else tensors | {"head input": stream}
    if sizes.is_fp16:
        # Of one sequence they are a view of the padded labels, of several rows a copy.
        labels = sizes.tokens + int(sizes.micro_batch_size == 1)
        numbers = {"labels": labels * _INT64_BYTES, "scale of the losses": sizes.tokens * FP32_BYTES}
        return {"loss": FP32_BYTES, "head input": stream} | numbers
    tensors = {"loss": FP32_BYTES, "gradient of the head's input": stream}
    if sizes.adapters is None:
        tensors["gradient of the head"] = sizes.vocab * sizes.hidden * sizes.element_bytes
    return tensors
