"""What the search of ``nxd-memopt plan`` keeps of a run: stated sizes, options that it does not choose, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nxd_memopt.architectures.model_spec import moe_layers
from nxd_memopt.command_line import Run
from nxd_memopt.config import MemoryConfig
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.planner.hardware import Device
from nxd_memopt.planner.search.fixed_options import FixedOptions
from nxd_memopt.planner.search.problem import Setting
from nxd_memopt.training.config.combinations import value_of
from nxd_memopt.training.config.moe import MoEOptions, completed_options

SEARCHED = {
    "data.micro_batch_size": "micro_batch_size",
    "data_parallel.sharding": "sharding",
    "optimizer.optimizer_offload_fraction": "optimizer_offload_fraction",
    "optimizer.optimizer_update_in_forward": "optimizer_update_in_forward",
    "optimizer.store_param_remainders": "store_param_remainders",
    "trainer.enable_cuda_graph": "cuda_graph",
}
"""Option that the search chooses, unless the command line states it -> field of ``Setting``."""
STATIC_BLOCK = 128
"""Rows of a block of an expert that are planned for Trainium where no static form is given."""


def stated_size(run: Run, name: str) -> Any:
    """Return an option of the ``parallel`` section, or None if the search chooses it."""
    # A recipe's sizes are of the devices that it was written for, so only a file of the user and the
    # command line fix them.
    if name not in run.stated:
        return None
    return getattr(run.config.parallel, name)


def fixed_options(run: Run) -> FixedOptions:
    """Return the options of a run that the search does not choose.

    ``memory_plan.setting_of`` has the same options of a run that starts; ``tests/planner/test_plan_of_a_run.py``
    compares the figures.
    """
    config = run.config
    memory, optimizer, sharding = config.memory, config.optimizer, config.data_parallel
    setting = Setting(
        memory=MemoryConfig(
            attention_backend=memory.attention_backend, fused_linear_cross_entropy=memory.fused_linear_cross_entropy
        ),
        # The default, False, is for a run without tensor parallelism.
        sequence_parallel_enabled=stated_size(run, "sequence_parallel_enabled"),
        reduce_dtype=config.parallel.reduce_dtype,
        optimizer_staging_gib=optimizer.optimizer_staging_gib,
        optimizer_in_backward=optimizer.in_backward,
        overlap_grad_reduce=optimizer.overlap_grad_reduce,
        reshard_after_forward=sharding.reshard_after_forward,
        pipeline_model_parallel_layout=stated_size(run, "pipeline_model_parallel_layout"),
    )
    return FixedOptions(
        setting,
        expert_model_parallel_size=stated_size(run, "expert_model_parallel_size"),
        optimizer_instances=sharding.num_distributed_optimizer_instances,
        compiles_layers=config.trainer.compile is not None,
        stated=_stated(run),
        stated_memory=_stated_memory(run),
    )


def _stated(run: Run) -> tuple[tuple[str, Any], ...]:
    """Return the fields of ``Setting`` that options of the command line fix, with their values."""
    found: list[tuple[str, Any]] = []
    for name in ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"):
        value = stated_size(run, name)
        if value is not None:
            found.append((name, value))
    for option, name in SEARCHED.items():
        value = value_of(run.config, option)
        # CUDA graphs may be "auto", which leaves the choice to the search.
        if option in run.overridden and value != "auto":
            found.append((name, value))
    return tuple(found)


def _stated_memory(run: Run) -> tuple[tuple[str, Any], ...]:
    """Return the options of the ``memory`` section that the command line states, with their values."""
    names = [field.name for field in fields(MemoryConfig) if f"memory.{field.name}" in run.overridden]
    return tuple((name, getattr(run.config.memory, name)) for name in names)


def planned_moe(run: Run, config: Mapping[str, Any], device: Device) -> MoEConfig | None:
    """Return the options of the layers with experts; None for a dense model.

    Args:
        run: what is planned.
        config: of the model.
        device: Trainium, whose graphs need a static form, gets blocks of ``STATIC_BLOCK`` rows without one.

    Raises:
        ValueError: the section is for experts that the model does not have, or chooses a memory technique.
    """
    # Options of experts would be ignored by a dense model: another model than the user means.
    given = run.config.moe.given()
    if not any(moe_layers(config)):
        if given:
            name, value = next(iter(given.items()))
            raise ValueError(
                f"moe.{name} {value!r} needs a model with experts: leave it out, or set moe.num_moe_experts"
            )
        return None
    moe = completed_options(MoEOptions(**given), config)
    if device.kind != "neuron" or moe.moe_expert_block_size is not None or moe.moe_pad_expert_input_to_capacity:
        return moe
    # On Trainium a graph has fixed shapes: either all experts are padded to their capacity, which the
    # check above let pass, or rows are grouped in blocks of a fixed size.
    if moe.moe_expert_capacity_factor is not None:
        raise ValueError(
            f"moe.moe_expert_capacity_factor {moe.moe_expert_capacity_factor} alone has shapes that depend on the "
            f"routing, and {device.name} compiles fixed ones: set moe.moe_pad_expert_input_to_capacity to true"
        )
    static = {"moe_expert_block_size": STATIC_BLOCK, "moe_token_dispatcher_type": "allgather"}
    return completed_options(MoEOptions(**(given | static)), config)
