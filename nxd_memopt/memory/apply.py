"""Applies memory techniques and compilation to a model, in one order."""

from __future__ import annotations

from typing import Literal

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, require_one_of
from nxd_memopt.memory.compiled import apply_compile, remove_compile, require_recompute_in_graphs
from nxd_memopt.memory.offload import apply_offload, remove_offload
from nxd_memopt.memory.recompute import (
    Recomputable,
    apply_recompute,
    recomputes_parts,
    remove_recompute,
)

COMPILE = (None, "layer")


def apply_memory(
    model: Recomputable,
    memory: MemoryConfig,
    *,
    compile: Literal["layer"] | None = None,
) -> None:
    """Apply the techniques that ``memory`` and ``compile`` select.

    A second call replaces the first choice.

    The order, from the inside of a layer to the outside:

    1. Recompute of parts of a layer. It is part of the compiled graph and decides what the graph
       saves for backward.
    2. Compile.
    3. Recompute of full layers. A checkpoint around compiled layers saves only the inputs of the
       layers, independent of the compiler's choices.
    4. Offload. The offload hooks are Python code and stay outside the graph. They send the tensors
       that the compiled layer saves to the host.

    Args:
        model: a model that lists its decoder layers and the modules that can be recomputed.
        memory: recompute and offload options.
        compile: ``"layer"`` compiles each decoder layer as one graph with static shapes; None
            compiles nothing.

    Raises:
        ValueError: an option names more layers than the model has, or a technique that the device
            does not support.
    """
    require_one_of("compile", compile, COMPILE)
    layers = model.decoder_layers()
    num_offloaded = memory.cpu_offloading_num_layers
    transfers = None
    if num_offloaded:
        transfers = backend.host_transfers()
        if transfers is None:
            raise ValueError(
                f"cpu_offloading_num_layers {num_offloaded} needs a device whose copies to the host "
                f"overlap with compute, an NVIDIA GPU; the backend is {backend.name}: leave it out"
            )
    if num_offloaded > len(layers):
        raise ValueError(
            f"cpu_offloading_num_layers {num_offloaded} exceeds the model's {len(layers)} layers: lower it"
        )
    # before anything is removed: a refused call leaves the model as it was
    if compile == "layer" and recomputes_parts(memory):
        require_recompute_in_graphs()
    # Start from unwrapped forwards: each technique below captures the forwards that it finds.
    remove_offload(layers)
    remove_compile(layers)
    remove_recompute(model)
    # Recompute of parts runs inside the compiled graph: chunks must exist before ``apply_compile``
    # groups layers by chunk. Otherwise layers are compiled first, because the checkpoint of a chunk
    # captures the (compiled) forwards of all layers of the chunk.
    if compile == "layer" and recomputes_parts(memory):
        apply_recompute(model, memory)
        apply_compile(layers)
    else:
        if compile == "layer":
            apply_compile(layers)
        apply_recompute(model, memory)
    if transfers is not None:
        apply_offload(layers, num_offloaded, transfers)
