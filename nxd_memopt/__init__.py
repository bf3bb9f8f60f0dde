"""Owns the package's lazy entry points: submodules, and so torch, are imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.1.0"

_SUBMODULES = ("backends", "checkpoint", "config", "memory", "models", "modules", "ops", "parallel_layers")

__all__ = ["__version__", *_SUBMODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
