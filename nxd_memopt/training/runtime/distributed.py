"""Joins the ranks of a training run; reads the environment variables that training depends on.

The variables are read before torch and the backend are imported, so both are imported inside
functions in this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nxd_memopt.training.config.train_config import TrainConfig


RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
BACKEND_VARIABLE = "NXD_MEMOPT_BACKEND"
PROFILE_VARIABLE = "NXD_MEMOPT_PROFILE"
HUB_OFFLINE_VARIABLE = "HF_HUB_OFFLINE"
NEEDED_WITH_RANK = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankVariablesError(ValueError):
    """The environment variables do not say which rank this process is, so each process reports it."""


def require_rank_variables() -> None:
    """Check the environment variables that say which rank this process is.

    Raises:
        RankVariablesError: one is not a number, only a part of them is set, or they contradict each other.
    """
    remedy = "unset it and start with nxd-memopt train --nproc N, or start with torchrun, which sets it"
    values: dict[str, int] = {}
    for name in RANK_VARIABLES:
        text = os.environ.get(name)
        if text is None:
            continue
        if not text.isdecimal():
            raise RankVariablesError(f"the environment variable {name} is {text!r}, not a number from 0 on: {remedy}")
        values[name] = int(text)
    for index, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if index in values and size in values and values[index] >= values[size]:
            raise RankVariablesError(
                f"the environment variable {index} is {values[index]}, not below {size} {values[size]}: {remedy}"
            )
    # Without RANK this process would train alone, as one replica of WORLD_SIZE.
    if values.get("WORLD_SIZE", 1) > 1 and "RANK" not in values:
        raise RankVariablesError(
            f"the environment variable WORLD_SIZE is {values['WORLD_SIZE']} and RANK is not set: {remedy}"
        )
    missing = [name for name in NEEDED_WITH_RANK if "RANK" in values and name not in os.environ]
    if missing:
        raise RankVariablesError(
            f"the environment variable RANK is {values['RANK']} and {missing} are not set: {remedy}"
        )


def rank() -> int:
    """Return the global rank of this process: torchrun's ``RANK``, or 0."""
    text = os.environ.get("RANK", "0")
    # Also called to report that the variable is not a number (require_rank_variables).
    return int(text) if text.isdecimal() else 0


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


def profile_request() -> str | None:
    """Return what ``nxd-memopt profile`` asks of the runs that it starts; None in any other run."""
    return os.environ.get(PROFILE_VARIABLE)


def is_extracting_graphs() -> bool:
    """Return whether ``neuron_parallel_compile`` collects graphs. Every value read is then zero."""
    return os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY", "0") != "0"


@contextmanager
def host_only() -> Iterator[None]:
    """Let imports inside the block, and processes that start in it, open no device.

    The environment of a new process must have the variable before it starts: what the process imports
    while it unpickles its arguments, or imports the main module again, selects a backend already.
    Opening a NeuronCore that a rank has would end the process.
    """
    previous = os.environ.get(BACKEND_VARIABLE)
    os.environ[BACKEND_VARIABLE] = "cpu"
    try:
        yield
    finally:
        # Ranks that are started later inherit this environment.
        del os.environ[BACKEND_VARIABLE]
        if previous is not None:
            os.environ[BACKEND_VARIABLE] = previous


def hub_endpoint() -> str | None:
    """Return the address of the Hugging Face Hub, or None if its libraries are told not to use the network."""
    if os.environ.get(HUB_OFFLINE_VARIABLE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return None
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def use_hub_cache() -> None:
    """Let the hub's libraries read their caches alone. Call it before they are imported."""
    os.environ[HUB_OFFLINE_VARIABLE] = "1"


def datasets_cache(home: str) -> Path:
    """Return the directory in which the datasets library keeps prepared data; ``home`` is the hub's own."""
    return Path(os.environ.get("HF_DATASETS_CACHE", f"{home}/datasets"))


def use_one_tokenizer_thread() -> None:
    """Let tokenizers of the ``tokenizers`` library run in the calling thread only."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    # Linux only: elsewhere a process may use all of them.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def init_distributed(config: TrainConfig) -> None:
    """Initialize the process groups and seed the random number generators. Every rank calls.

    Raises:
        ValueError: the world size does not fit the configuration; raised before any rank waits
            for another rank.
    """
    from nxd_memopt.backends import backend
    from nxd_memopt.parallel_layers import parallel_state, random

    config.accumulation_steps(world_size())  # called for its checks
    config.require_expert_ranks(world_size())
    backend.expand_segments()
    backend.keep_kernels()
    # The order matters: the model-parallel groups are subgroups of the world, and seeds depend on
    # the rank in these groups.
    backend.init_process_group(timeout=timedelta(minutes=config.trainer.distributed_timeout_minutes))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        expert_model_parallel_size=config.parallel.expert_model_parallel_size,
    )
    random.model_parallel_manual_seed(config.trainer.seed)


def destroy_distributed() -> None:
    """Destroy the process groups. Every rank calls."""
    from nxd_memopt.parallel_layers.coordination import share_texts
    from nxd_memopt.parallel_layers.utils import leave_process_groups

    # A barrier: no rank destroys its groups while another rank still communicates.
    share_texts("")
    leave_process_groups()
