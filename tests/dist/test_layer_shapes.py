"""Inputs and outputs of the parallel layers that are unlike a batch of sequences, or are written to."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nxd_memopt.parallel_layers import layers, parallel_state
from tests.dist.pool import distributed
from tests.reference import assert_float64_close, tensors

F64 = {"dtype": torch.float64}


@distributed(world_size=[1, 2])
def test_one_token_without_leading_dimensions():
    parallel_state.initialize_model_parallel(dist.get_world_size())
    column, row = (
        layers.ColumnParallelLinear(4, 8, gather_output=False, **F64),
        layers.RowParallelLinear(8, 4, input_is_parallel=True, **F64),
    )
    x = tensors(4).requires_grad_()
    output = row(column(x))
    output.sum().backward()
    found = [output.detach(), x.grad, column.weight.grad.clone(), row.weight.grad.clone()]
    column.zero_grad(), row.zero_grad()
    batch = tensors(4).unsqueeze(0).requires_grad_()
    wanted = row(column(batch))
    wanted.sum().backward()
    expected = [wanted.detach().squeeze(0), batch.grad.squeeze(0), column.weight.grad, row.weight.grad]
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert_float64_close(a, b)


@distributed(world_size=[1, 2])
def test_an_output_may_be_written_to():
    parallel_state.initialize_model_parallel(dist.get_world_size())
    row = layers.RowParallelLinear(8, 4, bias=False, input_is_parallel=True, **F64)
    x = tensors(3, 2, 8 // dist.get_world_size()).requires_grad_()
    expected = row(x) * 2
    assert_float64_close(row(x).mul_(2), expected)
