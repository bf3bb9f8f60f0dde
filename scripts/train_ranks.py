"""Owns how the ranks of a training run come together, and the sums that they share."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import cast

from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state, random
from nxd_memopt.parallel_layers.coordination import share_texts
from nxd_memopt.parallel_layers.utils import leave_process_groups
from train_config import TrainConfig
from train_errors import world_size


def join_ranks(config: TrainConfig) -> None:
    """Join torchrun's world and split it into tensor-parallel and data-parallel groups, with seeded generators."""
    config.accumulation_steps(world_size())  # refuses a world that does not fit before any process waits for another
    backend.init_process_group(timeout=timedelta(minutes=config.trainer.distributed_timeout_minutes))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.parallel.tensor_model_parallel_size)
    random.model_parallel_manual_seed(config.trainer.seed)


def leave_ranks() -> None:
    """Leave the world in order, once all ranks have arrived."""
    share_texts("")
    leave_process_groups()


def sum_over_replicas(tensor: Tensor) -> Tensor:
    """Sum over the data-parallel group; tensor-parallel ranks hold equal values already."""
    return backend.all_reduce(tensor, cast("ProcessGroup | None", parallel_state.get_data_parallel_group()))


def peak_bytes_of_all_ranks() -> list[int | None]:
    """Peak memory of each rank, by global rank, ``None`` where the device does not tell. Every rank calls."""
    return [json.loads(text) for text in share_texts(json.dumps(backend.max_memory_allocated()))]


def is_extracting_graphs() -> bool:
    """Whether ``neuron_parallel_compile`` only collects graphs: the device then computes nothing, results are zeros."""
    return os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY", "0") != "0"
