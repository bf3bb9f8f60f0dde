"""Joins the ranks of a training run; reads the environment variables that training depends on.

The variables are read before torch and the backend are imported, so those are imported inside functions here.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nxd_memopt.training.config import TrainConfig


def rank() -> int:
    """Return this process's rank among all processes, as torchrun gives it."""
    return int(os.environ.get("RANK", "0"))


def is_rank_zero() -> bool:
    """Return whether this process writes files and shows messages."""
    return rank() == 0


def world_size() -> int:
    """Return the number of processes that torchrun started, on all hosts."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def shows_tracebacks() -> bool:
    """Return whether errors that a user can cause keep their traceback: ``NXD_MEMOPT_TRACEBACK=1``."""
    return os.environ.get("NXD_MEMOPT_TRACEBACK") == "1"


def is_extracting_graphs() -> bool:
    """Return whether ``neuron_parallel_compile`` only collects graphs: the device then computes nothing but zeros."""
    return os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY", "0") != "0"


def init_distributed(config: TrainConfig) -> None:
    """Join torchrun's world, split it into tensor-parallel and data-parallel groups, and seed random generators.

    Raises:
        ValueError: the world does not fit the configuration; raised before any process waits for another.
    """
    from nxd_memopt.backends import backend
    from nxd_memopt.parallel_layers import parallel_state, random

    config.accumulation_steps(world_size())
    backend.init_process_group(timeout=timedelta(minutes=config.trainer.distributed_timeout_minutes))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.parallel.tensor_model_parallel_size)
    random.model_parallel_manual_seed(config.trainer.seed)


def destroy_distributed() -> None:
    """Leave the process groups, once all ranks have arrived."""
    from nxd_memopt.parallel_layers.coordination import share_texts
    from nxd_memopt.parallel_layers.utils import leave_process_groups

    share_texts("")
    leave_process_groups()
