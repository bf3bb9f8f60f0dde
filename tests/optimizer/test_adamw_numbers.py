"""AdamW whose learning rate and step are tensors: torch's results to the bit, and one graph for all steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nxd_memopt import trainer
from nxd_memopt.backends import backend
from nxd_memopt.ops.adamw import adamw_update, step_numbers
from nxd_memopt.optimizer import AdamW, AdamW_FP32OptimParams, NeuronZero1Optimizer
from tests.reference import tensors

BETAS, EPS = (0.9, 0.95), 1e-6
SHAPES = ((), (1,), (7, 3), (1000,))  # 0-dim, shorter and longer than a vector register
RATES = (0.1, 0.05, 1e-3, 0.2, 0.0, 3e-4)


@pytest.fixture
def compiled_scalars(monkeypatch):
    """This backend as one that compiles the numbers of an operation into its kernel."""
    monkeypatch.setattr(type(backend), "scalars_are_compiled", True)


class Recorded(TorchDispatchMode):
    """Operations with the arguments that a kernel could contain: everything but tensors and their values."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        described = [tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves]
        if not str(func).startswith("profiler"):
            self.operations.append((str(func), *described))
        return func(*args, **(kwargs or {}))


def with_gradients(params: list[nn.Parameter], step: int) -> None:
    for i, param in enumerate(params):
        if (step, i) != (2, 1):  # one parameter skips one step, and then counts another step than the others
            param.grad = tensors(*param.shape, seed=10 * step + i, dtype=param.dtype)
        else:
            param.grad = None


def trained(kind: Any, dtype: torch.dtype, **options: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    params = [nn.Parameter(tensors(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(SHAPES)]
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
    optimizer = kind(groups, betas=BETAS, eps=EPS, **options)
    for step, lr in enumerate(RATES, 1):
        for group in optimizer.param_groups:
            group["lr"] = lr
        with_gradients(params, step)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_results_and_states_are_torchs_to_the_bit(compiled_scalars, dtype):
    params, ours = trained(AdamW, dtype)
    expected, torchs = trained(torch.optim.AdamW, dtype, foreach=False)
    assert all(torch.equal(x, y) for x, y in zip(params, expected, strict=True))
    state, expected_state = ours.state_dict()["state"], torchs.state_dict()["state"]
    assert state.keys() == expected_state.keys()
    for i, values in expected_state.items():
        assert state[i].keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(state[i][name], value) and state[i][name].dtype == value.dtype
    torchs.load_state_dict(ours.state_dict())
    ours.load_state_dict(torchs.state_dict())


def test_a_bf16_parameter_is_updated_in_fp32_and_rounded_once():
    state = [tensors(1000, seed=i, dtype=torch.bfloat16) for i in range(2)]
    wide = nn.Parameter(state[0].float())
    wide.grad = state[1].float()
    options = {"lr": 0.03, "weight_decay": 0.1}  # 1 - 0.003 is 0.99609 in bf16
    torch.optim.AdamW([wide], betas=BETAS, eps=EPS, foreach=False, **options).step()
    param, mean, square = state[0].clone(), torch.zeros_like(state[0]), torch.zeros_like(state[0])
    adamw_update(param, state[1], mean, square, step_numbers(1, param, betas=BETAS, **options), betas=BETAS, eps=EPS)
    assert torch.equal(param, wide.detach().bfloat16())
    assert torch.equal(mean, (state[1].float() * (1 - BETAS[0])).bfloat16())


OPTIMIZERS = {
    "ours": AdamW,
    "fp32 states": AdamW_FP32OptimParams,
    "ZeRO-1 of torch's": lambda groups, **options: NeuronZero1Optimizer(groups, torch.optim.AdamW, **options),
    "the trainer's of torch's": lambda groups, **options: trainer.initialize_parallel_optimizer(
        trainer.neuronx_distributed_config(optimizer_config={"zero_one_enabled": False}),
        torch.optim.AdamW,
        groups,
        **options,
    ),
}


def recorded_steps(kind: Any) -> list[list[tuple[Any, ...]]]:
    """Operations of each step, under a learning rate that changes; one step without a schedule comes first."""
    params = [nn.Parameter(tensors(5, 3, seed=i, dtype=torch.float32)) for i in range(2)]
    optimizer = kind([{"params": params, "weight_decay": 0.1}], lr=0.5, betas=BETAS, eps=EPS)
    steps = []
    for step, lr in enumerate((0.5, *RATES), 1):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for param in params:
            param.grad = tensors(5, 3, seed=step, dtype=torch.float32)
        with Recorded() as recorded:
            optimizer.step()
        steps.append(recorded.operations)
    return steps[1:]  # the first makes the states


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_step_and_no_learning_rate_has_kernels_of_its_own(compiled_scalars, name):
    first, *others = recorded_steps(OPTIMIZERS[name])
    assert len(first) > 20  # the update itself was seen
    assert all(operations == first for operations in others)


BETA_TENSORS = {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False}


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"fused": True}, BETA_TENSORS], ids=str)
def test_other_forms_are_torchs(compiled_scalars, options):
    found, expected = [nn.Parameter(tensors(7, 3)) for _ in range(2)]
    for kind, param in ((AdamW, found), (torch.optim.AdamW, expected)):
        optimizer = kind([param], lr=0.1, **options)
        for step in range(3):
            param.grad = tensors(7, 3, seed=step)
            optimizer.step()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("is_compiled", "expected"), [(False, torch.optim.AdamW), (True, AdamW)])
def test_torchs_adamw_is_ours_where_numbers_are_compiled(monkeypatch, is_compiled, expected):
    monkeypatch.setattr(type(backend), "scalars_are_compiled", is_compiled)
    param = nn.Parameter(torch.ones(2))
    assert type(NeuronZero1Optimizer([param], torch.optim.AdamW, lr=1.0).base_optimizer) is expected
    assert type(NeuronZero1Optimizer([param], torch.optim.SGD, lr=1.0).base_optimizer) is torch.optim.SGD
