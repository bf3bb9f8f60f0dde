"""Values of training steps: what a step returns, and reading the values of several steps at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.training.reporting.reporter import Reporter
from nxd_memopt.training.reporting.step_metrics import StepMetrics, Trained
from nxd_memopt.training.routers import RouterSums


@dataclass(frozen=True)
class LossScaling:
    """Loss scaling of one optimizer step in fp16.

    Args:
        scale: factor of the loss with which the step's gradients were computed.
        skipped: whether a gradient overflowed, so that nothing was updated.
    """

    scale: float
    skipped: bool


@dataclass(frozen=True)
class StepResult:
    """Values of one optimizer step, which the device may not have computed yet.

    Args:
        number: number of the step, counted from 1.
        loss: mean cross entropy of the step's tokens on all ranks, 0-dim, fp32, on the device.
        grad_norm: global gradient norm before clipping, 0-dim, fp32, on the device.
        lr: learning rate of the update.
        scaling: loss scale of the step, or None without loss scaling. The gradient norm of a
            skipped step is not finite, and its loss need not be.
        routers: of a model with experts.
    """

    number: int
    loss: Tensor
    grad_norm: Tensor
    lr: float
    scaling: LossScaling | None = None
    routers: RouterSums | None = None


class DeferredMetrics:
    """Loss and gradient norm of steps, read from the device ``every`` steps together.

    Each read makes the host wait for the device. The first step of a process is read alone,
    because warm-up makes it slower and would distort the mean step time. Every rank reads, so all
    ranks stop at a value that is not finite. Call ``read`` before saving a checkpoint, so no
    checkpoint is written after such a step.

    Args:
        reporter: records and shows the values.
        every: number of steps per read.
        tokens_per_step: tokens of one optimizer step over all ranks.
        trained: returns what the run has trained after a step.
        utilization_per_token: MFU of one token per second; None if it is not known.
    """

    def __init__(
        self,
        reporter: Reporter,
        *,
        every: int,
        tokens_per_step: int,
        trained: Callable[[int], Trained],
        utilization_per_token: float | None = None,
    ) -> None:
        self._reporter = reporter
        self._every = every
        self._tokens_per_step = tokens_per_step
        self._trained = trained
        self._utilization_per_token = utilization_per_token
        self._steps: list[StepResult] = []
        self._is_first = True
        self._started = time.perf_counter()

    def start(self) -> None:
        """Start the clock before a step: evaluation and checkpoints after a read do not count."""
        if not self._steps:
            self._started = time.perf_counter()

    def add(self, step: StepResult) -> None:
        """Add a step; after the first step and at multiples of ``every``, read all added steps."""
        # Multiples of ``every``, not a count since the last read: a resumed run reads at the same
        # steps as an uninterrupted one.
        self._steps.append(step)
        if self._is_first or step.number % self._every == 0:
            self.read()
        self._is_first = False

    def read(self) -> None:
        """Wait for the added steps, then check and record their values.

        Raises:
            ValueError: a loss or a gradient norm is not finite, in a step that was not skipped.
        """
        # .item() waits for the device. The clock stops after the last one, so it includes the
        # device's time; the steps of one read share its mean.
        values = [(step, step.loss.item(), step.grad_norm.item()) for step in self._steps]
        seconds = (time.perf_counter() - self._started) / max(len(values), 1)
        end = datetime.now().astimezone()
        peak = backend.max_memory_allocated()
        # Every step is checked before it is recorded, in order: rows up to the failing step are
        # in metrics.jsonl.
        tokens_per_s = self._tokens_per_step / seconds
        mfu = None if self._utilization_per_token is None else self._utilization_per_token * tokens_per_s
        last = len(values) - 1
        for index, (step, loss, grad_norm) in enumerate(values):
            trained = self._trained(step.number)
            row = StepMetrics(
                step=step.number,
                time=(end - timedelta(seconds=(last - index) * seconds)).isoformat(timespec="milliseconds"),
                tokens=trained.tokens,
                loss=loss,
                grad_norm=grad_norm,
                lr=step.lr,
                tokens_per_s=tokens_per_s,
                peak_memory_bytes=peak,
                epoch=trained.epoch,
                mfu=mfu,
            )
            if step.scaling is not None:
                row = replace(row, loss_scale=step.scaling.scale, skipped=step.scaling.skipped)
            if step.routers is not None:
                row = replace(row, routers=step.routers.values())
            if not row.skipped:
                _require_finite(step.number, loss=loss, grad_norm=grad_norm)
            self._reporter.step(row)
        self._steps.clear()
        self._started = time.perf_counter()


def _require_finite(step: int, **values: float) -> None:
    """Raise ``ValueError`` if a value of ``step`` is NaN or infinite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(
                f"{name} is {value} at step {step}: nothing was saved after the last checkpoint; "
                "lower optimizer.lr, lengthen optimizer.warmup_steps, or check the data"
            )
