"""The benchmark of ZeRO-3: ours and FSDP2's peer train on two data-parallel ranks, each with its own tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_memopt.config import MemoryConfig
from nxd_memopt.parallel_layers import parallel_state
from scripts.bench.harness.configs import CONFIGS
from scripts.bench.races import offload_peers, sharded_step
from scripts.bench.races.peers import build_hf
from tests.dist.pool import distributed

TOKENS = 32


def arguments(*options: str):
    return sharded_step.argument_parser().parse_args(["--steps", "2", "--warm-up-steps", "1", *options])


@distributed(world_size=[2])
def test_both_train_on_the_mean_gradient():
    """One test: DTensor keeps process groups of equal meshes, which the end of a test destroys."""
    parallel_state.initialize_model_parallel()
    rank = parallel_state.get_data_parallel_rank()
    config = CONFIGS["llama-tiny"]()
    batches = [torch.randint(0, config.vocab_size, (1, TOKENS)) for _ in range(2)]
    torch.manual_seed(5)
    _, loss_of, optimizer = sharded_step.build("hf", config, torch.float32, MemoryConfig())
    loss_of(batches[rank]).backward()
    optimizer.step()
    # The norm of the mean of both ranks' gradients, from one process with the same weights.
    torch.manual_seed(5)
    reference, reference_loss = build_hf(config, MemoryConfig())
    for ids in batches:
        (reference_loss(ids) / 2).backward()
    norms = [param.grad.norm() for param in reference.parameters() if param.grad is not None]
    assert optimizer.norm() == pytest.approx(torch.stack(norms).norm().item(), rel=1e-5)

    rows: dict[str, dict[str, Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        # A larger step, so that its effect on the loss is larger than rounding.
        for module in (offload_peers, sharded_step):
            patch.setattr(module, "LEARNING_RATE", 1e-3)
        for variant in ("ours", "hf"):
            rows[variant] = sharded_step.measured_row(variant, TOKENS, arguments())
    for row in rows.values():
        assert row["failure"] == ""
        assert row["data_parallel"] == 2
        assert row["loss"] < row["first_loss"]
    # Other initial weights of the same distribution.
    assert rows["ours"]["grad_norm"] == pytest.approx(rows["hf"]["grad_norm"], rel=0.2)
