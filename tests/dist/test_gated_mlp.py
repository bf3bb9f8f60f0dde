"""Gated activation and row-parallel layer in one against the two apart, in float64, also tile by tile."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.modules.mlp import fused_gated_mlp
from nxd_memopt.ops.activation import ACTIVATIONS, gated_activation
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.functional import gated_mlp
from nxd_memopt.parallel_layers.layers import RowParallelLinear
from tests.dist.pool import distributed
from tests.reference import assert_float64_close, assert_says, error_message, shard, tensors

F64 = {"dtype": torch.float64}
LENGTH, BATCH, WIDTH, HIDDEN = 20, 3, 12, 7


def inputs(size: int):
    whole = [tensors(LENGTH, BATCH, WIDTH, seed=i) for i in range(2)]
    return [shard(x, -1, size=size).requires_grad_() for x in whole]


def results(function, layer, gate, up):
    layer.zero_grad()
    output = function(gate, up)
    upstream = tensors(*output.shape, seed=5)
    grads = torch.autograd.grad(output, [gate, up, *layer.parameters()], upstream)
    return [output.detach(), *(grad.clone() for grad in grads)]


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("tile_rows", [1000, 7])
@pytest.mark.parametrize("hidden_act", sorted(ACTIVATIONS))
def test_equals_the_two_apart(hidden_act, tile_rows):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    options = {"input_is_parallel": True, "sequence_parallel_enabled": size > 1, **F64}
    layer = RowParallelLinear(WIDTH, HIDDEN, **options)
    gate, up = inputs(size)
    expected = results(lambda g, u: layer(gated_activation(g, u, hidden_act)), layer, gate, up)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated_mlp, "ACTIVATION_TILE_BYTES", tile_rows * WIDTH // size * 8)
        found = results(lambda g, u: fused_gated_mlp(g * 1, u * 1, layer, hidden_act), layer, gate, up)
    for a, b in zip(found, expected, strict=True):
        assert_float64_close(a, b)


@distributed(world_size=1)
def test_keeps_no_activation_and_allows_one_backward():
    parallel_state.initialize_model_parallel(1)
    layer = RowParallelLinear(WIDTH, HIDDEN, bias=False, input_is_parallel=True, **F64)
    gate, up = (x * 1 for x in inputs(1))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output = fused_gated_mlp(gate, up, layer, "silu")
    own = {gate.data_ptr(), up.data_ptr(), layer.weight.data_ptr()}
    assert {x.data_ptr() for x in kept} == own
    output.sum().backward(retain_graph=True)
    assert_says(error_message(output.sum().backward, RuntimeError), "one backward")


@distributed(world_size=1)
def test_frozen_weight_has_no_gradient():
    parallel_state.initialize_model_parallel(1)
    layer = RowParallelLinear(WIDTH, HIDDEN, bias=False, input_is_parallel=True, **F64)
    layer.weight.requires_grad_(False)
    gate, up = inputs(1)
    fused_gated_mlp(gate * 1, up * 1, layer, "gelu").sum().backward()
    assert layer.weight.grad is None and gate.grad is not None and up.grad is not None
