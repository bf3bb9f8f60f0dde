"""Applies memory techniques and compilation to a model, in one order."""

from __future__ import annotations

from typing import Literal

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, require_one_of
from nxd_memopt.memory.compiled import apply_compile, remove_compile
from nxd_memopt.memory.offload import apply_offload, remove_offload
from nxd_memopt.memory.recompute import Recomputable, apply_recompute

COMPILE = (None, "layer")


def apply_memory(model: Recomputable, memory: MemoryConfig, *, compile: Literal["layer"] | None = None) -> None:
    """Apply what ``memory`` and ``compile`` name; calling it again replaces the earlier choice.

    The order, from the inside of a layer to its outside:

    1. Recompute. It decides what a layer keeps for backward, which the other two then work with.
    2. Compile. The graph holds the recomputation, so that the compiler fuses it into backward.
    3. Offload. Its hooks are Python code and stay outside the graph; what they send to the host is what the compiled
       layer keeps.

    Args:
        model: gives its decoder layers and the modules that can be recomputed.
        memory: recompute and offload.
        compile: ``"layer"`` compiles each decoder layer, as one graph of static shapes.

    Raises:
        ValueError: a number of layers that the model does not have, or a technique that the device does not.
    """
    require_one_of("compile", compile, COMPILE)
    layers, offloaded = model.decoder_layers(), memory.cpu_offloading_num_layers
    transfers = backend.host_transfers() if offloaded else None
    if offloaded and transfers is None:
        raise ValueError(
            f"cpu_offloading_num_layers {offloaded} needs a device that copies to the host beside its work, an NVIDIA "
            f"GPU; the backend is {backend.name}: leave it out"
        )
    if offloaded > len(layers):
        raise ValueError(f"cpu_offloading_num_layers {offloaded} exceeds the model's {len(layers)} layers: lower it")
    remove_offload(layers)
    remove_compile(layers)
    apply_recompute(model, memory)
    if compile == "layer":
        apply_compile(layers)
    if transfers is not None:
        apply_offload(layers, offloaded, transfers)
