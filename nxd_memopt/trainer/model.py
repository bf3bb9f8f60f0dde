"""Builds a model as ``neuronx_distributed_config`` says: on meta, device, padding, adapters, recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.modules.lora import add_adapters
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together, turns
from nxd_memopt.parallel_layers.output_projection import describe_output_projections
from nxd_memopt.parallel_layers.pad import pad_model
from nxd_memopt.parallel_layers.utils import move_model_to_device
from nxd_memopt.trainer.activation_checkpoint import apply_activation_checkpointing, classes_to_recompute
from nxd_memopt.trainer.configuration import initialize_parallel_state
from nxd_memopt.trainer.loss import find_loss_from_output_and_spec


class NxDModel(nn.Module):
    """A model with the configuration that it was built with.

    Parameter names and attributes are the model's own.
    """

    def __init__(self, module: nn.Module, nxd_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.nxd_config = nxd_config

    def __repr__(self) -> str:
        return f"NxDModel({self.module!r})"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Attributes that the wrapper lacks (``config``, methods) are the model's.
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model."""
        return self.module(*args, **kwargs)

    def run_train(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of the whole batch. Return the loss.

        The model returns the loss, or ``output_loss_value_spec`` of ``pipeline_config`` marks it in the output.

        Raises:
            RuntimeError: the output is neither a tensor nor has the marked loss.
        """
        loss = self.module(*args, **kwargs)
        # A script has the same model for every number of stages, and stages return tuples.
        if not isinstance(loss, Tensor):
            spec = (self.nxd_config.get("pipeline_config") or {}).get("output_loss_value_spec")
            loss = find_loss_from_output_and_spec(loss, spec or True)
            assert loss is not None, "the specification marks a loss, or the call above raises"
        loss.backward()
        return loss

    def local_modules(self) -> list[nn.Module]:
        """Return the model in a list: there is a single pipeline stage."""
        return [self.module]

    def original_module(self) -> nn.Module:
        """Return the model."""
        return self.module

    # nn.Module's listings without the wrapper's prefix

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def initialize_parallel_model(
    nxd_config: Mapping[str, Any],
    model_fn: Callable[..., nn.Module],
    include_buffers: bool = False,
    *model_args: Any,
    **model_kwargs: Any,
) -> NxDModel:
    """Build ``model_fn(*model_args, **model_kwargs)`` on the device, in training mode.

    Every rank calls.

    Args:
        nxd_config: configuration from ``neuronx_distributed_config``.
        model_fn: builds the model.
        include_buffers: with ``meta_device_init``: construct buffers on the meta device too.
        model_args: positional arguments of ``model_fn``.
        model_kwargs: keyword arguments of ``model_fn``.

    Raises:
        ValueError: ``pipeline_parallel_size`` is above 1, or see ``classes_to_recompute`` and ``add_adapters``.
    """
    stages = nxd_config["pipeline_parallel_size"]
    if stages != 1:
        raise ValueError(
            f"pipeline_parallel_size {stages} needs a model that is traced and cut: use initialize_parallel_model of "
            "nxd_memopt.compat (import neuronx_distributed), or the training program"
        )
    initialize_parallel_state(nxd_config)
    init_config = nxd_config["model_init_config"]
    construction = nullcontext()
    if init_config["meta_device_init"]:
        construction = on_meta(include_buffers)
    with construction:
        model = model_fn(*model_args, **model_kwargs)
    # Not strict here: functions that slice or gather full tensors check strictly.
    describe_output_projections(model, strict=False)
    # Ranks of one host take turns: with ``param_init_fn`` each rank materializes its full shard
    # of the model on the host first.
    for is_my_turn in turns(init_config["sequential_move_factor"]):
        with raise_together("moving the model to the device"):
            if is_my_turn:
                _materialize(model, init_config.get("param_init_fn"))
    if nxd_config["pad_model"]:
        config: Any = model.config
        pad_model(model, parallel_state.get_tensor_model_parallel_size(), config.num_attention_heads)
    if nxd_config["lora_config"] is not None:
        add_adapters(model, nxd_config["lora_config"])
    choice = nxd_config["activation_checkpoint_config"]
    if choice is not None:
        classes = classes_to_recompute(model, choice)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, classes))
    return NxDModel(model, nxd_config).train()


def _materialize(model: nn.Module, param_init_fn: Callable[[nn.Module, torch.device], Any] | None) -> None:
    """Move ``model`` to the device, after initializing it with ``param_init_fn`` on the host if
    there is one.
    """
    # On the host: a device that compiles graphs would compile the many small operations of an
    # initialization.
    if param_init_fn is not None:
        host = torch.device("cpu")
        move_model_to_device(model, host)
        with torch.no_grad():
            for module in list(model.modules()):
                param_init_fn(module, host)
    move_model_to_device(model, backend.device)


@contextmanager
def on_meta(include_buffers: bool) -> Iterator[None]:
    """Construct modules inside the block on the meta device: parameters, and on request buffers,
    without storage.
    """
    if include_buffers:
        with torch.device("meta"):
            yield
        return
    # ``torch.device("meta")`` would construct buffers without values too (rotary frequencies, for
    # example), which are computed in constructors. Parameters alone are moved when a module
    # registers them: each exists on the host only until then.
    register_parameter = nn.Module.register_parameter
    # Original -> meta parameter. A parameter that is registered twice (tied) stays one parameter.
    moved: dict[nn.Parameter, nn.Parameter] = {}

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Register a meta copy of ``param`` with the same attributes."""
        if param is not None and not param.is_meta:
            if param not in moved:
                moved[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                # Attributes from before the registration, such as those of the sharding. Later
                # ones are set on the meta parameter itself.
                vars(moved[param]).update(vars(param))
            param = moved[param]
        register_parameter(module, name, param)

    nn.Module.register_parameter = register_on_meta  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = register_parameter
