"""The fused weight of GQAQKVColumnParallelLinear against the three separate ones: numbers, description, norms."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_memopt.optimizer import AdamW_FP32OptimParams, NeuronZero1Optimizer
from nxd_memopt.parallel_layers import checkpointing, grads, parallel_state, resharding
from nxd_memopt.parallel_layers.utils import shard_ranges
from tests.dist.pool import SEED, distributed
from tests.reference import CountCollectives, assert_float64_close, shard, tensors

HIDDEN, QUERY, KV = 5, 24, 8
CASES = pytest.mark.parametrize(("bias", "multiplier"), [(True, 1), (False, 2), (True, 2)])


def build(multiplier: int, *, fuse_qkv: bool, **options) -> GQAQKVColumnParallelLinear:
    torch.manual_seed(SEED)
    options = {"gather_output": False, "dtype": torch.float64, **options}
    return GQAQKVColumnParallelLinear(
        HIDDEN, [QUERY, KV], kv_size_multiplier=multiplier, fuse_qkv=fuse_qkv, keep_master_weight=True, **options
    )


def run(layer: GQAQKVColumnParallelLinear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs and dX; fills the parameters' gradients. Each rank's upstream gradient is its own."""
    x = x.clone().requires_grad_()
    outputs = layer(x)
    upstream = [tensors(*output.shape, seed=10 * dist.get_rank() + i) for i, output in enumerate(outputs)]
    torch.autograd.backward(outputs, upstream)
    return *outputs, x.grad


def joined(layer: GQAQKVColumnParallelLinear, kind: str, of=lambda param: param) -> torch.Tensor:
    return torch.cat([of(getattr(layer, f"{kind}_{name}")).detach() for name in "qkv"])


@distributed(world_size=[1, 2, 4])
@CASES
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_equals_the_separate_weights(bias, multiplier, sequence_parallel, world_size):
    """Initial values, outputs, dX and parameter gradients."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    options = {"bias": bias, "sequence_parallel_enabled": sequence_parallel and world_size > 1}
    multiplier = min(multiplier, world_size)
    fused, separate = (build(multiplier, fuse_qkv=fuse, **options) for fuse in (True, False))
    assert torch.equal(fused.weight_qkv.detach(), joined(separate, "weight"))
    assert torch.equal(fused.master_weight_qkv, joined(separate, "master_weight"))
    x = tensors(4, 3, HIDDEN, seed=1)
    for got, want in zip(run(fused, x), run(separate, x), strict=True):
        assert_float64_close(got, want)
    assert_float64_close(fused.weight_qkv.grad, joined(separate, "weight", lambda p: p.grad), "dW")
    if bias:
        assert torch.equal(fused.bias_qkv.detach(), joined(separate, "bias"))
        assert_float64_close(fused.bias_qkv.grad, joined(separate, "bias", lambda p: p.grad), "db")


@distributed(world_size=[2, 4])
@CASES
def test_norm_counts_each_replica_as_its_fraction(bias, multiplier, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    norms = []
    for fuse in (True, False):
        layer = build(multiplier, fuse_qkv=fuse, bias=bias)
        run(layer, tensors(4, 3, HIDDEN, seed=1))
        norms.append(torch.stack([grads.get_grad_norm(layer, kind) for kind in (2.0, 1.0, torch.inf)]))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)  # norms are fp32


@distributed(world_size=4)
@pytest.mark.parametrize("multiplier", [1, 2])
def test_zero1_norm_and_step(multiplier):
    """Two data-parallel ranks each hold a part of every parameter, cut within query, key or value."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    norms, weights = [], []
    for fuse in (True, False):
        layer = build(multiplier, fuse_qkv=fuse, bias=True, dtype=torch.float32)
        run(layer, tensors(4, 3, HIDDEN, seed=1, dtype=torch.float32))
        optimizer = NeuronZero1Optimizer(layer.parameters(), AdamW_FP32OptimParams, max_norm=0.5, lr=0.1)
        optimizer.step()
        norms.append(optimizer.grad_norm)
        weights.append(layer.weight_qkv.detach() if fuse else joined(layer, "weight"))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)  # fp32: another order of summation
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)  # fp32, as above


@distributed(world_size=4)
@pytest.mark.parametrize("multiplier", [1, 2])
def test_full_tensor_and_its_slices(multiplier):
    """``[Q; K; V]`` whole: gathered from the shards, and cut into them again."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
    layer = build(multiplier, fuse_qkv=True)
    weight = layer.weight_qkv
    assert weight.full_shape == (QUERY + 2 * KV, HIDDEN)
    full = resharding.gather_full_tensor(weight)
    assert (full is None) == (dist.get_rank() != 0)
    if full is not None:
        assert torch.equal(full, layer.master_weight_qkv)
    sliced = checkpointing.get_sharded_model_dict(layer, {"weight_qkv": layer.master_weight_qkv})
    assert torch.equal(sliced["weight_qkv"], weight.detach())
    rows = KV * multiplier // 4
    key_start = QUERY + dist.get_rank() // multiplier * rows
    assert shard_ranges(weight)[1] == (key_start, key_start + rows)


@distributed(world_size=2)
def test_one_matmul_and_gathered_columns():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    layer = build(1, fuse_qkv=True, gather_output=True, bias=False)
    x = tensors(4, 3, HIDDEN, seed=1)
    want = torch.nn.functional.linear(x, layer.master_weight_qkv).split([QUERY, KV, KV], -1)
    for got, expected in zip(layer(x), want, strict=True):
        assert_float64_close(got, expected)
    layer = build(1, fuse_qkv=True, sequence_parallel_enabled=True)
    with CountCollectives() as forward:
        layer(shard(x, 0))
    assert forward.total == 1


@distributed(world_size=2)
def test_drawn_anew_and_replaced_parameters_keep_their_description():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    layer = build(2, fuse_qkv=True, device="meta")
    assert layer.weight_qkv.is_meta
    layer.to_empty(device="cpu")
    torch.manual_seed(SEED)
    layer.initialize_weight_biases()
    assert torch.equal(layer.weight_qkv.detach(), build(2, fuse_qkv=True).weight_qkv.detach())
    assert [block.replicas for block in layer.weight_qkv.blocks] == [1, 2, 2]
