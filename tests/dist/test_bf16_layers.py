"""bf16 layers, with bf16 weights and with fp32 weights under autocast, against float64."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from nxd_memopt.parallel_layers import layers, parallel_state
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
