"""Learning rate by step."""

from __future__ import annotations

import math

from nxd_memopt.training.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, decay_steps: int) -> float:
    """Return the learning rate of ``step``: linear warm-up, then cosine or linear decay.

    Args:
        step: optimizer step, counted from 1.
        config: peak and minimum learning rate, warm-up steps and shape of the decay.
        decay_steps: step at which the learning rate reaches its minimum and stays there.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    minimum = config.lr * config.min_lr_ratio
    # progress goes from 0 after the warm-up to 1 at decay_steps; max(1, ...) avoids a division by
    # zero for a warm-up that is as long as the decay.
    progress = min(1.0, (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps))
    if config.lr_schedule == "linear":
        remaining = 1 - progress
    else:
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return minimum + (config.lr - minimum) * remaining
