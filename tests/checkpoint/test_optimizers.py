"""Optimizers in training checkpoints: wrappers, states of any name and kind, options of another device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nxd_memopt import trainer
from nxd_memopt.checkpoint import BackgroundSaver, TrainingState, load_training_state, save_training_state
from nxd_memopt.optimizer import NeuronZero1Optimizer
from tests.reference import error_message

Optimizer = torch.optim.Optimizer


class States(torch.optim.SGD):
    """SGD that keeps ``values``, called with the parameter, as its states."""

    def __init__(self, params, values):
        super().__init__(params, lr=0.1)
        self.values = values

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update({name: value(param) for name, value in self.values.items()})


def backward(model: nn.Linear) -> None:
    model(torch.ones(2, 4, dtype=model.weight.dtype)).float().square().sum().backward()


def stepped(build, dtype=torch.float32, steps=1) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    optimizer = build(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return model, optimizer


def save(directory, model, optimizer) -> None:
    save_training_state(directory, 1, state=TrainingState(model, optimizer), config={})


def load(directory, model, optimizer):
    return load_training_state(directory, state=TrainingState(model, optimizer), config={})


def initialized(zero_one: bool, masters: bool):
    config = trainer.neuronx_distributed_config(
        optimizer_config={"zero_one_enabled": zero_one},
        mixed_precision_config={"use_master_weights": masters, "use_master_weights_in_ckpt": masters},
    )
    return lambda params: trainer.initialize_parallel_optimizer(config, torch.optim.AdamW, params, lr=0.1)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(("zero_one", "masters"), [(True, True), (False, True), (False, False)])
def test_a_wrapped_optimizer_resumes_exactly(zero_one, masters, in_background, tmp_path):
    """Masters, moments and steps of NxDOptimizer are those of the optimizer inside of it."""
    build = initialized(zero_one, masters)
    model, optimizer = stepped(build, torch.bfloat16, steps=3)
    if in_background:
        with BackgroundSaver(tmp_path) as saver:
            saver.save(1, TrainingState(model, optimizer), {})
    else:
        save(tmp_path, model, optimizer)
    other, resumed = stepped(build, torch.bfloat16, steps=1)
    assert load(tmp_path, other, resumed).notes == []
    for each, into in ((model, optimizer), (other, resumed)):
        into.zero_grad()
        backward(each)
        into.step()
    assert torch.equal(model.weight, other.weight)
    inner = getattr(resumed.optimizer, "base_optimizer", resumed.optimizer)
    assert all(state["step"] == 4 for state in inner.state.values()) and len(inner.state) == 2


class Wrapper(Optimizer):
    """An optimizer around another one, under an attribute of any name."""

    def __init__(self, inner: Optimizer, name: str) -> None:
        super().__init__(inner.param_groups, {})
        setattr(self, name, inner)
        self._step = inner.step

    def step(self, closure=None):
        return self._step(closure)


class Delegating(Optimizer):
    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self._parts = {"inner": inner}

    def step(self, closure=None):
        return self._parts["inner"].step(closure)

    def state_dict(self):
        return self._parts["inner"].state_dict()


def test_states_that_cannot_be_found_are_refused(tmp_path):
    adamw = torch.optim.AdamW
    for build in (lambda params: Wrapper(adamw(params), "inner"), lambda params: Delegating(adamw(params))):
        message = error_message(lambda build=build: save(tmp_path, *stepped(build)))
        assert "has 2 parameters and its attribute 'state' is empty" in message
    save(tmp_path, *stepped(lambda params: Wrapper(adamw(params), "optimizer")))
    model, optimizer = stepped(adamw)
    optimizer.state[torch.zeros(7)] = {"exp_avg": torch.zeros(7)}
    assert "1 of 3 states that are of none of its parameters" in error_message(lambda: save(tmp_path, model, optimizer))
    save(tmp_path, *stepped(torch.optim.SGD))  # has no states
    save(tmp_path, *stepped(lambda params: Wrapper(adamw(params), "inner"), steps=0))


@pytest.mark.parametrize("name", ["master", "a.b", 0])
def test_names_that_would_not_load_are_refused_at_the_save(name, tmp_path):
    def build(params):
        return States(params, {name: torch.ones_like})

    assert f"optimizer state {name!r} of" in error_message(lambda: save(tmp_path, *stepped(build)))
    assert not list(tmp_path.glob("step_00000001"))


def test_tensors_inside_of_other_states_are_refused(tmp_path):
    def build(params, value):
        return States(params, {"history": value})

    for value in (lambda param: [param], lambda param: {"old": (1, param)}):
        message = error_message(lambda value=value: save(tmp_path, *stepped(lambda params: build(params, value))))
        assert "optimizer state 'history' of weight" in message and "keep it as a state with a name" in message
    model, optimizer = stepped(lambda params: build(params, lambda param: [1, {"x": 0.5}]))
    save(tmp_path, model, optimizer)
    optimizer.state.clear()
    load(tmp_path, model, optimizer)
    assert optimizer.state[model.weight] == {"history": [1, {"x": 0.5}]}


@pytest.mark.parametrize("zero1", [False, True])
def test_options_of_the_device_are_those_of_the_resumed_run(zero1, tmp_path):
    """A GPU's run may have capturable and a tensor as learning rate; on a CPU torch refuses to step with them."""

    def build(params):
        return NeuronZero1Optimizer(params, torch.optim.AdamW, lr=0.1) if zero1 else torch.optim.AdamW(params, lr=0.1)

    model, optimizer = stepped(build)
    for group in optimizer.param_groups:
        group.update(capturable=True, fused=True, foreach=False, lr=torch.tensor(0.25), weight_decay=0.125)
    save(tmp_path, model, optimizer)
    resumed = build(model.parameters())
    load(tmp_path, model, resumed)
    for group in resumed.param_groups:
        assert (group["lr"], group["weight_decay"]) == (0.25, 0.125) and isinstance(group["lr"], float)
        assert not group.get("capturable") and not group.get("fused") and group.get("foreach") is None
    backward(model)
    resumed.step()
    for group in resumed.param_groups:
        group["lr"] = torch.tensor(9.0)
    load(tmp_path, model, resumed)
    assert all(torch.equal(group["lr"], torch.tensor(0.25)) for group in resumed.param_groups)
