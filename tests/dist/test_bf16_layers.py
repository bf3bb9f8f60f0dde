"""bf16 layers, with bf16 weights and with fp32 weights under autocast, against float64."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nxd_memopt.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_memopt.parallel_layers import layers, mappings, parallel_state
from tests.dist.pool import distributed
from tests.reference import from_all_ranks, relative_error, shard, tensors

HIDDEN, WIDTH, TOKENS = 64, 96, 24
# bf16 keeps 8 bits: inputs, weights and results are rounded by 2^-9 = 2e-3 each, in random directions, and partial sums
# are added in bf16 once per rank. A missing reduction is an error of 0.7.
TOLERANCE = 1e-2


def mlp_block(size: int, dtype: torch.dtype, **options) -> dict[str, torch.nn.Module]:
    torch.manual_seed(1)
    return {
        "up": layers.ColumnParallelLinear(HIDDEN, WIDTH, gather_output=False, dtype=dtype, **options),
        "down": layers.RowParallelLinear(WIDTH, HIDDEN, input_is_parallel=True, dtype=dtype, **options),
    }


def forward(modules: dict[str, torch.nn.Module], x: Tensor) -> Tensor:
    return modules["down"](modules["up"](x))


def dense_gradients(full: dict[str, Tensor], x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    leaves = {name: tensor.double().requires_grad_() for name, tensor in full.items()} | {
        "x": x.double().requires_grad_()
    }
    hidden = leaves["x"] @ leaves["up.weight"].t() + leaves["up.bias"]
    y = hidden @ leaves["down.weight"].t() + leaves["down.bias"]
    y.backward(upstream.double())
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("precision", ["bf16 weights", "bf16 weights, fp32 reduction", "autocast"])
def test_column_and_row(precision, sequence_parallel, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    autocast = precision == "autocast"
    weight_dtype = torch.float32 if autocast else torch.bfloat16
    options = {"sequence_parallel_enabled": sequence_parallel}
    options["reduce_dtype"] = torch.float32 if "fp32 reduction" in precision else None
    modules = mlp_block(world_size, weight_dtype, **options)
    full = {
        "up.weight": torch.cat(from_all_ranks(modules["up"].weight)),
        "up.bias": torch.cat(from_all_ranks(modules["up"].bias)),
        "down.weight": torch.cat(from_all_ranks(modules["down"].weight), 1),
        "down.bias": modules["down"].bias.detach(),
    }
    x = tensors(TOKENS, 2, HIDDEN, dtype=weight_dtype)
    upstream = tensors(TOKENS, 2, HIDDEN, seed=2, dtype=torch.bfloat16)
    want = dense_gradients(full, x, upstream)
    x = shard(x, 0) if sequence_parallel else x
    upstream = shard(upstream, 0) if sequence_parallel else upstream
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        y = forward(modules, x)
    assert y.dtype == torch.bfloat16
    y.backward(upstream)
    got = {f"{m}.{n}": p.grad for m, module in modules.items() for n, p in module.named_parameters()}
    assert all(gradient.dtype == weight_dtype for gradient in got.values()), "gradients have their parameters' dtype"
    if sequence_parallel:
        got["down.bias"] = torch.stack(from_all_ranks(got["down.bias"])).float().sum(0)
    want |= {name: shard(want[name], 0) for name in ("up.weight", "up.bias")}
    want["down.weight"] = shard(want["down.weight"], 1)
    if sequence_parallel:
        want |= {name: shard(want[name], 0) for name in ("x", "y")}
    for name, value in {**got, "x": x.grad, "y": y}.items():
        assert relative_error(value, want[name]) < TOLERANCE, (name, relative_error(value, want[name]))


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_joint_projection(autocast, sequence_parallel, world_size):
    """One KV head on all ranks: its gradient is summed over them."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    dtype = torch.float32 if autocast else torch.bfloat16
    torch.manual_seed(1)
    layer = GQAQKVColumnParallelLinear(
        HIDDEN,
        [WIDTH, 12],
        bias=False,
        gather_output=False,
        dtype=dtype,
        kv_size_multiplier=world_size,
        sequence_parallel_enabled=sequence_parallel,
    )
    x = tensors(TOKENS, 2, HIDDEN, dtype=dtype)
    ranks = range(world_size)
    upstream = {
        "q": [tensors(TOKENS, 2, WIDTH // world_size, seed=rank, dtype=torch.bfloat16) for rank in ranks],
        "k": [tensors(TOKENS, 2, 12, seed=10 + rank, dtype=torch.bfloat16) for rank in ranks],
        "v": [tensors(TOKENS, 2, 12, seed=20 + rank, dtype=torch.bfloat16) for rank in ranks],
    }
    local = (shard(x, 0) if sequence_parallel else x).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = layer(local)
    torch.autograd.backward(list(outputs), [upstream[name][dist.get_rank()] for name in "qkv"])
    dense = {"q": torch.cat(upstream["q"], -1).double()} | {
        name: torch.stack(upstream[name]).double().sum(0) for name in "kv"
    }
    full = {"q": torch.cat(from_all_ranks(layer.weight_q)), "k": layer.weight_k, "v": layer.weight_v}
    want_dx = sum(dense[name] @ full[name].detach().double() for name in "qkv")
    assert relative_error(local.grad, shard(want_dx, 0) if sequence_parallel else want_dx) < TOLERANCE
    for name in "qkv":
        want = dense[name].flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
        want = shard(want, 0) if name == "q" else want
        assert relative_error(getattr(layer, f"weight_{name}").grad, want) < TOLERANCE, name


@distributed(world_size=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mappings_reduce_in_low_precision(dtype):
    """Every dtype is reduced: sums of two halves are exact but for one rounding."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    x = tensors(8, 6, seed=dist.get_rank(), dtype=dtype).requires_grad_()
    total = torch.stack(from_all_ranks(x)).double().sum(0).to(dtype)
    assert torch.equal(mappings.reduce_from_tensor_model_parallel_region(x), total)
    (grad,) = torch.autograd.grad(mappings.copy_to_tensor_model_parallel_region(x), x, x.detach())
    assert torch.equal(grad, total)
