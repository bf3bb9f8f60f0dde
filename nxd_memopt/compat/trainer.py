"""neuronx-distributed's defaults of the training configuration, where they differ."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist

from nxd_memopt import trainer


def neuronx_distributed_config(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """``trainer.neuronx_distributed_config``, its arguments.

    Checkpoints leave the master weights out unless asked for. A given ``model_init_config`` is completed in place and
    is the result's own, so that a program may go on to change it. Before torch.distributed is initialized a
    ``pipeline_parallel_size`` above 1 is recorded; joining processes or building a model with it is a ``ValueError``.
    """
    options = inspect.signature(trainer.neuronx_distributed_config).bind(*args, **kwargs).arguments
    precision = options.get("mixed_precision_config") or {}
    options["mixed_precision_config"] = {"use_master_weights_in_ckpt": False, **precision}
    stages = 1 if dist.is_initialized() else options.pop("pipeline_parallel_size", 1)
    config = trainer.neuronx_distributed_config(**options)
    model_init = options.get("model_init_config")
    if model_init is not None:
        model_init.update(config["model_init_config"])
        config["model_init_config"] = model_init
    return {**config, "pipeline_parallel_size": stages}
