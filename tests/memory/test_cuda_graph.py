"""GraphedLoss around a played recording, which does on the CPU what a CUDA graph does: gradients of eager passes."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.memory import GraphedLoss
from nxd_memopt.memory.cuda_graph import WARM_UP_CALLS, _hooks_disabled
from nxd_memopt.optimizer import OptimizerInBackward


class PlayedGraph:
    """Replays by running again, into the memory that the recording had; recording leaves no values."""

    recorded = 0

    def __init__(self, function, parameters) -> None:
        PlayedGraph.recorded += 1
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        self.result = function()
        self._parameters, self._function = parameters, function
        self._grads, self._adds = [p.grad for p in parameters], any(grad is not None for grad in before)
        for parameter, value in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(torch.full_like(parameter, torch.nan) if value is None else value)

    def replay(self) -> None:
        now = [p.grad for p in self._parameters]
        for parameter, static in zip(self._parameters, self._grads, strict=True):
            parameter.grad = static if self._adds else None
        with _hooks_disabled(self._parameters):
            loss = self._function()
        for static, parameter, grad in zip(self._grads, self._parameters, now, strict=True):
            if static is not None and parameter.grad is not None and static is not parameter.grad:
                static.data.copy_(parameter.grad)  # which no version counts
            parameter.grad = grad
        self.result.copy_(loss)


@pytest.fixture
def graphed(monkeypatch):
    """A model, its twin, and the graphed loss of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    twin = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model.unused = twin.unused = nn.Linear(1, 1)
    twin.load_state_dict(model.state_dict())
    parameters = list(model.parameters())
    PlayedGraph.recorded = 0
    monkeypatch.setattr(backend, "capture_refusal", lambda: None)
    monkeypatch.setattr(backend, "capture", lambda function, pool_of: PlayedGraph(function, parameters))
    return model, twin, GraphedLoss(parameters, lambda x: model[1](model[0](x)).square().mean())


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in (*model[0].parameters(), *model[1].parameters())]


