"""Gives the stages of a model on the meta device the weights that the whole model would have."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nxd_memopt.compat.model_utils import ParamInit, call_param_init
from nxd_memopt.compat.pipeline.comm import recv_python_object, send_python_object
from nxd_memopt.parallel_layers.utils import copy_tensor_model_parallel_attributes, move_model_to_device


def share_generator_state(rank: int, size: int, method: str) -> torch.Tensor:
    """Return the state of the first stage's CPU generator. Every rank of the pipeline calls.

    Stages may have different seeds, as neuronx-distributed's programs give them; weights must not depend on that.
    """
    state = torch.get_rng_state().numpy().tobytes().hex()
    if rank > 0:
        state = recv_python_object(method=method)
    if rank < size - 1:
        send_python_object(state, method=method)
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)


@contextmanager
def generator_state(state: torch.Tensor) -> Iterator[None]:
    """Draw from ``state`` in the block; a rank whose own state is another one goes on from that."""
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        # The rank that gave the state goes on after the numbers that were drawn, as without stages.
        if not torch.equal(before, state):
            torch.set_rng_state(before)


def initialize_stages(whole: nn.Module, stages: Sequence[nn.Module], param_init_fn: ParamInit) -> None:
    """Initialize the parameters of ``stages`` on the host, with the numbers that they have in the whole model.

    Every module of the whole model is initialized, in order; those of other stages for their random numbers alone, one
    at a time.

    Args:
        whole: the model, of which the stages are parts.
        stages: modules of this rank.
        param_init_fn: see ``model_utils.ParamInit``.
    """
    host = torch.device("cpu")
    local = {id(param) for stage in stages for param in stage.parameters()}
    share_parameters(whole, stages, _Moved(local, host))
    local = {id(param) for stage in stages for param in stage.parameters()}
    replaced: dict[nn.Module, nn.Module] = {}
    for module in list(whole.modules()):
        children = dict(module.named_children())
        own = [param for param in module._parameters.values() if param is not None]
        if all(id(param) in local for param in own):
            call_param_init(param_init_fn, module, host)
        else:
            call_param_init(param_init_fn, _on_host(module), host)
        # Initialization may put new modules in the place of those on meta, such as RoPE with computed frequencies.
        new = dict(module.named_children())
        replaced |= {child: new[name] for name, child in children.items() if new.get(name) not in (child, None)}
    for module in [each for stage in stages for each in stage.modules()]:
        for name, child in module.named_children():
            if child in replaced:
                module._modules[name] = replaced[child]


class _Moved:
    """Parameters on the host by the parameter that they replace."""

    def __init__(self, local: set[int], host: torch.device) -> None:
        self._local = local
        self._host = host
        # With the original, so that its id is not used again.
        self._moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def __call__(self, param: nn.Parameter) -> nn.Parameter:
        if id(param) not in self._local or param.device == self._host:
            return param
        if id(param) not in self._moved:
            self._moved[id(param)] = (param, _parameter_on(self._host, param))
        return self._moved[id(param)][1]


def share_parameters(whole: nn.Module, stages: Sequence[nn.Module], replacement: Any) -> None:
    """Replace parameters of the whole model and of its stages, which have them in common, and move meta buffers.

    A floating-point buffer has NaN until the program initializes it.
    """
    for root in (whole, *stages):
        for module in root.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    module._parameters[name] = replacement(param)
    for stage in stages:
        for module in stage.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    fill = torch.nan if buffer.is_floating_point() else 0
                    module._buffers[name] = torch.full_like(buffer, fill, device="cpu")


def _parameter_on(device: torch.device, param: nn.Parameter) -> nn.Parameter:
    """Return an uninitialized copy, or the values, on ``device`` with the parameter's attributes."""
    values = torch.empty_like(param, device=device) if param.is_meta else param.detach().to(device)
    moved = nn.Parameter(values, requires_grad=param.requires_grad)
    vars(moved).update(vars(param))
    copy_tensor_model_parallel_attributes(moved, param)
    return moved


def _on_host(module: nn.Module) -> nn.Module:
    """Return a copy of a module of another stage with parameters on the host, without its children."""
    shadow = copy.copy(module)
    shadow._modules = {}
    shadow._parameters = dict(module._parameters)
    shadow._buffers = dict(module._buffers)
    for name, param in module._parameters.items():
        if param is not None:
            shadow._parameters[name] = _parameter_on(torch.device("cpu"), param)
    move_model_to_device(shadow, torch.device("cpu"))
    return shadow
