"""Learning rate by step."""

from __future__ import annotations

import math

from nxd_memopt.training.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, decay_steps: int) -> float:
    """Return the learning rate of ``step``, counted from 1: linear warm-up, then a cosine or a line to the minimum."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    minimum = config.lr * config.min_lr_ratio
    progress = min(1.0, (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps))
    if config.lr_schedule == "linear":
        remaining = 1 - progress
    else:
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return minimum + (config.lr - minimum) * remaining
