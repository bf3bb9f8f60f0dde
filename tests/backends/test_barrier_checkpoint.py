"""Recomputation behind a barrier: same values and gradients as without it, whatever the arguments and results are."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.backends.neuron.barrier_checkpoint import barrier_checkpoint
from nxd_memopt.parallel_layers import random


def run(function, *args, checkpointed, **kwargs):
    torch.manual_seed(3)
    return barrier_checkpoint(backend, function, *args, **kwargs) if checkpointed else function(*args, **kwargs)


def gradients(build, *, checkpointed):
    """Result of ``build(checkpointed)``, a list of results and leaves, after backward over the sum of results."""
    results, leaves = build(checkpointed)
    sum(result.sum() for result in results).backward()
    return [result.detach() for result in results] + [leaf.grad for leaf in leaves]


def nested_arguments(checkpointed):
    torch.manual_seed(0)
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    layer = nn.Linear(4, 4)

    def function(tensors, *, scale, ids):
        first, second = tensors
        hidden = torch.nn.functional.dropout(layer(first) * scale, 0.5)
        return {"a": hidden * second["y"], "b": (hidden[ids], "text")}

    out = run(function, (x, {"y": y}), scale=2.0, ids=torch.tensor([2, 0]), checkpointed=checkpointed)
    assert out["b"][1] == "text"
    return [out["a"], out["b"][0]], [x, y, *layer.parameters()]


def frozen_input(checkpointed):
    """Parameters inside get gradients though no argument asks for any."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    return [run(layer, x, checkpointed=checkpointed)], list(layer.parameters())


def unused_output(checkpointed):
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    first, _ = run(lambda t: (t.sin(), t.cos()), x, checkpointed=checkpointed)
    return [first], [x]


def one_inside_another(checkpointed):
    torch.manual_seed(0)
    x, layer = torch.randn(3, 4, requires_grad=True), nn.Linear(4, 4)

    def outer(t):
        inner = barrier_checkpoint(backend, layer, t.sin()) if checkpointed else layer(t.sin())
        return torch.nn.functional.dropout(inner, 0.3).tanh()

    return [run(outer, x, checkpointed=checkpointed)], [x, *layer.parameters()]


@pytest.mark.parametrize("build", [nested_arguments, frozen_input, unused_output, one_inside_another])
def test_equals_running_once(build):
    want, got = (gradients(build, checkpointed=checkpointed) for checkpointed in (False, True))
    for expected, found in zip(want, got, strict=True):
        assert torch.equal(expected, found)


def test_backward_leaves_the_random_state_alone():
    x = torch.randn(8, requires_grad=True)
    out = run(lambda t: torch.nn.functional.dropout(t, 0.5), x, checkpointed=True)
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x.grad, (out != 0) * 2.0), "the mask of backward is the forward pass's"


def test_streams_and_autocast_are_replayed():
    random.model_parallel_manual_seed(5)
    x, layer, dtypes = torch.randn(64, 8, requires_grad=True), nn.Linear(8, 8), []

    def function(t):
        with random.get_rng_tracker().fork():
            out = torch.nn.functional.dropout(layer(t), 0.5)
        dtypes.append(out.dtype)
        return out

    with torch.autocast("cpu", torch.bfloat16):
        out = barrier_checkpoint(backend, function, x, context_fn=random.replay_contexts)
    gradient = torch.ones_like(out)
    out.backward(gradient)
    assert dtypes == [torch.bfloat16, torch.bfloat16]
    expected = (out != 0).float().sum(0) * 2
    # bf16 sums of up to 64 twos are exact
    assert torch.equal(layer.bias.grad, expected)


def test_barrier_takes_saved_tensors_and_gradients(monkeypatch):
    seen = []

    def record(tensors):
        seen.append(list(tensors))
        return [tensor.clone() for tensor in tensors]

    monkeypatch.setattr(backend, "optimization_barrier", record)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    out = barrier_checkpoint(backend, lambda a, b: a * b, x, y)
    assert not seen, "the forward pass needs none"
    out.backward(torch.full((3,), 2.0))
    ((first, second, gradient),) = seen
    assert torch.equal(first, x) and torch.equal(second, y) and torch.equal(gradient, torch.full((3,), 2.0))


def test_nothing_but_inputs_is_saved():
    x, layer, saved = torch.randn(5, 4, requires_grad=True), nn.Linear(4, 4), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        barrier_checkpoint(backend, lambda t: layer(layer(t).relu()).exp(), x)
    assert saved == [x.shape]


@pytest.mark.parametrize(
    "derive",
    [
        lambda out, x: torch.autograd.grad(out.sum(), x),
        lambda out, x: out.sum().backward(inputs=[x]),
        lambda out, x: out.sum().backward(create_graph=True),
    ],
    ids=["grad", "inputs", "create_graph"],
)
def test_other_backward_passes_are_refused(derive):
    """Each would leave out second derivatives or add to ``layer.weight.grad`` unasked, without a word."""
    x, layer = torch.randn(3, 4, requires_grad=True), nn.Linear(4, 4)
    out = barrier_checkpoint(backend, layer, x)
    with pytest.raises(ValueError, match="recomputed regions"):
        derive(out, x)
    assert layer.weight.grad is None


def test_retained_graphs_run_again():
    x, layer = torch.randn(3, 4, requires_grad=True), nn.Linear(4, 4)
    out = barrier_checkpoint(backend, layer, x).square().sum()
    out.backward(retain_graph=True)
    once = layer.weight.grad.clone()
    out.backward()
    assert torch.equal(layer.weight.grad, 2 * once)


def test_results_that_hide_their_tensors_are_refused():
    """An object of another kind would come back without a history."""
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"must return tensors.*SimpleNamespace"):
        barrier_checkpoint(backend, lambda t: types.SimpleNamespace(hidden=t * 2), x)
