"""Writes the values of the layers with experts to TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def write_layers(board: Any, name: str, values: Sequence[Any], step: int) -> None:
    """Write the values of all layers of one step to TensorBoard, under Megatron's names.

    Args:
        board: a ``SummaryWriter``.
        name: name of the values in metrics.jsonl.
        values: for each layer a number, or the tokens of each expert.
        step: number of the step.
    """
    for index, value in enumerate(values):
        tag = f"moe/{name.removesuffix('_per_layer')}_layer_{index}"
        if not isinstance(value, list):
            board.add_scalar(tag, value, step)
            continue
        # One bucket for each expert, with its tokens as the count: a histogram of the counts would
        # not say which expert is overloaded.
        counts = np.asarray(value, dtype=np.float64)
        experts = np.arange(len(counts))
        board.add_histogram_raw(
            tag,
            min=0,
            max=len(counts),
            num=int(counts.sum()),
            sum=float((experts * counts).sum()),
            sum_squares=float((experts**2 * counts).sum()),
            bucket_limits=(experts + 1).tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )
