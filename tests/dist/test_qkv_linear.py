"""GQAQKVColumnParallelLinear in float64 against three dense projections, with and without KV replicas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.modules.qkv_linear import GQAQKVColumnParallelLinear, kv_size_multiplier
from nxd_memopt.parallel_layers import parallel_state
from tests.dist.pool import distributed
from tests.reference import (
    assert_float64_close,
    assert_says,
    error_message,
    from_all_ranks,
    gradients,
    shard,
    tensors,
)

HIDDEN, HEAD = 11, 3


def place(name: str, multiplier: int) -> dict[str, int]:
    """Which of how many shards this rank holds: ``multiplier`` neighbours share each KV shard."""
    replicas = 1 if name == "q" else multiplier
    return {"size": dist.get_world_size() // replicas, "rank": dist.get_rank() // replicas}


def build(heads: int, kv_heads: int, **options):
    """The layer, and its dense weights and biases by name."""
    multiplier = kv_size_multiplier(kv_heads, dist.get_world_size())
    sizes = {"q": heads * HEAD, "k": kv_heads * HEAD, "v": kv_heads * HEAD}
    layer = GQAQKVColumnParallelLinear(
        HIDDEN,
        [sizes["q"], sizes["k"]],
        kv_size_multiplier=multiplier,
        **{"gather_output": False, "dtype": torch.float64, **options},
    )
    weights = {name: tensors(size, HIDDEN, seed=i) for i, (name, size) in enumerate(sizes.items())}
    biases = {name: tensors(size, seed=10 + i) for i, (name, size) in enumerate(sizes.items())}
    with torch.no_grad():
        for name in "qkv":
            getattr(layer, f"weight_{name}").copy_(shard(weights[name], 0, **place(name, multiplier)))
            if options.get("bias", True):
                getattr(layer, f"bias_{name}").copy_(shard(biases[name], 0, **place(name, multiplier)))
    return layer, weights, biases, multiplier


# T=4: one query shard per rank; 4 KV heads on 4 ranks, 2 on pairs of ranks, 1 on all ranks
@distributed(world_size=[1, 2, 4])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_dense_projections(bias, sequence_parallel, kv_heads, world_size):
    """dX, dW, db: each replica of a KV shard holds the sum over all query heads that read it, equal bit for bit."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    sequence_parallel = sequence_parallel and world_size > 1
    layer, weights, biases, multiplier = build(8, kv_heads, bias=bias, sequence_parallel_enabled=sequence_parallel)
    x = tensors(5 * world_size, 2, HIDDEN, seed=20)
    upstream, want_dx = [], torch.zeros_like(x)
    for i, name in enumerate("qkv"):
        # each rank's replica of K and V is read by that rank's query heads: its own upstream gradient
        ranks = [
            tensors(5 * world_size, 2, getattr(layer, f"weight_{name}").size(0), seed=30 + 10 * i + rank)
            for rank in range(world_size)
        ]
        replicas = 1 if name == "q" else multiplier
        summed = torch.stack(ranks).unflatten(0, (-1, replicas)).sum(1)  # over the replicas of each shard
        dense = torch.cat(list(summed), -1)
        want_dx += dense @ weights[name]
        upstream.append((name, ranks[dist.get_rank()], dense))
    local_x = shard(x, 0) if sequence_parallel else x
    local_x.requires_grad_()
    outputs = dict(zip("qkv", layer(local_x), strict=True))
    for name, _, _ in upstream:
        want = x @ weights[name].t() + (biases[name] if bias else 0)
        assert_float64_close(outputs[name], shard(want, -1, **place(name, multiplier)), f"output {name}")
    torch.autograd.backward(list(outputs.values()), [mine for _, mine, _ in upstream])
    assert_float64_close(local_x.grad, shard(want_dx, 0) if sequence_parallel else want_dx, "dX")
    for name, _, dense in upstream:
        flat = dense.flatten(0, 1)
        weight_grad = getattr(layer, f"weight_{name}").grad
        assert_float64_close(weight_grad, shard(flat.t() @ x.flatten(0, 1), 0, **place(name, multiplier)), f"dW {name}")
        if bias:
            bias_grad = getattr(layer, f"bias_{name}").grad
            assert_float64_close(bias_grad, shard(flat.sum(0), 0, **place(name, multiplier)), f"db {name}")
        everyone = from_all_ranks(weight_grad)
        first_of_replicas = dist.get_rank() // multiplier * multiplier
        assert name == "q" or torch.equal(everyone[first_of_replicas], weight_grad), "replicas differ"


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_gather_output_returns_each_column_once(kv_heads, world_size):
    """All ranks do the same with the result, so the upstream gradient is the dense one."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    layer, weights, biases, multiplier = build(8, kv_heads, gather_output=True)
    x = tensors(5, 2, HIDDEN, seed=20).requires_grad_()
    for i, name in enumerate("qkv"):
        want = x @ weights[name].t() + biases[name]
        got = layer(x)[i]
        assert_float64_close(got, want, name)
        upstream = tensors(*want.shape, seed=40)
        want_dx = upstream @ weights[name]
        want_dw = shard(upstream.flatten(0, 1).t() @ x.detach().flatten(0, 1), 0, **place(name, multiplier))
        dx, dw = gradients(got, upstream, [x, getattr(layer, f"weight_{name}")])
        assert_float64_close(dx, want_dx, f"dX {name}")
        assert_float64_close(dw, want_dw, f"dW {name}")


@pytest.mark.parametrize(("heads", "size", "multiplier"), [(8, 4, 1), (8, 32, 4), (1, 4, 4)])
def test_multiplier(heads, size, multiplier):
    assert kv_size_multiplier(heads, size) == multiplier


@pytest.mark.parametrize(("heads", "size"), [(3, 8), (6, 4)])
def test_heads_that_neither_divide_nor_multiply_are_refused(heads, size):
    message = error_message(lambda: kv_size_multiplier(heads, size))
    assert_says(message, f"num_key_value_heads {heads}", f"tensor_model_parallel_size {size}", "divides", "multiple")


@distributed(world_size=4)
def test_refusals():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
    message = error_message(lambda: GQAQKVColumnParallelLinear(8, [24, 6], kv_size_multiplier=3))
    assert_says(message, "kv_size_multiplier 3", "tensor_model_parallel_size 4")
