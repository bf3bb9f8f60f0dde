"""Owns the order in which memory techniques are applied to a model."""

from __future__ import annotations

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory.offload import apply_offload, remove_offload
from nxd_memopt.memory.recompute import Recomputable, apply_recompute


def apply_memory(model: Recomputable, memory: MemoryConfig) -> None:
    """Apply what ``memory`` names; calling it again replaces the earlier choice.

    Recompute comes first: what is offloaded is what a layer keeps, and a recomputed one keeps less.

    Raises:
        ValueError: a number of layers that the model does not have, or a technique that the device does not.
    """
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
    apply_recompute(model, memory)
    if transfers is not None:
        apply_offload(layers, offloaded, transfers)
