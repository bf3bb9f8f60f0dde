"""Integers on the native Neuron backend, whose device reduces them in fp32: real ranks, its rounding simulated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.backends import backend
from nxd_memopt.backends.neuron.native import NeuronBackend
from nxd_memopt.parallel_layers import parallel_state
from tests.dist.pool import distributed
from tests.reference import shard

ODD = 2**24 + 1  # the first integer that fp32 does not have


def reduce_in_fp32(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False, *, real=dist.all_reduce):
    """The device's all-reduce."""
    wide = tensor.float()
    work = real(wide, op=op, group=group, async_op=async_op)
    tensor.copy_(wide)
    return work


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_integers_are_reduced_exactly(dtype):
    size, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    group, device = parallel_state.get_tensor_model_parallel_group(), object.__new__(NeuronBackend)
    inputs = [torch.arange(2 * size, dtype=dtype).add(ODD + 2 * r) for r in range(size)]
    total = torch.stack(inputs).sum(0).to(dtype)
    real, dist.all_reduce = dist.all_reduce, reduce_in_fp32
    try:
        assert not torch.equal(backend.all_reduce(inputs[rank], group), total)  # the device's way is inexact
        for op, want in {"sum": total, "max": inputs[-1], "min": inputs[0]}.items():
            got = device.all_reduce(inputs[rank], group, op)
            assert torch.equal(got, want) and got.dtype == dtype, op
        assert torch.equal(device.all_reduce_async(inputs[rank], group).wait(), total)
        assert torch.equal(device.reduce_scatter(inputs[rank], group), shard(total, 0))
        fractions = inputs[rank].double() / 2**30
        assert device.all_reduce(fractions, group).dtype == torch.float64  # as every backend's
    finally:
        dist.all_reduce = real
