"""Relates the stages of a pipeline that a rank has to the complete model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from nxd_memopt.architectures.stages import rank_stages
from nxd_memopt.config import MemoryConfig
from nxd_memopt.modules.causal_lm import ParallelCausalLM


def whole_without_adapters(model: nn.Module) -> nn.Module:
    """Return the complete model on the meta device, or ``model`` if it is complete."""
    if not is_staged(model):
        return model
    staged: Any = model
    options: dict[str, Any] = {"moe": staged.moe} if staged.has_experts else {}
    return type(staged)(
        staged.config,
        parallel=replace(
            staged.parallel,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
            pipeline_model_parallel_layout=None,
        ),
        memory=MemoryConfig(),
        dtype=staged.any_weight().dtype,
        device="meta",
        **options,
    )


def is_staged(model: nn.Module) -> bool:
    """Return whether ``model`` has only the stages of this rank of a pipeline."""
    return isinstance(model, ParallelCausalLM) and not model.stages.is_whole


def rank_of_parameter(model: ParallelCausalLM, name: str) -> int:
    """Return the first rank of the pipeline that has a parameter of the full model."""
    _, is_of_layer, rest = name.partition(".layers.")
    if is_of_layer:
        number = int(rest.partition(".")[0])
        size = model.parallel.pipeline_model_parallel_size
        return next(rank for rank in range(size) if number in rank_stages(model.spec, model.parallel, rank).layers)
    # Before the layers there is the embedding alone, after them norm and head.
    return 0 if ".embed_" in name else model.parallel.pipeline_model_parallel_size - 1
