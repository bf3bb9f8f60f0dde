"""Everything that communicates, under NxD's names: parallel state, mappings, layers, losses and gradients."""

from __future__ import annotations

import importlib
from typing import Any

# Submodule -> names that neuronx_distributed.parallel_layers offers itself. They are imported on first use, because
# layers import ops, which import this package's parallel_state.
_NAMES = {
    "checkpointing": ("load", "save"),
    "grads": ("clip_grad_norm",),
    "layers": ("ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"),
    "loss_functions": ("parallel_cross_entropy",),
    "mappings": (
        "copy_to_tensor_model_parallel_region",
        "gather_from_tensor_model_parallel_region",
        "reduce_from_tensor_model_parallel_region",
        "scatter_to_tensor_model_parallel_region",
    ),
    "parallel_state": ("initialize_model_parallel",),
    "random": ("get_xla_rng_tracker", "model_parallel_xla_manual_seed"),
    "utils": (
        "copy_tensor_model_parallel_attributes",
        "move_model_to_device",
        "set_tensor_model_parallel_attributes",
    ),
    "layer_norm": (),
    "pad": (),
}
_SOURCES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_NAMES, *_SOURCES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _SOURCES:
        return getattr(importlib.import_module(f"{__name__}.{_SOURCES[name]}"), name)
    if name in _NAMES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
