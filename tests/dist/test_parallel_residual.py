"""Parallel branches with one gather and one reduction against the same layers called one by one, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models.gpt_neox import GPTNeoXForCausalLM
from nxd_memopt.modules.parallel_residual import normalised_column_parallel_linears, row_parallel_linears
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from tests.dist.pool import distributed
from tests.reference import (
    CountCollectives,
    assert_float64_close,
    assert_same_on_all_ranks,
    assert_says,
    error_message,
    shard,
    tensors,
)
from tests.reference_models import batch, gpt_neox_config

F64 = {"dtype": torch.float64}
HIDDEN, WIDTHS, LENGTH, BATCH = 12, (24, 36), 20, 3


class Branches(nn.Module):
    def __init__(self, *, sequence_parallel: bool, bias: bool) -> None:
        super().__init__()
        options = {"sequence_parallel_enabled": sequence_parallel, "bias": bias, **F64}
        self.norms = nn.ModuleList(
            LayerNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel, **F64) for _ in WIDTHS
        )
        self.columns = nn.ModuleList(ColumnParallelLinear(HIDDEN, n, gather_output=False, **options) for n in WIDTHS)
        self.rows = nn.ModuleList(RowParallelLinear(n, HIDDEN, input_is_parallel=True, **options) for n in WIDTHS)
        with torch.no_grad():
            for i, param in enumerate(p for norm in self.norms for p in norm.parameters()):
                param.copy_(tensors(HIDDEN, seed=i))

    def merged(self, x):
        inputs = normalised_column_parallel_linears(x, *zip(self.norms, self.columns, strict=True))
        return row_parallel_linears([x.tanh() for x in inputs], self.rows, residual=x, sources=(None, None))

    def apart(self, x):
        parts = zip(self.norms, self.columns, self.rows, strict=True)
        return x + sum(row(column(norm(x)).tanh()) for norm, column, row in parts)


def results(branches: Branches, function, x, upstream):
    x = x.detach().requires_grad_()
    branches.zero_grad()
    output = function(x)
    output.backward(upstream)
    grads.allreduce_sequence_parallel_gradients(branches)
    found = {name: param.grad.clone() for name, param in branches.named_parameters()}
    return {"output": output.detach(), "dX": x.grad, **found}


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_equals_the_layers_apart(sequence_parallel, bias):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    sequence_parallel = sequence_parallel and size > 1
    torch.manual_seed(0)
    branches = Branches(sequence_parallel=sequence_parallel, bias=bias)
    x, upstream = tensors(LENGTH, BATCH, HIDDEN, seed=11), tensors(LENGTH, BATCH, HIDDEN, seed=12)
    if sequence_parallel:
        x, upstream = shard(x, 0), shard(upstream, 0)
    expected = results(branches, branches.apart, x, upstream)
    found = results(branches, branches.merged, x, upstream)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_float64_close(found[name], value, name)
        if name.startswith("norms"):
            assert_same_on_all_ranks(found[name], name)


@distributed(world_size=2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_communicates_once(sequence_parallel):
    parallel_state.initialize_model_parallel(2)
    branches = Branches(sequence_parallel=sequence_parallel, bias=True)
    x = tensors(LENGTH // (2 if sequence_parallel else 1), BATCH, HIDDEN).requires_grad_()
    with CountCollectives() as forward:
        output = branches.merged(x)
    with CountCollectives() as backward:
        output.sum().backward()
    if sequence_parallel:
        assert forward.calls == {"_allgather_base_": 1, "_reduce_scatter_base_": 1}
        assert backward.calls == {"_allgather_base_": 2, "_reduce_scatter_base_": 1}
    else:
        assert forward.calls == {"allreduce_": 1}
        assert backward.calls == {"allreduce_": 2}  # dX, and the norms' gradients


@distributed(world_size=2)
def test_frozen_parameters_and_gradients_of_gradients():
    parallel_state.initialize_model_parallel(2)
    branches = Branches(sequence_parallel=True, bias=True)
    for param in (*branches.columns[0].parameters(), *branches.norms[1].parameters()):
        param.requires_grad_(False)
    x = tensors(LENGTH // 2, BATCH, HIDDEN).requires_grad_()
    branches.merged(x).sum().backward()
    assert branches.columns[0].weight.grad is None and branches.norms[1].bias.grad is None
    assert branches.columns[1].weight.grad is not None and branches.norms[0].weight.grad is not None
    loss = branches.merged(x).sum()
    refusal = error_message(lambda: torch.autograd.grad(loss, x, create_graph=True), RuntimeError)
    assert_says(refusal, "second derivatives")
    branches.norms[0].eps = 1e-3
    assert_says(error_message(lambda: branches.merged(x)), "eps", "0.001", "1e-05")


def collectives_of(model, inputs) -> int:
    with CountCollectives() as found:
        model(**inputs).loss.backward()
    return found.calls["_reduce_scatter_base_"]


def changes():
    """What a layer's user may do to it that needs the branches apart."""
    return {
        "hook": lambda layer: layer.mlp.register_forward_hook(lambda *_: None),
        "subclass": lambda layer: setattr(layer.attention, "dense", Doubled(layer.attention.dense)),
        "forward": lambda layer: setattr(layer.input_layernorm, "forward", layer.post_attention_layernorm.forward),
        "dropout": lambda layer: setattr(layer.post_attention_dropout, "p", 0.1),
    }


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


@distributed(world_size=2)
@pytest.mark.parametrize("change", sorted(changes()))
def test_a_changed_part_runs_as_it_was_changed(change):
    parallel_state.initialize_model_parallel(2)
    model = GPTNeoXForCausalLM(gpt_neox_config(), parallel=ParallelConfig(2, sequence_parallel_enabled=True))
    inputs = batch()
    model_parallel_manual_seed(0)
    merged = collectives_of(model, inputs)
    changes()[change](model.decoder_layers()[0])
    assert collectives_of(model, inputs) == merged + 2  # one more in forward, one more in backward


@distributed(world_size=2)
@pytest.mark.parametrize(("modules", "more"), [(["mlp"], 2), (["norm"], 0)], ids=str)
def test_selective_recompute_of_a_branch_takes_them_apart(modules, more):
    parallel_state.initialize_model_parallel(2)
    config, inputs = gpt_neox_config(), batch()
    parallel = ParallelConfig(2, sequence_parallel_enabled=True)
    plain = collectives_of(GPTNeoXForCausalLM(config, parallel=parallel), inputs)
    memory = MemoryConfig(recompute_granularity="selective", recompute_modules=tuple(modules))
    recomputed = collectives_of(GPTNeoXForCausalLM(config, parallel=parallel, memory=memory), inputs)
    assert recomputed == plain + more * config.num_hidden_layers
