"""The optimizer inside backward: the parameters of the plain loop, and never two gradients at a time."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.optimizer import AdamW, OptimizerInBackward
from nxd_memopt.parallel_layers import grads, parallel_state
from tests.dist.pool import distributed
from tests.reference_models import batch, gpt_neox_config, llama_config, parallel_model

STEPS = 4
OPTIMIZERS = {
    "adamw": lambda groups: AdamW(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9),
}


def groups(model) -> list[dict]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]


def trained(config, optimizer_name, *, in_backward: bool, **options):
    torch.manual_seed(3)
    model = parallel_model(config, **options)
    optimizer = OPTIMIZERS[optimizer_name](groups(model))
    if in_backward:
        optimizer = OptimizerInBackward(optimizer)
    for step in range(STEPS):
        for group in optimizer.param_groups:  # a schedule
            group["lr"] *= 0.9
        if in_backward and step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        model(**batch()).loss.backward()
        if not in_backward:
            grads.allreduce_sequence_parallel_gradients(model)
            grads.bucket_allreduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_equals_the_plain_loop(config, optimizer):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    options = {"sequence_parallel": size > 1, "recompute_granularity": "full"}
    expected = trained(config(), optimizer, in_backward=False, **options)
    found = trained(config(), optimizer, in_backward=True, **options)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@distributed(world_size=2)
def test_averages_over_data_parallel_ranks():
    parallel_state.initialize_model_parallel(1)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = OptimizerInBackward(torch.optim.SGD([weight], lr=1.0))
    (weight * (dist.get_rank() + 1.0)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), -1.5))


@distributed(world_size=1)
def test_gradients_never_coexist_and_misuse_is_an_error():
    parallel_state.initialize_model_parallel(1)
    model = parallel_model(llama_config())
    params, alive = list(model.parameters()), []
    for param in params:  # before the optimizer's own hook
        param.register_post_accumulate_grad_hook(lambda _: alive.append(sum(p.grad is not None for p in params)))
    optimizer = OptimizerInBackward(AdamW(params, lr=1e-2))
    with pytest.raises(RuntimeError, match="call backward"):
        optimizer.step()
    loss = model(**batch()).loss
    loss.backward()
    assert len(alive) == len(params) and max(alive) == 1 and not any(p.grad is not None for p in params)
    with pytest.raises(RuntimeError, match="second gradient"):
        model(**batch()).loss.backward()
    optimizer.step()
    optimizer.remove()
    model(**batch()).loss.backward()
    assert all(p.grad is not None for p in params)
    with pytest.raises(ValueError, match="a gradient"):
        OptimizerInBackward(AdamW(params, lr=1e-2))


def test_neither_keeps_the_other_alive():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = OptimizerInBackward(torch.optim.SGD([weight], lr=0.5))
    weight.sum().backward()
    assert weight.grad is None and weight.tolist() == [0.5] * 3
    del optimizer
    gc.collect()
    weight.sum().backward()
    assert weight.tolist() == [0.5] * 3 and weight.grad is not None and weight.grad.tolist() == [1.0] * 3

    model = torch.nn.Linear(2, 2)
    optimizer, alive = OptimizerInBackward(torch.optim.SGD(model.parameters(), lr=0.5)), weakref.ref(model.weight)
    model(torch.ones(2)).sum().backward()
    del optimizer, model
    gc.collect()
    assert alive() is None
