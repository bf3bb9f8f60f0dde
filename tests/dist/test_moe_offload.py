"""Expert-parallel models with activations in host memory: gradients to the bit, whatever the routing of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory, offload
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.parallel_layers import parallel_state
from tests.dist.pool import distributed
from tests.dist.test_moe_models import MODELS, options_of
from tests.host_copies import HostOnly, SlowCopy
from tests.reference_models import batch, parallel_model

BLOCK = 4096  # smaller than most storages: they span blocks and share them
MEMORY: dict[str, dict[str, Any]] = {
    "first two layers": {"cpu_offloading_num_layers": 2},
    "first layer, experts recomputed": {
        "cpu_offloading_num_layers": 1,
        "recompute_granularity": "selective",
        "recompute_modules": ("moe",),
    },
    "checkpoints of all layers": {"recompute_granularity": "full", "cpu_offloading_activations": True},
}


def steps(model: torch.nn.Module) -> list[torch.Tensor]:
    """Losses and gradients of two steps with other tokens on every rank: other numbers of rows for every expert."""
    found = []
    rank = parallel_state.get_data_parallel_rank()
    for step in range(2):
        inputs = {name: value.roll(2 * step + rank, 1) for name, value in batch().items()}
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        found += [loss.detach(), *(param.grad.clone() for param in model.parameters())]
    return found


@distributed(world_size=2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("memory", MEMORY)
def test_gradients_are_bit_equal(name, memory):
    for dispatcher in ("allgather", "alltoall"):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, expert_model_parallel_size=2)
        config = MODELS[name]()
        torch.manual_seed(4)
        model = parallel_model(config, moe=options_of(config, dispatcher))
        expected = steps(model)
        transfers = HostOnly(0, SlowCopy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offload, "_MIN_BYTES", 1)
            patch.setattr("nxd_memopt.memory.apply.backend.host_transfers", lambda copies=transfers: copies)
            apply_memory(model, MemoryConfig(**MEMORY[memory]), pool=HostPool(block_bytes=BLOCK))
            found = steps(model)
        assert transfers.events.count("out") >= 2
        for mine, want in zip(found, expected, strict=True):
            assert torch.equal(mine, want)