def eager(twin, x):
    loss = twin[1](twin[0](x)).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_equals_eager_passes(graphed, micro_batches, set_to_none):
    model, twin, step = graphed
    kept = []
    for i in range(6):
        for j in range(micro_batches):
            x = torch.randn(5 if (i + j) % 3 else 7, 4)  # two shapes
            kept.append((step(x), eager(twin, x)))
        for found, expected in zip(gradients(model), gradients(twin), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        model.zero_grad(set_to_none=set_to_none)
        twin.zero_grad(set_to_none=set_to_none)
    assert all(torch.equal(*losses) for losses in kept)  # also those of earlier calls
    assert PlayedGraph.recorded


def test_gradients_of_other_origin_are_added_to(graphed):
    model, twin, step = graphed
    x = torch.randn(5, 4)
    for _ in range(WARM_UP_CALLS + 1):
        step(x)
        model.zero_grad()
    for each in (model, twin):
        eager(each, 2 * x)
    each_grad = model[0].weight.grad
    model[1].bias.grad = twin[1].bias.grad = None
    step(x)
    eager(twin, x)
    assert model[0].weight.grad is not each_grad
    for found, expected in zip(gradients(model), gradients(twin), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert PlayedGraph.recorded == 2


def test_replays_count_as_writes(graphed):
    """The hook that sums gradients over sequence shards sums those again that were written to."""
    model, _, step = graphed
    versions = []
    for _ in range(6):
        step(torch.ones(5, 4))
        versions.append(model[0].weight.grad._version)
        model.zero_grad()
    assert versions[3] < versions[4] < versions[5]


def test_hooks_on_complete_gradients_run(graphed):
    model, twin, step = graphed
    optimizers = [OptimizerInBackward(torch.optim.SGD(each[:2].parameters(), lr=0.1)) for each in (model, twin)]
    for _ in range(5):
        x = torch.randn(5, 4)
        assert torch.equal(step(x), eager(twin, x))
        for optimizer in optimizers:
            optimizer.step()
    assert PlayedGraph.recorded == 1
    assert all(torch.equal(a, b) for a, b in zip(model[:2].parameters(), twin[:2].parameters(), strict=True))


def test_dropout_is_refused(graphed):
    model = graphed[0]
    step = GraphedLoss(model.parameters(), lambda x: torch.dropout(model[0](x), 0.5, train=True).sum())
    with pytest.raises(RuntimeError, match="draws random numbers"):
        step(torch.ones(2, 4))


def test_each_shape_reaches_parameters_of_its_own(graphed):
    model, twin, _ = graphed

    def loss_by(each):
        return lambda x: (each[1](each[0](x)) if len(x) == 5 else each.unused(x[:, :1])).square().mean()

    step, eager_loss = GraphedLoss(model.parameters(), loss_by(model)), loss_by(twin)
    for i in range(14):
        x = torch.randn(5 if i % 3 else 7, 4)
        eager_loss(x).backward()
        step(x)
        for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-6, atol=1e-7)
        if i % 4 != 1:
            model.zero_grad()
            twin.zero_grad()


@pytest.mark.parametrize(
    "error", [RuntimeError("not while recording"), torch.OutOfMemoryError("no memory"), KeyError()]
)
@pytest.mark.parametrize("adds", [False, True])
def test_a_recording_that_fails_leaves_gradients_alone(graphed, monkeypatch, error, adds):
    model, _, step = graphed
    x = torch.randn(5, 4)
    for _ in range(WARM_UP_CALLS):
        step(x)
        model.zero_grad()
    if adds:
        eager(model, x)
        model[1].bias.grad = None
    before = [p.grad for p in model.parameters()]

    def failing(function, pool_of):
        function()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(backend, "capture", failing)
        message = "cannot be recorded.*not while recording" if type(error) is RuntimeError else None
        with pytest.raises(type(error), match=message):
            step(x)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


def test_a_recording_that_reaches_other_parameters_is_refused(graphed):
    model, _, _ = graphed
    calls = []

    def loss_of(x):
        calls.append(x)
        hidden = model[0](x) if len(calls) > WARM_UP_CALLS else model[0](x).detach()
        return model[1](hidden).square().mean()

    step, x = GraphedLoss(model.parameters(), loss_of), torch.ones(5, 4)
    for _ in range(WARM_UP_CALLS):
        step(x)
        model.zero_grad()
    with pytest.raises(RuntimeError, match="gives gradients to other parameters than the first calls"):
        step(x)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("given", "around", "message"),
    [
        (torch.ones(5, 4, device="meta"), nullcontext, "must be on cpu"),
        (torch.ones(5, 4, requires_grad=True), nullcontext, "require no gradient"),
        (torch.ones(5, 4), torch.no_grad, "call loss_of itself"),
        (torch.ones(5, 4), partial(torch.autocast, "cpu"), "put it inside loss_of"),
    ],
)
def test_calls_that_a_replay_would_not_follow_are_refused(graphed, given, around, message):
    with around(), pytest.raises(ValueError, match=message):
        graphed[2](given)


def test_gradients_that_would_be_lost_are_refused(graphed):
    model, _, step = graphed
    x = torch.ones(5, 4)
    some = GraphedLoss(model[1].parameters(), lambda x: model[1](model[0](x)).sum())
    with pytest.raises(ValueError, match=r"2 tensors that are not among the parameters, the first of shape \[3"):
        some(x)
    step(x)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen or released"):
        step(x)


def test_parameters_that_moved_are_refused(graphed):
    model, _, step = graphed
    x = torch.ones(5, 4)
    for _ in range(WARM_UP_CALLS):
        step(x)
        model[0].bias.data = model[0].bias.data.clone()  # nothing is recorded yet
    step(x)
    model[0].bias.data = model[0].bias.data.clone()
    with pytest.raises(ValueError, match="copy into them instead"):
        step(x)


@pytest.mark.skipif(backend.name == "cuda", reason="NVIDIA GPUs record graphs")
def test_a_device_without_graphs_is_refused():
    with pytest.raises(ValueError, match=f"needs an NVIDIA GPU, and the backend is {backend.name}"):
        GraphedLoss(nn.Linear(4, 3).parameters(), torch.sum)
