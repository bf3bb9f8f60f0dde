"""Draws the losses of a run over its steps, with the learning rate, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nxd_memopt.files import complete_file

LOSS_PLOT = "loss.png"
SMOOTHED_SHARE = 0.05
"""Part of the steps whose mean is a point of the smoothed loss."""


def draw_losses(path: Path, steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> None:
    """Draw training loss, smoothed training loss, held-out loss and learning rate over the steps.

    Args:
        path: the picture, which is complete or absent.
        steps: rows of metrics.jsonl; steps without a loss, skipped after an overflow, are left out.
        evaluations: rows of evaluation.jsonl.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # A figure without pyplot: no window system is looked for, and no state of matplotlib is changed.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    losses = figure.subplots()
    rates = losses.twinx()
    found = [row for row in steps if row["loss"] is not None]
    numbers = [row["step"] for row in found]
    values = np.array([row["loss"] for row in found])
    # Grid and rate lie under the losses.
    losses.set_zorder(rates.get_zorder() + 1)
    losses.patch.set_visible(False)
    losses.grid(alpha=0.3)
    lines = rates.plot(numbers, [row["lr"] for row in found], color="tab:gray", ls=":", lw=1, label="learning rate")
    window = round(SMOOTHED_SHARE * len(values))
    lines += losses.plot(numbers, values, color="tab:blue", alpha=0.35 if window > 1 else 1.0, lw=1, label="training")
    if window > 1:
        label = f"training, mean of {window} steps"
        lines += losses.plot(numbers[window - 1 :], running_mean(values, window), color="tab:blue", lw=1.8, label=label)
    if evaluations:
        held_out = [(row["step"], row["held_out_loss"]) for row in evaluations]
        lines += losses.plot(*zip(*held_out, strict=True), color="tab:orange", marker="o", ms=4, label="held out")
    losses.set_xlabel("step")
    losses.set_ylabel("loss (cross entropy per token)")
    rates.set_ylabel("learning rate", color="tab:gray")
    rates.set_ylim(bottom=0)
    losses.legend(lines, [str(line.get_label()) for line in lines], loc="upper right")
    with complete_file(path) as temporary:
        figure.savefig(temporary, format="png")


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of each ``window`` consecutive values, ``[n - window + 1]``, in float64."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    return (sums[window:] - sums[:-window]) / window
