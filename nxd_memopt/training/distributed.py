"""Joins the ranks of a training run; reads the environment variables that training depends on.

The variables are read before torch and the backend are imported, so both are imported inside
functions in this file.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nxd_memopt.training.config import TrainConfig


def rank() -> int:
    """Return the global rank of this process: torchrun's ``RANK``, or 0."""
    return int(os.environ.get("RANK", "0"))


def is_rank_zero() -> bool:
    """Return whether this process is global rank 0, which writes files and shows messages."""
    return rank() == 0


def is_first_of_host() -> bool:
    """Return whether this process is the first one of its host: torchrun's ``LOCAL_RANK`` is 0."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def world_size() -> int:
    """Return the number of processes on all hosts: torchrun's ``WORLD_SIZE``, or 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_per_host() -> int:
    """Return the number of processes on this host: torchrun's ``LOCAL_WORLD_SIZE``, or all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def shows_tracebacks() -> bool:
    """Return whether user errors are shown with a traceback: ``NXD_MEMOPT_TRACEBACK=1``."""
    return os.environ.get("NXD_MEMOPT_TRACEBACK") == "1"


def stop_time_file() -> Path | None:
    """Return the file in which the agent reads how long this run needs to stop, or None."""
    name = os.environ.get("NXD_MEMOPT_STOP_TIME_FILE")
    if name is None:
        return None
    return Path(name)


def is_extracting_graphs() -> bool:
    """Return whether ``neuron_parallel_compile`` collects graphs. Every value read is then zero."""
    return os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY", "0") != "0"


def init_distributed(config: TrainConfig) -> None:
    """Initialize the process groups and seed the random number generators. Every rank calls.

    Raises:
        ValueError: the world size does not fit the configuration; raised before any rank waits
            for another rank.
    """
    from nxd_memopt.backends import backend
    from nxd_memopt.parallel_layers import parallel_state, random

    config.accumulation_steps(world_size())  # called for its checks
    # The order matters: the model-parallel groups are subgroups of the world, and seeds depend on
    # the rank in these groups.
    backend.init_process_group(timeout=timedelta(minutes=config.trainer.distributed_timeout_minutes))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.parallel.tensor_model_parallel_size)
    random.model_parallel_manual_seed(config.trainer.seed)


def destroy_distributed() -> None:
    """Destroy the process groups. Every rank calls."""
    from nxd_memopt.parallel_layers.coordination import share_texts
    from nxd_memopt.parallel_layers.utils import leave_process_groups

    # A barrier: no rank destroys its groups while another rank still communicates.
    share_texts("")
    leave_process_groups()
