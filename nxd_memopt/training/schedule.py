"""Learning rate by step."""

from __future__ import annotations

import math

from nxd_memopt.training.config.train_config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, decay_steps: int) -> float:
    """Return the learning rate of ``step``: linear warm-up, then ``config.lr_schedule``.

    Args:
        step: optimizer step, counted from 1.
        config: peak and minimum learning rate, warm-up steps and shape of the decay.
        decay_steps: step at which the learning rate reaches its minimum and stays there; not read
            by ``constant`` and ``inverse_sqrt``.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    minimum = config.lr * config.min_lr_ratio
    if config.lr_schedule == "constant":
        return config.lr
    if config.lr_schedule == "inverse_sqrt":
        # Continuous with the warm-up, whose last step has the peak.
        return max(minimum, config.lr * math.sqrt(max(1, config.warmup_steps) / step))
    if config.lr_schedule == "wsd":
        # 1 until the decay begins, 0 at its end.
        return minimum + (config.lr - minimum) * min(1.0, max(0.0, (decay_steps - step) / config.wsd_decay_steps))
    # progress goes from 0 after the warm-up to 1 at decay_steps; max(1, ...) avoids a division by
    # zero for a warm-up that is as long as the decay.
    progress = min(1.0, (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps))
    if config.lr_schedule == "linear":
        remaining = 1 - progress
    else:
        assert config.lr_schedule == "cosine", config.lr_schedule
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return minimum + (config.lr - minimum) * remaining
