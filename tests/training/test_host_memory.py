"""Host memory of a run is known, allocated and checked before the first step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.memory import apply_memory
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.planner.memory.activations import offloaded_checkpoint_bytes
from nxd_memopt.training import host_memory
from nxd_memopt.training.host_memory import new_host_pool, reserve_activations
from nxd_memopt.training.model import build_model, load_hf_config
from tests.host_copies import HostOnly
from tests.reference import assert_says, error_message
from tests.training.resume.test_rules import build
from tests.training.runs import LLAMA

DATA = {"seq_length": 24, "micro_batch_size": 2, "global_batch_size": 2}
CHECKPOINT_BYTES = 24 * 2 * 24 * 4  # S, B, H, fp32
OFFLOAD = {"recompute_granularity": "full", "cpu_offloading_activations": True}


@pytest.fixture(autouse=True)
def simulated_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(backend), "host_transfers", lambda self: HostOnly())
    monkeypatch.setattr("nxd_memopt.memory.offload._MIN_BYTES", CHECKPOINT_BYTES)  # not the RoPE tables
    planned = partial(offloaded_checkpoint_bytes, smallest_bytes=CHECKPOINT_BYTES)
    monkeypatch.setattr("nxd_memopt.training.host_memory.offloaded_checkpoint_bytes", planned)
    parallel_state.initialize_model_parallel()


@pytest.mark.parametrize(
    ("memory", "checkpoints"),
    [
        ({}, 4),
        ({"cpu_offloading_num_layers": 3}, 3),
        ({"recompute_method": "uniform", "recompute_num_layers": 2}, 2),
        ({"recompute_method": "nested", "recompute_num_layers": 3}, 2),
        ({"recompute_method": "block", "recompute_num_layers": 1}, 1),
    ],
)
def test_activation_checkpoints_are_allocated_before_the_first_step(memory: dict[str, Any], checkpoints: int) -> None:
    """A step then allocates nothing, and what it uses at most is what was allocated."""
    config = build(model={"config_overrides": LLAMA | {"num_hidden_layers": 4}}, memory=OFFLOAD | memory, data=DATA)
    model = build_model(config, load_hf_config(config.model))
    pool = HostPool(block_bytes=512)
    apply_memory(model, config.memory, pool=pool)
    reserve_activations(pool, model, config)
    assert pool.allocated_bytes == checkpoints * CHECKPOINT_BYTES
    ids = torch.randint(0, 257, (2, 24))
    loss = model(ids, labels=ids).loss
    assert sum(pool.ledger().values()) == checkpoints * CHECKPOINT_BYTES
    loss.backward()
    assert pool.allocated_bytes == checkpoints * CHECKPOINT_BYTES


def test_a_host_that_is_too_small_is_an_error_with_both_sizes() -> None:
    config = build(memory=OFFLOAD, data=DATA)
    model = build_model(config, load_hf_config(config.model))
    required = 2 * CHECKPOINT_BYTES
    pool = HostPool(required - 512, block_bytes=512, limit_remedy="offload less")
    message = error_message(lambda: reserve_activations(pool, model, config))
    assert_says(message, "activation offload", required, required - 512, "offload less")


def test_each_rank_of_a_host_may_use_an_equal_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2**32)
    monkeypatch.setattr(host_memory, "ranks_per_host", lambda: 4)
    for sections in ({"memory": OFFLOAD}, {"optimizer": {"optimizer_offload_fraction": 1.0}}):
        pool = new_host_pool(build(**sections))
        assert pool is not None
        message = error_message(lambda pool=pool: pool.claim(2**30 + 1, "states"))
        assert_says(message, 2**30 + 1, f"{2**30} of the pool's {2**30}", "fewer than 4 ranks")
    assert new_host_pool(build()) is None
    monkeypatch.setattr(type(backend), "host_transfers", lambda self: None)
    assert new_host_pool(build(memory=OFFLOAD)) is None  # apply_memory refuses it by name
