"""neuronx-distributed's defaults of the training configuration, and its state of checkpoint saves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from nxd_memopt import trainer
from nxd_memopt.compat.parallel_state import initialize_model_parallel
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.trainer.tags import complete_tags, local_directory, prune_tags, remove_directories


def neuronx_distributed_config(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the configuration of ``trainer.neuronx_distributed_config``, with NxD's defaults.

    - Checkpoints have no master weights by default.
    - A given ``model_init_config`` is completed in place and is part of the result, because
      programs change it afterwards.
    - Process groups of other sizes are replaced; see ``compat.parallel_state``.
    """
    options = inspect.signature(trainer.neuronx_distributed_config).bind(*args, **kwargs).arguments
    precision = options.get("mixed_precision_config") or {}
    options["mixed_precision_config"] = {"use_master_weights_in_ckpt": False, **precision}
    if dist.is_initialized():
        initialize_model_parallel(
            options.get("tensor_parallel_size", 1),
            options.get("pipeline_parallel_size", 1),
            expert_model_parallel_size=options.get("expert_parallel_size", 1),
        )
    config = trainer.neuronx_distributed_config(**options)
    model_init = options.get("model_init_config")
    if model_init is not None:
        model_init.update(config["model_init_config"])
        config["model_init_config"] = model_init
    return config


def initialize_parallel_model(
    nxd_config: dict[str, Any],
    model_fn: Callable[..., nn.Module],
    include_buffers: bool = False,
    *model_args: Any,
    **model_kwargs: Any,
) -> trainer.NxDModel:
    """Build a model; see ``trainer.initialize_parallel_model``, and with several stages ``compat.pipeline.trainer``."""
    build = trainer.initialize_parallel_model
    if nxd_config["pipeline_parallel_size"] > 1:
        # Here, because it imports torch.fx and transformers' tracer.
        from nxd_memopt.compat.pipeline.trainer import initialize_pipeline_model

        build = initialize_pipeline_model
    return build(nxd_config, model_fn, include_buffers, *model_args, **model_kwargs)


class CheckpointIOState:
    """The saves of ``directory``; programs call its methods through ``trainer.checkpoint.g_iostate``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def wait_save(self, async_remove: bool) -> None:
        """Wait for a save with ``async_save``. Every rank calls."""
        del async_remove  # removing renames a directory first: no rank waits for the rest
        trainer.finalize_checkpoint()

    def wait_all(self) -> None:
        """Wait for a save with ``async_save``. Every rank calls."""
        trainer.finalize_checkpoint()

    def submit_remove(self, num_kept: int | None, async_remove: bool, remove_tags: Sequence[str] = ()) -> None:
        """Remove the checkpoints of the given tags, or else all but the newest ``num_kept``. Every rank calls."""
        del async_remove
        with raise_together(f"removing checkpoints of {self.directory}"):
            if parallel_state.is_global_rank_zero():
                if remove_tags:
                    complete = complete_tags(self.directory)
                    remove_directories([complete[tag] for tag in remove_tags if tag in complete])
                else:
                    prune_tags(self.directory, num_kept)


g_iostate: CheckpointIOState | None = None
"""None until the first save, as in neuronx-distributed."""


def save_checkpoint(checkpoint_dir_str: str | Path, *args: Any, **kwargs: Any) -> None:
    """Write a checkpoint; see ``trainer.save_checkpoint``."""
    global g_iostate
    trainer.save_checkpoint(checkpoint_dir_str, *args, **kwargs)
    g_iostate = CheckpointIOState(local_directory(checkpoint_dir_str))
