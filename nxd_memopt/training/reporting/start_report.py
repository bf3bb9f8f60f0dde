"""The start report: first what a person needs to see that the run is the intended one, then what is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nxd_memopt.backends import BACKEND_REASON, backend
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.planner.sizes.states import StateLayout, gradient_bytes, master_bytes, moment_bytes, weight_bytes
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.config.precision import PRECISIONS
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.parameter_groups import count_elements, describe_groups
from nxd_memopt.training.reporting.step_metrics import HeldOut
from nxd_memopt.training.runtime.distributed import world_size


def model_line(model: nn.Module, config: TrainConfig) -> str:
    """Return the line about a model that is not sharded over data-parallel ranks; each parameter is counted once."""
    names = config.model
    weights = "random weights"
    if names.warm_start is not None:
        weights = f"weights of {names.warm_start}"
    elif names.pretrained is not None and not names.random_init:
        weights = f"weights of {names.pretrained}"
    elif names.pretrained is not None:
        weights += f", configuration of {names.pretrained}"
    total = sum(count_elements(param) for param in model.parameters())
    config_of_model: Any = model.config
    return f"model: {config_of_model.model_type}, {total:,} parameters, {weights}"


def run_lines(config: TrainConfig) -> list[str]:
    """Return the lines about output directory, ranks and precision."""
    sizes = f"tensor-parallel {parallel_state.get_tensor_model_parallel_size()}"
    stages = parallel_state.get_pipeline_model_parallel_size()
    if stages > 1:
        sizes += f" x pipeline-parallel {stages}"
    sizes += f" x data-parallel {parallel_state.get_data_parallel_size()}"
    precision = str(config.trainer.precision)
    return [
        f"output: {config.trainer.output_dir}",
        f"ranks: {world_size()}, {sizes}; backend {backend.name} ({BACKEND_REASON})",
        f"precision: {precision}, {PRECISIONS[precision].description}",
    ]


def training_lines(model: nn.Module, config: TrainConfig) -> list[str]:
    """Return the lines about what is trained, for a model that is not sharded over data-parallel ranks."""
    trained = sum(count_elements(param) for param in model.parameters() if param.requires_grad)
    data, steps = config.data, config.trainer.max_steps
    return [
        f"training: {steps:,} steps of {data.global_batch_size:,} sequences of {data.seq_length:,} tokens, "
        f"{data.global_batch_size * data.seq_length:,} tokens a step; "
        f"{trained:,} trained parameters with {bytes_per_parameter(config)} bytes each for weight, "
        "gradient and optimizer states before sharding",
        *describe_groups(model, config.optimizer),
    ]


def bytes_per_parameter(config: TrainConfig) -> int:
    """Return the bytes of a trained parameter's weight, gradient and optimizer states without sharding and offload."""
    layout = StateLayout(
        getattr(torch, config.dtype).itemsize,
        master_weights=config.master_weights,
        in_backward=config.optimizer.in_backward,
        grad_reduce_in_fp32=config.data_parallel.grad_reduce_in_fp32 is not False,
    )
    one = [(1,)]
    return sum(size(one, layout) for size in (weight_bytes, gradient_bytes, master_bytes, moment_bytes))


def held_out_line(data: DataConfig, text: HeldOut | None) -> str:
    """Return the line about where the held-out text comes from, and how much of it an evaluation has.

    Args:
        data: options of the data.
        text: what an evaluation has; None without evaluation.
    """
    if text is None:
        if not data.held_out_every:
            return "held-out text: none, and nothing is evaluated (data.eval_sequences 0)"
        return (
            f"held-out text: about one document in {data.held_out_every} is neither trained nor evaluated "
            "(data.eval_sequences 0): data.held_out_every 0 trains it"
        )
    size = f"an evaluation has {text}"
    if text.sequences < data.eval_sequences:
        size += f": there are no more for data.eval_sequences {data.eval_sequences:,}"
    if data.validation_dataset is not None:
        return f"held-out text: all of {data.validation_dataset!r}; {size}"
    return f"held-out text: about 1/{data.held_out_every} of the text, which is not trained; {size}"
