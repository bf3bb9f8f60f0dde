"""Checkpoints in host memory and nested recompute: bit-equal gradients with dropout, each rank with its own shard."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.memory import apply, apply_memory, offload
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.parallel_layers import grads, parallel_state, random
from nxd_memopt.planner.memory.activations import offloaded_checkpoint_bytes
from tests.dist.pool import distributed
from tests.host_copies import HostOnly, SlowCopy
from tests.reference_models import BATCH, LENGTH, batch, gpt_neox_config, llama_config, parallel_model

NUM_LAYERS = 5
MODELS = {
    "llama": lambda: llama_config(num_hidden_layers=NUM_LAYERS, hidden_size=64, attention_dropout=0.2),
    "neox": lambda: gpt_neox_config(
        num_hidden_layers=NUM_LAYERS, hidden_size=64, attention_dropout=0.2, hidden_dropout=0.1
    ),
}
NESTED = {"recompute_method": "nested", "recompute_num_layers": 3}


def step(model) -> dict[str, torch.Tensor]:
    """One forward and backward pass from one state of all random streams, and the state after it."""
    torch.manual_seed(1)
    random.model_parallel_manual_seed(7)
    model.zero_grad()
    loss = model.train()(**batch()).loss
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    results = {name: param.grad.clone() for name, param in model.named_parameters()}
    return (
        results
        | {"loss": loss.detach(), "default stream": torch.get_rng_state()}
        | random.get_rng_tracker().get_states()
    )


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("name", list(MODELS))
def test_bit_equal(name, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    sequence_parallel = world_size > 1
    model = parallel_model(MODELS[name](), sequence_parallel=sequence_parallel, attention_backend="math")
    want = step(model)
    sizes = {"sequence_length": LENGTH, "micro_batch_size": BATCH, "dtype": "float32"}
    parallel = ParallelConfig(world_size, sequence_parallel_enabled=sequence_parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_MIN_BYTES", 1)
        patch.setattr(apply.backend, "host_transfers", lambda: HostOnly(0, SlowCopy))
        for offloaded in (False, True):
            for options in ({}, NESTED):
                pool = HostPool(block_bytes=512)
                memory = MemoryConfig(
                    recompute_granularity="full",
                    cpu_offloading_activations=offloaded,
                    attention_backend="math",
                    **options,
                )
                apply_memory(model, memory, pool=pool)
                got = step(model)
                for key, value in want.items():
                    assert torch.equal(got[key], value), f"{key}, offloaded {offloaded}, {options}"
                planned = offloaded_checkpoint_bytes(model.spec, parallel, memory, **sizes, smallest_bytes=1)
                expected = offloaded * planned
                assert expected <= pool.allocated_bytes < expected + 512
