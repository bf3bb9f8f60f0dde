"""torch.compile of layers over ranks: no graph break inside a layer, and the results of eager."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition

from nxd_memopt.backends import backend
from nxd_memopt.memory import apply_memory
from nxd_memopt.optimizer import OptimizerInBackward
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.overlapped_grads import OverlappedGradientReduction
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message
from tests.reference_models import batch, gpt_neox_config, llama_config, parallel_model

LENGTH, ROWS = 12, 3
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
CONFIGS = {"llama": llama_config, "gpt_neox": gpt_neox_config}
RECOMPUTE = {
    "none": {},
    "full": {"recompute_granularity": "full"},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "norm")},
}


def passes(layer, forward, hidden, rope) -> list[torch.Tensor]:
    hidden = hidden.detach().requires_grad_()
    layer.zero_grad()
    output = forward(hidden, rope, None)
    output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
    return [output.detach(), hidden.grad, *(param.grad.clone() for param in layer.parameters())]


@distributed(world_size=2, slow=[1])
@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("gpt_neox", "selective"),
        pytest.param("gpt_neox", "none", marks=pytest.mark.slow),
        *(pytest.param("llama", recompute, marks=pytest.mark.slow) for recompute in RECOMPUTE),
    ],
)
def test_a_layer_is_one_graph(name, recompute):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    for sequence_parallel in [False, True][:size]:
        torch._dynamo.reset()
        config = CONFIGS[name]()
        model = parallel_model(config, sequence_parallel=sequence_parallel, **RECOMPUTE[recompute])
        shape = (LENGTH // size, ROWS) if sequence_parallel else (ROWS, LENGTH)
        hidden = torch.randn(*shape, config.hidden_size, generator=torch.Generator().manual_seed(dist.get_rank()))
        rope = model.rope.tables(torch.arange(LENGTH).unsqueeze(0), LENGTH, torch.float32)
        layer = model.decoder_layers()[0]
        compiled = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")  # raises at a graph break
        for found, expected in zip(
            passes(layer, compiled, hidden, rope), passes(layer, layer.forward, hidden, rope), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@distributed(world_size=2)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_models_graph_breaks_do_not_grow_with_its_layers(name):
    """Outside the graphs are the CPU's checks of ids and labels, and the fused loss, which lays out memory by hand."""
    parallel_state.initialize_model_parallel(2)
    breaks, inputs = [], batch()
    for num_layers in (2, 4):
        torch._dynamo.reset()
        counters.clear()
        config = CONFIGS[name](num_hidden_layers=num_layers)
        model = parallel_model(config, sequence_parallel=True, recompute_granularity="full")
        expected = model(**inputs).loss
        found = torch.compile(model, backend="aot_eager")(**inputs).loss
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        breaks.append(sum(counters["graph_break"].values()))
    assert breaks[0] == breaks[1], dict(counters["graph_break"])
    assert all("Tensor.item()" in reason or "torch.compiler.disable" in reason for reason in counters["graph_break"])


