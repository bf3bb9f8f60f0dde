"""Tests that an overflow on one rank skips the step on every rank: tensor-parallel, data-parallel and ZeRO-1."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_memopt.optimizer import LossScaler, NeuronZero1Optimizer
from nxd_memopt.parallel_layers import grads, parallel_state
from tests.dist.pool import distributed
from tests.reference import tensors


def build(zero1: bool) -> tuple[nn.Parameter, LossScaler, NeuronZero1Optimizer]:
    """One fp16 parameter, sharded over the tensor-parallel ranks."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    parameter = nn.Parameter(tensors(5, 3, seed=rank).half())
    parameter.tensor_model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]
    scaler = LossScaler(initial_scale=1024.0, hysteresis=2, growth_interval=3)
    groups = None if zero1 else [[each] for each in range(dist.get_world_size())]
    optimizer = NeuronZero1Optimizer(
        [parameter],
        torch.optim.AdamW,
        use_grad_acc_hook=True,
        sharding_groups=groups,
        loss_scaler=scaler,
        lr=0.1,
    )
    return parameter, scaler, optimizer


def take_step(optimizer: NeuronZero1Optimizer, parameter: nn.Parameter, bad: float | None, *, zero1: bool) -> bool:
    parameter.grad = None
    gradient = torch.ones_like(parameter, dtype=torch.float32)
    if bad is not None:
        gradient[2, 1] = bad
    parameter.main_grad = gradient  # pyright: ignore[reportAttributeAccessIssue]
    if not zero1:
        grads.bucket_allreduce_gradients([parameter])
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.loss_scaler is not None
    return optimizer.loss_scaler.skipped_last


@distributed(world_size=[2, 4])
@pytest.mark.parametrize(
    ("tensor_size", "zero1", "bad"), [(1, True, math.inf), (2, True, math.nan), (2, False, math.inf)]
)
def test_an_overflow_on_one_rank_skips_the_step_on_every_rank(world_size, tensor_size, zero1, bad):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
    parameter, scaler, optimizer = build(zero1)
    assert not take_step(optimizer, parameter, None, zero1=zero1)
    # Each rank in turn has the only bad gradient.
    for rank in range(world_size):
        before = parameter.detach().clone()
        scale = scaler.scale.item()
        assert take_step(optimizer, parameter, bad if dist.get_rank() == rank else None, zero1=zero1), rank
        assert torch.equal(parameter.detach(), before), rank
        assert scaler.scale.item() == (scale if rank == 0 else scale / 2), rank  # hysteresis 2
    before = parameter.detach().clone()
    assert not take_step(optimizer, parameter, None, zero1=zero1)
    assert not torch.equal(parameter.detach(), before)
    # The gradients were all ones: all elements of all ranks have moved by the same amount.
    moved = parameter.detach().float() - before.float()
    assert moved.isfinite().all() and moved.std() < 1e-2
    states = [None] * world_size
    dist.all_gather_object(states, scaler.state_dict())
    assert all(state == states[0] for state in states)
