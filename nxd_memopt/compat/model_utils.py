"""neuronx-distributed's ``utils.model_utils``: where models are built and initialized."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from nxd_memopt.parallel_layers.coordination import raise_together, turns
from nxd_memopt.parallel_layers.utils import copy_tensor_model_parallel_attributes, move_model_to_device
from nxd_memopt.trainer.model import on_meta

ParamInit = Callable[..., Any]
"""``f(module, device)``, or ``f(module)`` as neuronx-distributed documents it, for the module's own parameters."""


def check_delay_tracing(nxd_config: Any) -> bool:
    """Return False, as neuronx-distributed does: models are traced when they are built."""
    del nxd_config
    return False


def get_delay_tracing(arg: Any) -> bool:
    """Return False; see ``check_delay_tracing``."""
    del arg
    return False


def call_param_init(param_init_fn: ParamInit, module: nn.Module, device: torch.device) -> None:
    """Initialize the module's own parameters with a function of the module, or of module and device."""
    parameters = inspect.signature(param_init_fn).parameters.values()
    by_position = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    takes_device = len(by_position) > 1 or any(each.kind == each.VAR_POSITIONAL for each in parameters)
    with torch.no_grad():
        param_init_fn(*((module, device) if takes_device else (module,)))


def reinit_model(model: nn.Module, device: torch.device, param_init_fn: ParamInit) -> None:
    """Move ``model`` to ``device`` and initialize its parameters there, module by module."""
    move_model_to_device(model, device)
    for module in list(model.modules()):
        call_param_init(param_init_fn, module, device)


def maybe_materalize_model(model: nn.Module) -> None:
    """Do nothing: tensors of torchdistx, which neuronx-distributed materializes, do not exist with this PyTorch."""
    del model


def get_model_sequential(
    model: Any, device: torch.device, sequential_move_factor: int = 11, param_init_fn: ParamInit | None = None
) -> Any:
    """Move ``model`` to ``device``, a number of ranks of each host at a time; return it. Every rank calls.

    Args:
        model: a module or a pipeline model.
        device: the device; a pipeline model moves its stage to the backend's.
        sequential_move_factor: ranks that move at the same time.
        param_init_fn: initializes on the host first.
    """
    from nxd_memopt.compat.pipeline.model import NxDPPModel

    if isinstance(model, NxDPPModel):
        model.materialize_in_turns(sequential_move_factor)
        return model
    for is_my_turn in turns(sequential_move_factor):
        with raise_together("moving the model to the device"):
            if is_my_turn:
                if param_init_fn is not None:
                    reinit_model(model, torch.device("cpu"), param_init_fn)
                move_model_to_device(model, device)
    return model


def init_on_device(
    device: torch.device, include_buffers: bool = False, force_custom_init_on_device: bool = False
) -> AbstractContextManager[Any]:
    """Build the modules of the block on ``device``.

    Args:
        device: on the meta device, buffers keep their values unless ``include_buffers`` is set.
        include_buffers: buffers too.
        force_custom_init_on_device: no effect.
    """
    del force_custom_init_on_device
    if torch.device(device).type == "meta":
        return on_meta(include_buffers)
    return torch.device(device)


@contextmanager
def preserve_shared_weights(model: nn.Module, ignore_hf: bool = False) -> Iterator[None]:
    """Tie parameters again that were one parameter before the block."""
    del ignore_hf  # by identity, also in transformers' models
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    try:
        yield
    finally:
        for first, *others in names.values():
            for name in others:
                path, _, last = name.rpartition(".")
                setattr(model.get_submodule(path), last, model.get_parameter(first))


@contextmanager
def preserve_parallel_attributes(model: nn.Module) -> Iterator[None]:
    """Give parameters that replace others in the block the attributes of their shards."""
    before = dict(model.named_parameters())
    try:
        yield
    finally:
        for name, param in model.named_parameters():
            if name in before and param is not before[name]:
                copy_tensor_model_parallel_attributes(param, before[name])
