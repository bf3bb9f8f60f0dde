"""Applies memory techniques and compilation to a model, in one order."""

from __future__ import annotations

from typing import Literal, cast

from torch import nn

from nxd_memopt.backends import Backend, HostTransfers, backend
from nxd_memopt.config import COMPILE, MemoryConfig
from nxd_memopt.memory.compiled import apply_compile, remove_compile, require_compile, require_recompute_in_graphs
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.offload import LAYERS_IN_FLIGHT, ActivationOffload, apply_offload, new_pool, remove_offload
from nxd_memopt.memory.recompute import (
    Recomputable,
    apply_recompute,
    recomputes_parts,
    remove_recompute,
    require_recompute,
)
from nxd_memopt.memory.tiles import apply_head_groups, apply_tiles, remove_tiles, require_head_groups, require_tiles
from nxd_memopt.memory.weight_offload import apply_weight_offload, remove_weight_offload
from nxd_memopt.options import require_one_of
from nxd_memopt.parallel_layers.data_shards import require_replicated
from nxd_memopt.parallel_layers.wrapping import is_wrapped
from nxd_memopt.planner.techniques.recomputation import Recomputation


def apply_memory(
    model: Recomputable, memory: MemoryConfig, *, compile: Literal["layer"] | None = None, pool: HostPool | None = None
) -> None:
    """Apply the techniques that ``memory`` and ``compile`` select.

    A second call replaces the first choice.

    The order, from the inside of a layer to the outside:

    0. Tiles of tokens and groups of heads, which replace the computation of MLPs and attention.
    1. Recompute of parts of a layer. It is part of the compiled graph and decides what the graph
       saves for backward.
    2. Compile.
    3. Recompute of full layers. A checkpoint around compiled layers saves only the inputs of the
       layers, independent of the compiler's choices.
    4. Offload. The offload hooks are Python code and stay outside the graph. They send the tensors
       that the compiled layer saves to the host.
    5. Weights on the host. All other techniques read them.

    Args:
        model: a model that lists its decoder layers and the modules that can be recomputed.
        memory: recompute and offload options.
        compile: ``"layer"`` compiles each decoder layer as one graph with static shapes; None
            compiles nothing.
        pool: host memory for offloaded activations, of which ``OFFLOAD_OWNER`` takes blocks;
            default a new pool. ``planner.memory.activations.offloaded_checkpoint_bytes`` gives the bytes to reserve
            before the first step. Without a reservation the first layer of the first step makes it.

    Raises:
        ValueError: an option names more layers than the model has, or a technique that the device
            does not support, or the parameters are sharded over data-parallel ranks already: the
            units of the sharding follow the chunks of recompute, as do the updates of
            ``update_in_forward``, which must not be set yet either.
    """
    require_one_of("compile", compile, COMPILE)
    layers = model.decoder_layers()
    parameters = [param for layer in layers for param in layer.parameters()]
    require_replicated(parameters, "apply_memory", "apply memory techniques before data_parallel.shard_model")
    if any(is_wrapped(layer, "optimizer") for layer in layers):
        raise ValueError(
            "update_in_forward has made the layers wait for their updates, and the first layer of a recompute chunk "
            "would run the others before theirs: call apply_memory before update_in_forward"
        )
    require_device(memory)
    offload = _offload(memory, len(layers), pool)
    require_weight_offload(memory, len(layers))
    # Before anything is removed: a refused call leaves the model as it was. Host memory that is missing for weights
    # is found later.
    _require_applicable(model, memory, compile)
    mlps = model.recompute_modules()["mlp"]
    attentions = model.recompute_modules()["attn"]
    # Start from unwrapped forwards: each technique below captures the forwards that it finds.
    remove_weight_offload(layers)
    remove_offload(layers)
    remove_compile(layers)
    remove_recompute(model)
    remove_tiles([*mlps, *attentions])
    if memory.mlp_tile_tokens is not None:
        apply_tiles(mlps, memory.mlp_tile_tokens)
    if memory.attention_head_groups is not None:
        apply_head_groups(attentions, memory.attention_head_groups)
    # Recompute of parts runs inside the compiled graph, which saves the kept results of attention like its other
    # tensors: chunks must exist before ``apply_compile`` groups layers by chunk. Otherwise layers are compiled first,
    # because the checkpoint of a chunk captures the (compiled) forwards of all layers of the chunk.
    is_traced = compile == "layer" and recomputes_parts(memory)
    if compile == "layer" and not is_traced:
        apply_compile(layers)
    # Without ``cpu_offloading_activations`` the layers that recompute are those that do not offload.
    keep = None
    if offload is not None and memory.cpu_offloading_activations and not is_traced:
        keep = offload.keep
    apply_recompute(model, memory, keep=keep)
    if is_traced:
        apply_compile(layers)
    if offload is not None:
        apply_offload(layers, memory.num_offloaded_layers(len(layers)), offload)
    if memory.cpu_offloading_weights:
        transfers = _host_transfers()
        inside = {id(param) for param in parameters}
        others = [param for param in cast(nn.Module, model).parameters() if id(param) not in inside]
        num_layers = memory.cpu_offloading_num_layers
        apply_weight_offload(layers, num_layers, transfers, pool or new_pool(transfers), others=others)


