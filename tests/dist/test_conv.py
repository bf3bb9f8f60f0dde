"""Parallel convolutions in float64 against torch.nn.functional.conv2d: output and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

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
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (OutputChannelParallelConv2d, {}),
        (OutputChannelParallelConv2d, {"gather_output": False}),
        (InputChannelParallelConv2d, {}),
        (InputChannelParallelConv2d, {"input_is_parallel": True}),
    ],
)
def test_equals_the_dense_convolution(kind, options, world_size):
    """Values, dX, dW and db; layers of both kinds pass sharded channels to each other."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    layer, weight, bias = build(kind, **options)
    x = tensors(2, IN, 8, 9, seed=1).requires_grad_()
    want = F.conv2d(x, weight, bias, **OPTIONS)
    upstream = tensors(*want.shape, seed=2)
    want_dx, want_dw, want_db = gradients(want, upstream, [x, weight, bias])

    def part(full, dim):
        return shard(pad(full.detach(), dim, world_size), dim)

    if options.get("gather_output") is False:
        want, upstream = part(want, 1), part(upstream, 1)
    if options.get("input_is_parallel"):
        x, want_dx = part(x, 1).requires_grad_(), part(want_dx, 1)
    want_db = part(want_db, 0) if kind is OutputChannelParallelConv2d else want_db
    got = layer(x)
    found = got, *gradients(got, upstream, [x, layer.weight, layer.bias])
    wanted = want, want_dx, part(want_dw, kind.partition_dim), want_db
    for name, a, b in zip(("output", "dX", "dW", "db"), found, wanted, strict=True):
        assert_float64_close(a, b, name)


@distributed(world_size=2)
def test_refusals():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    message = error_message(lambda: OutputChannelParallelConv2d(4, 5, 3))
    assert_says(message, "out_channels 5", "tensor_model_parallel_size 2", "partition_pad=True", 6)
    message = error_message(lambda: InputChannelParallelConv2d(4, 4, 3, groups=2))
    assert_says(message, "groups=1", "padding_mode='zeros'", 2)
    # Missing channels would be taken for zeros, and surplus ones cut off.
    layer = InputChannelParallelConv2d(8, 4, 3)
    for channels in (7, 9):
        message = error_message(lambda channels=channels: layer(torch.zeros(1, channels, 5, 5)))
        assert_says(message, f"{channels} channels", "in_channels is 8")
