"""Owns the steps whose loss and gradient norm are still on the device: reading them together, and checking them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from torch import Tensor

from nxd_memopt.backends import backend
from train_report import Reporter, StepMetrics


@dataclass(frozen=True)
class Step:
    """An optimizer step that has been started; ``loss`` and ``grad_norm`` are 0-dim, fp32, on the device."""

    number: int
    loss: Tensor
    grad_norm: Tensor
    lr: float


class PendingSteps:
    """Reads the values of ``every`` steps at once: each reading makes the host wait for the device.

    The first step of a process is read alone: it takes longer, and its time should not count among the others'. Every
    rank reads, so that all of them stop at a value that is not finite. Call ``read`` before a checkpoint: then none is
    written after such a step.

    Args:
        tokens_per_step: over all ranks.
    """

    def __init__(self, reporter: Reporter, *, every: int, tokens_per_step: int) -> None:
        self._reporter, self._every, self._tokens_per_step = reporter, every, tokens_per_step
        self._steps: list[Step] = []
        self._is_first = True
        self._started = time.perf_counter()

    def start(self) -> None:
        """Call before a step begins: evaluations and checkpoints in between do not count as its time."""
        if not self._steps:
            self._started = time.perf_counter()

    def add(self, step: Step) -> None:
        self._steps.append(step)
        if self._is_first or step.number % self._every == 0:
            self.read()
        self._is_first = False

    def read(self) -> None:
        """Wait for the steps that were added, check and record them.

        Raises:
            ValueError: a loss or a gradient norm is not finite.
        """
        values = [(step, step.loss.item(), step.grad_norm.item()) for step in self._steps]
        seconds = (time.perf_counter() - self._started) / max(len(values), 1)
        peak = backend.max_memory_allocated()
        for step, loss, grad_norm in values:
            _require_finite(step.number, loss=loss, grad_norm=grad_norm)
            rate = self._tokens_per_step / seconds
            self._reporter.step(StepMetrics(step.number, loss, grad_norm, step.lr, rate, peak))
        self._steps.clear()
        self._started = time.perf_counter()


def _require_finite(step: int, **values: float) -> None:
    """Stop at what is not a number; the last checkpoint stays as it is."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(
                f"{name} is {value} at step {step}: nothing was saved after the last checkpoint; lower optimizer.lr, "
                "lengthen optimizer.warmup_steps, or check the data"
            )
