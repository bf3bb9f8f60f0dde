"""neuronx-distributed's defaults of the training configuration, where they differ."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist

from nxd_memopt import trainer


def neuronx_distributed_config(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the configuration of ``trainer.neuronx_distributed_config``, with NxD's defaults.

    - Checkpoints have no master weights by default.
    - A given ``model_init_config`` is completed in place and is part of the result, because
      programs change it afterwards.
    - Before torch.distributed is initialized, a ``pipeline_parallel_size`` above 1 is recorded
      only; initializing process groups or building a model with it raises ``ValueError``.
    """
    options = inspect.signature(trainer.neuronx_distributed_config).bind(*args, **kwargs).arguments
    precision = options.get("mixed_precision_config") or {}
    options["mixed_precision_config"] = {"use_master_weights_in_ckpt": False, **precision}
    # Before initialization the option is not passed on, so our function does not reject it; the
    # result records it instead.
    stages = 1
    if not dist.is_initialized():
        stages = options.pop("pipeline_parallel_size", 1)
    config = trainer.neuronx_distributed_config(**options)
    model_init = options.get("model_init_config")
    if model_init is not None:
        model_init.update(config["model_init_config"])
        config["model_init_config"] = model_init
    return {**config, "pipeline_parallel_size": stages}
