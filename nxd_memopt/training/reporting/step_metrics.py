"""Values that are recorded: the metrics of a step, what was trained before it, and the text of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nxd_memopt.planner.hardware import GIB


@dataclass(frozen=True)
class Trained:
    """What a run has trained after a step, earlier processes included.

    Args:
        tokens: tokens of all sequences.
        epoch: passes over the text; None if the length of the text is not known.
    """

    tokens: int
    epoch: float | None = None


@dataclass(frozen=True)
class HeldOut:
    """The held-out text of one evaluation.

    Args:
        sequences: sequences that exist, at most ``data.eval_sequences``.
        tokens: their tokens that are predicted: the loss is the mean over them.
        digest: identifies these tokens, and what each sees.
    """

    sequences: int
    tokens: int
    digest: str

    def __str__(self) -> str:
        return f"{self.sequences:,} sequence{'s' * (self.sequences != 1)}, {self.tokens:,} predicted tokens"


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step: a row of metrics.jsonl.

    Args:
        step: number of the step, counted from 1.
        time: end of the step, ISO 8601 with milliseconds and the offset from UTC.
        tokens: tokens of all sequences that the run has trained, earlier processes included. Padding and
            questions count, as in ``tokens_per_s``.
        loss: mean cross entropy of the step's tokens on all ranks, fp32, without the routers' losses.
        grad_norm: global gradient norm before clipping, fp32.
        lr: learning rate of the update.
        tokens_per_s: tokens per second over all ranks, mean over the steps that were read
            together.
        peak_memory_bytes: peak of this rank since the start of training, in bytes; ``None`` if
            the device does not report it.
        epoch: passes over the text that the run has trained; None if the length of the text is not
            known (yet), and for several sources, where each has epochs of its own.
        mfu: model FLOPs utilization (``utilization_per_token``); None if it is not known.
        loss_scale: factor of the loss in the step's gradients; None without loss scaling.
        skipped: whether a gradient overflowed, so that nothing was updated; None without loss
            scaling.
        routers: values of ``RouterSums`` of a model with experts.
    """

    step: int
    time: str
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    peak_memory_bytes: int | None
    epoch: float | None = None
    mfu: float | None = None
    loss_scale: float | None = None
    skipped: bool | None = None
    routers: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return the values by name, without MFU and those of loss scaling and routers if there are none.

        The loss and the gradient norm of a skipped step may be infinite or NaN, for which JSON has
        no numbers: they are None.
        """
        values = asdict(self)
        if self.loss_scale is None:
            del values["loss_scale"], values["skipped"]
        if self.mfu is None:
            del values["mfu"]
        values |= values.pop("routers")
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
        return values

    def parts(self, max_steps: int, left: str | None) -> list[str]:
        """Return the metrics as texts, the most important first.

        Args:
            max_steps: steps of the run.
            left: the time that is left; None if it is not known.
        """
        parts = [f"step {self.step}/{max_steps}", f"loss {self.loss:.4f}", f"{self.tokens_per_s:,.0f} tokens/s"]
        if self.skipped:
            parts[1] += ", overflow: skipped"
        if left is not None:
            parts.append(f"{left} left")
        parts += [
            f"lr {self.lr:.2e}",
            f"grad norm {self.grad_norm:.3f}",
            f"{gib(self.peak_memory_bytes)} peak",
        ]
        if self.mfu is not None:
            parts.append(f"MFU {100 * self.mfu:.1f} %")
        if self.loss_scale is not None:
            parts.append(f"loss scale {self.loss_scale:.4g}")
        for name in ("load_balancing_loss", "z_loss", "max_load", "dropped_share"):
            if name in self.routers:
                parts.append(f"{name.replace('_', ' ')} {self.routers[name]:.3g}")
        return parts


def printable(text: str) -> str:
    """Return text that a model has generated without the characters that control a terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text)


def gib(size: int | None) -> str:
    """Return a size in bytes as text in GiB, or ``n/a`` if None."""
    if size is None:
        return "n/a"
    return f"{size / GIB:.2f} GiB"
