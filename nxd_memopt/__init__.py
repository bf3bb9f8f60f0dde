"""Tensor- and sequence-parallel layers and memory optimisations; submodules are imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.3.0"

_SUBMODULES = (
    "backends",
    "checkpoint",
    "config",
    "memory",
    "modules",
    "ops",
    "optimizer",
    "parallel_layers",
    "trainer",
)
# Needs transformers. It is not in __all__, so ``from nxd_memopt import *`` works without them.
_MODELS = "models"
_TRAINER = (  # offered here too, as neuronx_distributed does
    *("neuronx_distributed_config", "initialize_parallel_model", "initialize_parallel_optimizer"),
    *("save_checkpoint", "load_checkpoint", "has_checkpoint", "finalize_checkpoint"),
)

__all__ = ["__version__", *_SUBMODULES, *_TRAINER]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _TRAINER:
        return getattr(importlib.import_module(f"{__name__}.trainer"), name)
    if name in (*_SUBMODULES, _MODELS):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, _MODELS])
