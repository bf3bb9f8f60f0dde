"""Wraps a module's forward, by technique, so that each wrapper can be removed alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from torch import nn

from nxd_memopt.parallel_layers.fusion import examine_fused_paths

Forward = Callable[..., Any]
Wrapper = Callable[[Forward], Forward]
# In the order of the wrappers, from the innermost on.
Technique = Literal["tiles", "traced_recompute", "compile", "recompute", "offload", "pace", "optimizer", "weights"]

# Full recompute is outside the compiled graph. Inside, the compiler would decide what is saved, by
# tags on operations. torch 2.11 drops the tags of operations in autograd Functions and then saves
# the outputs of all matmuls (measured: 676 MiB instead of 64 MiB per layer of LLaMA-3-8B at 8,192
# tokens). Recompute of a part of the layer must be inside (``traced_recompute``) and is refused by
# torch versions that drop the tags. Offload is outside: its hooks are Python code, which a graph
# cannot contain, and they receive the tensors that the compiled layer saves for backward. The
# optimizer's wrapper completes the layer's update; it must not run again in a recomputation.
# Tiles replace the computation of a module, so every other technique is around them. All of them read
# weights, which must be on the device first.
_INNER_FIRST: tuple[Technique, ...] = get_args(Technique)
_STATE = "_wrapped_forward"


def wrap_forward(module: nn.Module, technique: Technique, wrapper: Wrapper) -> None:
    """Replace the forward of ``module`` by ``wrapper(forward)``. Parameter names do not change.

    A wrapper of the same technique is replaced. Build ``wrapper`` from partials: ``copy.deepcopy``
    of a model copies partials with the model, but shares closures.
    """
    _set(module, {**_wrappers(module), technique: wrapper})


def unwrap_forward(module: nn.Module, technique: Technique) -> None:
    """Undo ``wrap_forward`` for one technique, if it is applied; the other techniques stay."""
    wrappers = dict(_wrappers(module))
    if wrappers.pop(technique, None) is not None:
        _set(module, wrappers)


def is_wrapped(module: nn.Module, technique: Technique) -> bool:
    """Return whether ``technique`` is applied to ``module``."""
    return technique in _wrappers(module)


def is_only_wrapped(module: nn.Module, *techniques: Technique) -> bool:
    """Return whether the forward of ``module`` is its class's, under one or more of ``techniques`` and no others."""
    if _STATE not in module.__dict__:
        return False
    original, wrappers = module.__dict__[_STATE]
    return original is None and set(wrappers) <= set(techniques)


def wrapper_of(module: nn.Module, technique: Technique) -> Wrapper | None:
    """Return the wrapper of ``technique`` on ``module``, or None."""
    return _wrappers(module).get(technique)


def _wrappers(module: nn.Module) -> Mapping[Technique, Wrapper]:
    """Return the wrappers of ``module`` by technique."""
    if _STATE not in module.__dict__:
        return {}
    return module.__dict__[_STATE][1]


def _set(module: nn.Module, wrappers: Mapping[Technique, Wrapper]) -> None:
    """Rebuild the forward of ``module`` from its original forward and ``wrappers``."""
    # ``original`` is a forward that the user set on the instance, or None for the forward of the
    # class. The state, ``(original, wrappers)``, exists while the module has wrappers.
    if _STATE in module.__dict__:
        original = module.__dict__.pop(_STATE)[0]
    else:
        original = module.__dict__.get("forward")
    module.__dict__.pop("forward", None)
    if original is not None:
        module.__dict__["forward"] = original
    if wrappers:
        wrapped: Forward = module.forward
        for technique in _INNER_FIRST:
            if technique in wrappers:
                wrapped = wrappers[technique](wrapped)
        module.__dict__[_STATE] = (original, wrappers)
        module.__dict__["forward"] = wrapped
    # A memory technique is a choice of the configuration: no warning that it turns a fused path
    # off.
    examine_fused_paths(module, warn=False)
