"""Host memory of a run: one pool for activations and optimizer states, with its needs known before the first step."""

from __future__ import annotations

from nxd_memopt.backends import backend
from nxd_memopt.memory.host_limits import available_host_bytes
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.offload import OFFLOAD_OWNER
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.planner.memory.activations import offloaded_checkpoint_bytes
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.runtime.distributed import ranks_per_host


def new_host_pool(config: TrainConfig) -> HostPool | None:
    """Return the pool of a run that offloads something, else None. Every rank calls.

    Its limit is this rank's equal part of the memory that is available on the host with the least.
    """
    transfers = backend.host_transfers()
    if transfers is None or not (config.memory.offloads or config.optimizer.offloads_states):
        return None
    # Before any rank allocates: the ranks of a host would count each other's memory differently.
    texts = share_texts(str(available_host_bytes() or ""))
    limits = [int(text) // ranks_per_host() for text in texts if text]
    return HostPool(
        min(limits, default=None),
        pinned=transfers.needs_pinned_memory,
        limit_remedy=f"use a host with more memory or fewer than {ranks_per_host()} ranks, or offload less",
    )


def reserve_activations(pool: HostPool | None, model: ParallelCausalLM, config: TrainConfig) -> None:
    """Allocate the host memory of the activation checkpoints, so that no step does. Every rank calls.

    Activations that layers offload without recompute, and those of models that are not planned, are not
    known here: the first layer of the first step reserves their memory.

    Raises:
        ValueError: on every rank, if a host has too little memory.
    """
    memory = config.memory
    if pool is None or not memory.cpu_offloading_activations:
        return
    try:
        required = offloaded_checkpoint_bytes(
            model.spec,
            config.parallel,
            memory,
            sequence_length=config.data.seq_length,
            micro_batch_size=config.data.micro_batch_size,
            dtype=config.dtype,
        )
    except ValueError:  # the same on every rank: it depends on the options alone
        return
    with raise_together("reserving host memory"):
        pool.reserve(required, OFFLOAD_OWNER)
