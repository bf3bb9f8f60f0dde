"""The start report's lines about what is trained: parameters, bytes of each, steps, tokens and held-out text."""

from __future__ import annotations

import torch
from torch import nn

from nxd_memopt.planner.sizes.states import StateLayout, gradient_bytes, master_bytes, moment_bytes, weight_bytes
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.parameter_groups import count_elements, describe_groups


def start_lines(model: nn.Module, config: TrainConfig) -> list[str]:
    """Return the lines for a model that is not sharded over data-parallel ranks; each parameter is counted once."""
    sizes = {True: 0, False: 0}
    for param in model.parameters():
        sizes[param.requires_grad] += count_elements(param)
    trained = f"{sizes[True]:,}"
    if sizes[False]:
        trained += f" of {sum(sizes.values()):,}"
    data, steps = config.data, config.trainer.max_steps
    tokens = data.global_batch_size * data.seq_length
    return [
        f"model: {trained} parameters are trained, with {bytes_per_parameter(config)} bytes each for "
        "weight, gradient and optimizer states before sharding",
        *describe_groups(model, config.optimizer),
        f"training: {steps:,} steps of {data.global_batch_size:,} sequences of {data.seq_length:,} tokens, {tokens:,} "
        "tokens a step",
        f"held-out text: {_held_out(data)}",
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


def _held_out(data: DataConfig) -> str:
    """Return where the held-out text comes from, and how much of it an evaluation reads."""
    if not data.eval_sequences:
        if not data.held_out_every:
            return "none, and nothing is evaluated (data.eval_sequences 0)"
        return (
            f"about one document in {data.held_out_every} is neither trained nor evaluated (data.eval_sequences 0): "
            "data.held_out_every 0 trains it"
        )
    if data.validation_dataset is not None:
        return f"{data.validation_dataset!r}; an evaluation reads {data.eval_sequences:,} sequences"
    return (
        f"about 1/{data.held_out_every} of the text; an evaluation reads {data.eval_sequences:,} sequences of it, and "
        "the rest is neither trained nor evaluated"
    )
