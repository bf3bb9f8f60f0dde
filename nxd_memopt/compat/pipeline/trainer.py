"""Builds a pipeline model as ``neuronx_distributed_config`` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from nxd_memopt.compat.pipeline import materialize
from nxd_memopt.compat.pipeline.model import NxDPPModel
from nxd_memopt.modules.lora import add_adapters
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.output_projection import describe_output_projections
from nxd_memopt.trainer import NxDModel, apply_activation_checkpointing
from nxd_memopt.trainer.activation_checkpoint import classes_to_recompute
from nxd_memopt.trainer.configuration import initialize_parallel_state
from nxd_memopt.trainer.model import on_meta


class NxDPipelineModel(NxDModel):
    """A pipeline model with its configuration. Listings and states are those of this rank's stages."""

    module: Any

    def run_train(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward; see ``NxDPPModel.run_train``."""
        return self.module.run_train(*args, **kwargs)

    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward; see ``NxDPPModel.run_eval``."""
        return self.module.run_eval(*args, **kwargs)

    def local_modules(self) -> list[nn.Module]:
        """Return this rank's stages."""
        return self.module.local_stage_modules

    def original_module(self) -> nn.Module:
        """Return the whole model, of which other stages' parameters may have no values."""
        return self.module.original_torch_module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.local_named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.local_named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self.module.local_named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.local_named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.module.local_state_dict(*args, **kwargs)


def initialize_pipeline_model(
    nxd_config: Mapping[str, Any],
    model_fn: Callable[..., nn.Module],
    include_buffers: bool = False,
    *model_args: Any,
    **model_kwargs: Any,
) -> NxDPipelineModel:
    """Build ``model_fn(*model_args, **model_kwargs)``, cut it into stages, and move this rank's to the device.

    Initial weights do not depend on the number of stages, whatever the stages' seeds. Every rank of the world calls.

    Args:
        nxd_config: configuration, whose ``pipeline_config`` has the options of ``NxDPPModel``.
        model_fn: builds the whole model.
        include_buffers: with ``meta_device_init``: buffers on the meta device too.
        model_args, model_kwargs: of ``model_fn``.

    Raises:
        ValueError: ``pad_model`` is set, or see ``classes_to_recompute`` and ``add_adapters``.
    """
    if nxd_config["pad_model"]:
        raise ValueError(
            "pad_model cannot pad a model in stages: use pipeline_parallel_size 1, or pad its configuration"
        )
    initialize_parallel_state(nxd_config)
    init_config = nxd_config["model_init_config"]
    size = parallel_state.get_pipeline_model_parallel_size()
    state = materialize.share_generator_state(parallel_state.get_pipeline_model_parallel_rank(), size, "tcp")
    construction = on_meta(include_buffers) if init_config["meta_device_init"] else nullcontext()
    with materialize.generator_state(state), construction:
        whole = model_fn(*model_args, **model_kwargs)
    describe_output_projections(whole, strict=False)
    options = {**nxd_config["pipeline_config"], "use_model_wrapper": True}
    options["param_init_fn"] = init_config.get("param_init_fn")
    model = NxDPPModel(whole, **options)
    model.materialize_in_turns(init_config["sequential_move_factor"])
    if nxd_config["lora_config"] is not None:
        for stage in model.local_stage_modules:
            add_adapters(stage, nxd_config["lora_config"])
    _recompute(model, nxd_config["activation_checkpoint_config"])
    return NxDPipelineModel(model, nxd_config)


def _recompute(model: NxDPPModel, choice: Any) -> None:
    """Recompute the modules that ``activation_checkpoint_config`` selects."""
    if choice is None:
        return
    classes: tuple[Any, ...] = (model.options.transformer_layer_cls,)
    if choice != "full":
        # Of the whole model: a stage may have no module of a class.
        classes = classes_to_recompute(model.original_torch_module, choice)
    for stage in model.local_stage_modules:
        apply_activation_checkpointing(stage, check_fn=lambda module: isinstance(module, classes))