def _require_applicable(model: Recomputable, memory: MemoryConfig, compile: Literal["layer"] | None) -> None:
    """Raise ``ValueError`` if a technique of ``apply_memory`` inside the layers cannot be applied."""
    for name in ("mlp_tile_tokens", "attention_head_groups"):
        value = getattr(memory, name)
        if compile == "layer" and value is not None:
            raise ValueError(
                f"compile 'layer' and {name} {value!r}: a graph would hold every tile of the sequence and every "
                f"group of heads: set compile to null, or leave {name} out"
            )
    if memory.mlp_tile_tokens is not None:
        require_tiles(model.recompute_modules()["mlp"], memory.mlp_tile_tokens)
    if memory.attention_head_groups is not None:
        require_head_groups(model.recompute_modules()["attn"], memory.attention_head_groups)
    require_recompute(model, memory)
    if compile == "layer":
        require_compile(model.decoder_layers())
        if recomputes_parts(memory):
            require_recompute_in_graphs()


def require_device(memory: MemoryConfig, device: Backend = backend) -> None:
    """Raise ``ValueError`` for a technique that ``device`` does not support, whatever the model is."""
    number = memory.cpu_offloading_num_layers
    offloaded = (
        ("cpu_offloading_activations", memory.cpu_offloading_activations),
        ("cpu_offloading_weights", memory.cpu_offloading_weights),
        (f"cpu_offloading_num_layers {number}", number > 0),
    )
    for option, is_set in offloaded:
        if is_set and device.host_transfers_refusal() is not None:
            raise ValueError(f"{option} {device.host_transfers_refusal()}: leave it out")
    if device.views_share_memory:
        return
    if memory.mlp_tile_tokens is not None:
        raise ValueError(
            f"mlp_tile_tokens {memory.mlp_tile_tokens!r} writes tiles in place, and the backend {device.name} "
            "compiles tensors without shared memory: leave it out"
        )
    if memory.attention_head_groups is not None:
        raise ValueError(
            f"attention_head_groups {memory.attention_head_groups!r} recomputes slices of weights, and the backend "
            f"{device.name} recomputes from a function's arguments only: leave it out"
        )


def require_weight_offload(memory: MemoryConfig, num_layers: int) -> None:
    """Raise ``ValueError`` if weights of more layers are on the host than the model has."""
    if memory.cpu_offloading_weights:
        _require_layers(memory.cpu_offloading_num_layers, num_layers)


def _require_layers(number: int, num_layers: int) -> None:
    """Raise ``ValueError`` if more layers offload than the model has."""
    if number > num_layers:
        raise ValueError(f"cpu_offloading_num_layers {number} exceeds the model's {num_layers} layers: lower it")


def _host_transfers() -> HostTransfers:
    """Return the device's copies to the host, which ``require_device`` has found."""
    transfers = backend.host_transfers()
    assert transfers is not None
    return transfers


def _offload(memory: MemoryConfig, num_layers: int, pool: HostPool | None) -> ActivationOffload | None:
    """Return the object that offloads what ``memory`` selects, or None.

    Raises:
        ValueError: more layers than the model has.
    """
    num_offloaded = memory.num_offloaded_layers(num_layers)
    if not num_offloaded:
        return None
    _require_layers(num_offloaded, num_layers)
    transfers = _host_transfers()
    saving_layers = num_offloaded
    layers_in_flight = None
    if memory.cpu_offloading_activations:
        saving_layers = -(-num_offloaded // Recomputation.of(memory, num_layers).chunk)
        layers_in_flight = LAYERS_IN_FLIGHT
    return ActivationOffload(
        transfers, pool or new_pool(transfers), num_layers=saving_layers, layers_in_flight=layers_in_flight
    )
