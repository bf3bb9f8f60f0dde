"""Host memory of a run: one pool for activations and optimizer states, with its needs known before the first step."""

from __future__ import annotations

import functools

from nxd_memopt.backends import backend
from nxd_memopt.memory.host_pool import HostPool, available_host_bytes
from nxd_memopt.memory.offload import OFFLOAD_OWNER
from nxd_memopt.memory.recompute import layers_per_checkpoint
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.planner.architectures import sizes
from nxd_memopt.planner.formulas import checkpoint_bytes, offloaded_checkpoint_bytes
from nxd_memopt.training.config import TrainConfig
from nxd_memopt.training.distributed import ranks_per_host


def new_host_pool(config: TrainConfig) -> HostPool | None:
    """Return the pool of a run that offloads something, else None. Every rank calls.

    Its limit is this rank's equal part of the memory that is available on the host with the least.
    """
    transfers = backend.host_transfers()
    offloads = config.memory.cpu_offloading_activations or config.memory.cpu_offloading_num_layers > 0
    if transfers is None or not (offloads or config.optimizer.optimizer_cpu_offload):
        return None
    # Before any rank allocates: the ranks of a host would count each other's memory differently.
    available = available_host_bytes()
    texts = share_texts("" if available is None else str(available))
    limits = [int(text) // ranks_per_host() for text in texts if text]
    return HostPool(
        min(limits, default=None),
        pinned=transfers.needs_pinned_memory,
        limit_remedy=f"use a host with more memory or fewer than {ranks_per_host()} ranks, or offload less",
    )


def reserve_activations(pool: HostPool | None, model: ParallelCausalLM, config: TrainConfig) -> None:
    """Allocate the host memory of the activation checkpoints, so that no step does. Every rank calls.

    Activations that layers offload without recompute have no formula: the first layer of the first
    step reserves their memory.

    Raises:
        ValueError: on every rank, if a host has too little memory.
    """
    memory = config.memory
    if pool is None or not memory.cpu_offloading_activations:
        return
    letters = sizes(model.config)
    num_layers = len(model.decoder_layers())
    one_layer = functools.partial(
        checkpoint_bytes,
        sequence_length=config.data.seq_length,
        micro_batch_size=config.data.micro_batch_size,
        element_bytes=model.embedding_weight().element_size(),
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        sequence_parallel_enabled=config.parallel.sequence_parallel_enabled,
    )
    layers = memory.num_offloaded_layers(num_layers)
    inputs = one_layer(hidden_size=letters["H"])
    required = offloaded_checkpoint_bytes(inputs, layers, layers_per_checkpoint(memory, num_layers))
    # The results of attention of every offloaded layer that keeps them.
    keeping = memory.layers_keeping_attention(num_layers)
    kept = range(keeping.start, min(keeping.stop, layers))
    required += len(kept) * one_layer(hidden_size=0, kept_attention_size=letters["h"] * letters["d"])
    with raise_together("reserving host memory"):
        pool.reserve(required, OFFLOAD_OWNER)
