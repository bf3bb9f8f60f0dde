"""Starts a new run with the weights of another run's training checkpoint."""

from __future__ import annotations

from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint.index import INDEX, Index
from nxd_memopt.checkpoint.loading import load_weights
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.training.resume import ResumePlan


def load_warm_start(model: nn.Module, plan: ResumePlan) -> list[str]:
    """Fill ``model`` with the weights of ``plan.warm_start``, if it has one. Every rank calls.

    The optimizer must not exist yet: its master weights are copies of the model's.

    Returns:
        One line that names the checkpoint; empty without a warm start.

    Raises:
        ValueError: on every rank, if the model has other names or shapes, or a file is damaged.
    """
    if plan.warm_start is None:
        return []
    with raise_together(f"loading the weights of {plan.warm_start}"):
        if not (plan.warm_start / INDEX).is_file():
            raise ValueError(
                f"model.warm_start {plan.warm_start} is of version 1, whose weights depend on T: resume its run once, "
                "which writes a checkpoint of version 2"
            )
        load_weights(Index(plan.warm_start), model)
    # On XLA the graph of loading ends here, as in build_model.
    backend.mark_step()
    return [f"warm start: weights of {plan.warm_start}; optimizer, step and data start anew"]
