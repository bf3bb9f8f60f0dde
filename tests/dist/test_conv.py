"""Parallel convolutions in float64 against torch.nn.functional.conv2d: output and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.conv import InputChannelParallelConv2d, OutputChannelParallelConv2d
from tests.dist.pool import SEED, distributed
from tests.reference import assert_float64_close, assert_says, error_message, gradients, pad, shard, tensors

IN, OUT = 5, 7  # primes: padded at every T above 1
OPTIONS = {"stride": 2, "padding": (1, 0), "dilation": (1, 2)}


def build(kind: type, **options):
    torch.manual_seed(SEED)
    layer = kind(
        IN, OUT, (3, 2), partition_pad=True, keep_master_weight=True, dtype=torch.float64, **OPTIONS, **options
    )
    return layer, layer.master_weight.requires_grad_(), layer.master_bias.requires_grad_()


@distributed(world_size=[1, 2, 3])
def test_output_channels(world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    layer, weight, bias = build(OutputChannelParallelConv2d)
    x = tensors(2, IN, 8, 9, seed=1).requires_grad_()
    want = F.conv2d(x, weight, bias, **OPTIONS)
    upstream = tensors(*want.shape, seed=2)
    want_dx, want_dw, want_db = gradients(want, upstream, [x, weight, bias])
    got = layer(x)
    dx, dw, db = gradients(got, upstream, [x, layer.weight, layer.bias])
    assert_float64_close(got, want, "output")
    assert_float64_close(dx, want_dx, "dX")
    assert_float64_close(dw, shard(pad(want_dw, 0, world_size), 0), "dW")
    assert_float64_close(db, shard(pad(want_db, 0, world_size), 0), "db")


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("input_is_parallel", [False, True])
def test_input_channels(input_is_parallel, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    layer, weight, bias = build(InputChannelParallelConv2d, input_is_parallel=input_is_parallel)
    x = tensors(2, IN, 8, 9, seed=1).requires_grad_()
    want = F.conv2d(x, weight, bias, **OPTIONS)
    upstream = tensors(*want.shape, seed=2)
    want_dx, want_dw, want_db = gradients(want, upstream, [x, weight, bias])
    if input_is_parallel:
        x, want_dx = shard(pad(x.detach(), 1, world_size), 1).requires_grad_(), shard(pad(want_dx, 1, world_size), 1)
    got = layer(x)
    dx, dw, db = gradients(got, upstream, [x, layer.weight, layer.bias])
    assert_float64_close(got, want, "output")
    assert_float64_close(dx, want_dx, "dX")
    assert_float64_close(dw, shard(pad(want_dw, 1, world_size), 1), "dW")
    assert_float64_close(db, want_db, "db")


@distributed(world_size=2)
def test_back_to_back():
    """Sharded channels pass from the first to the second without a collective between."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(SEED)
    first = OutputChannelParallelConv2d(4, 6, 3, bias=False, gather_output=False, dtype=torch.float64)
    second = InputChannelParallelConv2d(6, 2, 1, bias=False, input_is_parallel=True, dtype=torch.float64)
    torch.manual_seed(SEED)
    dense = [nn.Conv2d(4, 6, 3, bias=False), nn.Conv2d(6, 2, 1, bias=False)]  # fp32 draws another stream: copied below
    for layer, sharded, dim in zip(dense, (first, second), (0, 1), strict=True):
        full = tensors(*layer.weight.shape, seed=dim)
        layer.weight = nn.Parameter(full)
        sharded.weight.data.copy_(shard(full, dim))
    x = tensors(1, 4, 5, 5)
    assert first(x).size(1) == 3
    assert_float64_close(second(torch.relu(first(x))), dense[1](torch.relu(dense[0](x))))


@distributed(world_size=2)
def test_refusals():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    message = error_message(lambda: OutputChannelParallelConv2d(4, 5, 3))
    assert_says(message, "out_channels 5", "tensor_model_parallel_size 2", "partition_pad=True", 6)
    message = error_message(lambda: InputChannelParallelConv2d(4, 4, 3, groups=2))
    assert_says(message, "groups=1", 2)
    message = error_message(lambda: InputChannelParallelConv2d(4, 4, 3, padding_mode="reflect"))
    assert_says(message, "padding_mode='zeros'", "reflect")
    assert dist.get_world_size() == 2


@distributed(world_size=[2])
def test_another_number_of_channels_is_refused(world_size):
    """Missing channels were taken for zeros, and surplus ones cut off."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    layer = InputChannelParallelConv2d(8, 4, 3)
    for channels in (7, 9):
        message = error_message(lambda channels=channels: layer(torch.zeros(1, channels, 5, 5)))
        assert_says(message, f"{channels} channels", "in_channels is 8")
