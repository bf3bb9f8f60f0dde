"""Shows the load of experts: values of each layer in TensorBoard, and a heat map at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

LOAD_PLOT = "expert_load.png"
LAST_STEPS = 100
"""Recorded steps, counted from the last one, whose tokens the heat map adds up."""


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


def load_of_experts(counts: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """Return the load of each expert over the last steps, ``[layers, E]``; 1 is the mean of the layer.

    Args:
        counts: tokens of each expert, ``[steps, layers, E]``.
    """
    total = np.asarray(counts[-LAST_STEPS:], dtype=np.float64).sum(axis=0)
    return total / total.mean(axis=1, keepdims=True).clip(min=1)


def draw_load(counts: Sequence[Sequence[Sequence[int]]], path: Path) -> None:
    """Draw ``load_of_experts(counts)`` as a heat map into the PNG file ``path``."""
    # A figure without pyplot needs no display and keeps no global state.
    from matplotlib.figure import Figure

    load = load_of_experts(counts)
    layers, experts = load.shape
    figure = Figure(figsize=(min(16, 3 + 0.15 * experts), min(12, 2 + 0.2 * layers)))
    axes = figure.subplots()
    # 1 is in the middle of the colors: experts above and below the mean load are told apart.
    image = axes.imshow(load, aspect="auto", cmap="coolwarm", vmin=0, vmax=2, interpolation="nearest")
    axes.set_xlabel("expert")
    axes.set_ylabel("MoE layer")
    steps = min(len(counts), LAST_STEPS)
    axes.set_title(f"tokens of experts, mean of a layer = 1\n(last {steps} recorded steps)")
    figure.colorbar(image, ax=axes, extend="max")
    figure.savefig(path, dpi=150, bbox_inches="tight")
