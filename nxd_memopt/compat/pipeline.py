"""neuronx-distributed's names of pipeline stages: programs import them, also those that run a single stage."""

from __future__ import annotations

from typing import Any

import torch.fx
from torch import nn


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is of pipeline parallelism, which is not offered: use pipeline_parallel_size 1")


class NxDPPModel(nn.Module):
    """Model of several pipeline stages. No model is one: ``isinstance`` is False."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("NxDPPModel")


class NxDTracer(torch.fx.Tracer):
    """Tracer that does not enter the modules that ``leaf_modules`` names, by class or by qualified name."""

    leaf_modules: tuple[str, ...] = ()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether ``m`` is not traced into."""
        if any(name in type(m).__name__ or name == module_qualified_name for name in self.leaf_modules):
            return True
        return super().is_leaf_module(m, module_qualified_name)


class HFTracerWrapper(NxDTracer):
    """Tracer of transformers' models for pipeline stages."""

    def __init__(self, *args: Any, **config: Any) -> None:
        _refuse("HFTracerWrapper")


def trace_model(*args: Any, **kwargs: Any) -> Any:
    """Trace a model for pipeline stages."""
    return _refuse("trace_model")


def analyze_shared_weights_across_stages(*args: Any, **kwargs: Any) -> Any:
    """Return the weights that stages share."""
    return _refuse("analyze_shared_weights_across_stages")