@contextmanager
def counted_graphs() -> Iterator[Counter[str]]:
    """Collectives in the forward and backward graphs that are made inside; Inductor generates no code."""
    found: Counter[str] = Counter()

    def count(graph: torch.fx.GraphModule, inputs):
        del inputs
        for node in graph.graph.nodes:
            name = str(node.target)
            found.update(kind for kind in COLLECTIVES if name.startswith(f"_c10d_functional.{kind}"))
        return make_boxed_func(graph.forward)

    compile = torch.compile
    compiler = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    torch.compile = lambda function, **options: compile(function, **options, backend=compiler)
    try:
        yield found
    finally:
        torch.compile = compile


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Collectives that the backend starts inside."""
    found: Counter[str] = Counter()
    kinds = {"all_reduce_async": "all_reduce", "all_reduce": "all_reduce", "all_gather_async": "all_gather"}
    kinds |= {"reduce_scatter_async": "reduce_scatter"}
    originals = {method: getattr(backend, method) for method in kinds}

    def counting(method: str, tensor, group, *args, **kwargs):
        found[kinds[method]] += backend.group_size(group) > 1
        return originals[method](tensor, group, *args, **kwargs)

    for method in kinds:
        setattr(backend, method, functools.partial(counting, method))
    try:
        yield found
    finally:
        for method in kinds:
            delattr(backend, method)


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_collectives_of_a_compiled_layer(name):
    """GPT-NeoX's branches stay merged: what is compiled must not take another path, nor leave a collective out."""
    parallel_state.initialize_model_parallel(2)
    config = CONFIGS[name](num_hidden_layers=1)
    model = parallel_model(config, sequence_parallel=True)
    layer = model.decoder_layers()[0]
    rope = model.rope.tables(torch.arange(LENGTH).unsqueeze(0), LENGTH, torch.float32)
    hidden = torch.randn(LENGTH // 2, ROWS, config.hidden_size)
    with counted_calls() as eager:
        passes(layer, layer, hidden, rope)
    eager = +eager  # without zeros
    with counted_graphs() as compiled:
        apply_memory(model, model.memory, compile="layer")
        passes(layer, layer, hidden, rope)
    expected = {"llama": {"all_gather": 6, "reduce_scatter": 4}, "gpt_neox": {"all_gather": 3, "reduce_scatter": 2}}[
        name
    ]
    assert eager == expected
    # The graph keeps the gathered input of a column-parallel layer for backward, which eagerly gathers it again.
    gathered_again = {"llama": 2, "gpt_neox": 1}[name]
    assert compiled == {**expected, "all_gather": expected["all_gather"] - gathered_again}


def trained(config, kind: str, dtype: torch.dtype, *, compile: bool) -> list[torch.Tensor]:
    """Parameters after four passes in two steps of SGD."""
    torch.manual_seed(3)
    model = parallel_model(config, sequence_parallel=True, recompute_granularity="full").to(dtype)
    apply_memory(model, model.memory, compile="layer" if compile else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = OptimizerInBackward(optimizer) if kind == "in backward" else optimizer
    reduction = OverlappedGradientReduction(model, bucket_bytes=4096) if kind == "overlapped" else None
    for _ in range(2):
        if kind != "in backward":
            model(**batch(rows=2)).loss.backward()
        with nullcontext() if reduction is None else reduction.last_backward():
            model(**batch()).loss.backward()
        if kind == "plain":
            grads.allreduce_sequence_parallel_gradients(model)
        if kind != "in backward":
            grads.clip_grad_norm(model, 1.0)
        stepper.step()
        stepper.zero_grad()
    return [param.detach() for param in model.parameters()]


@distributed(world_size=2)
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), pytest.param(torch.bfloat16, id="bf16")],
)
@pytest.mark.parametrize(
    "kind", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("plain", "overlapped")), "in backward"]
)
def test_hooks_on_gradients_run_behind_compiled_layers(kind, dtype):
    parallel_state.initialize_model_parallel(2)
    expected = trained(gpt_neox_config(), kind, dtype, compile=False)
    with counted_graphs() as found:
        compiled = trained(gpt_neox_config(), kind, dtype, compile=True)
    assert found["reduce_scatter"] > 0
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]  # other orders of sums; one rounding of bf16
    for a, b in zip(compiled, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"attention_dropout": 0.1}, ["dropout 0.1", "attention.core_attn"]),
        ({"hidden_dropout": 0.2}, ["dropout 0.2", "post_attention_dropout"]),
    ],
)
def test_dropout_of_a_ranks_own_is_refused(changes, facts):
    parallel_state.initialize_model_parallel(2)
    model = parallel_model(gpt_neox_config(**changes), sequence_parallel=True)
    message = error_message(lambda: apply_memory(model, model.memory, compile="layer"))
    assert_says(message, "compile 'layer'", *facts, "set the model's dropout to 0, or compile to null")
