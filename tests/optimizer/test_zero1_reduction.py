"""The first half of a step on one rank: what a second call, a late backward and an infinite gradient do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_memopt.optimizer import AdamW, LossScaler, NeuronZero1Optimizer
from nxd_memopt.optimizer.offloaded_zero1 import OffloadedZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from tests.deferred_transfers import DeferredTransfers

SCALE = 2.0**10


@pytest.fixture(autouse=True)
def one_rank() -> None:
    parallel_state.initialize_model_parallel()


def offloaded(params: list[nn.Parameter], **options: Any) -> OffloadedZero1Optimizer:
    return OffloadedZero1Optimizer(params, transfers=DeferredTransfers(), resident_elements=1, **options)


def resident(params: list[nn.Parameter], **options: Any) -> NeuronZero1Optimizer:
    return NeuronZero1Optimizer(params, AdamW, **options)


def backward(param: nn.Parameter, scaler: LossScaler | None = None) -> None:
    loss = (3 * param).float().sum()
    (scaler.scale_gradients_of(loss) if scaler else loss).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_hook", [True, False])
def test_a_second_call_changes_nothing(dtype: torch.dtype, has_hook: bool) -> None:
    """Gradients of the optimizer's dtype are unscaled and clipped in place: once."""
    norms: list[float] = []
    moments: list[Tensor] = []
    for calls in (0, 1, 2):
        param = nn.Parameter(torch.ones(8, dtype=dtype))
        scaler = LossScaler(initial_scale=SCALE)
        options = {"lr": 0.1, "max_norm": 2.0, "loss_scaler": scaler, "use_grad_acc_hook": has_hook}
        optimizer = resident([param], **options)
        for _ in range(2):
            backward(param, scaler)
            for _ in range(calls):
                optimizer.reduce_gradients()
            optimizer.step()
            assert optimizer.grad_norm is not None
            norms.append(optimizer.grad_norm.item())
            optimizer.zero_grad()
        moments.append(optimizer.base_optimizer.state[optimizer.stored_parameters()[0].stored]["exp_avg"].clone())
    assert norms == pytest.approx([3 * math.sqrt(8)] * 6, rel=1e-6)  # fp32 rounding
    assert torch.equal(moments[1], moments[0])
    assert torch.equal(moments[2], moments[0])


def test_a_backward_after_clipping_is_an_error() -> None:
    param = nn.Parameter(torch.ones(8))
    optimizer = resident([param], lr=0.1, max_norm=1.0)
    backward(param)
    optimizer.reduce_gradients()
    backward(param)
    with pytest.raises(RuntimeError, match=r"1 of 1 gradients were written to after reduce_gradients\(\)"):
        optimizer.step()
    # A step that is left out, and gradients that another library has released.
    optimizer.zero_grad()
    backward(param)
    optimizer.reduce_gradients()
    param.grad = None
    backward(param)
    backward(param)
    assert optimizer.reduce_gradients().item() == pytest.approx(6 * math.sqrt(8), rel=1e-6)  # fp32 rounding


@pytest.mark.parametrize("new_optimizer", [resident, offloaded])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1.5e19])
def test_without_clipping_a_gradient_changes_its_own_element_alone(new_optimizer: Any, value: float) -> None:
    """Two squares of 1.5e19 are each within the range of fp32, and their sum is not."""
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    optimizer = new_optimizer(params, lr=0.1, weight_decay=0.0, grad_clipping=False)
    params[0].grad = torch.tensor([1.0, 2.0, value, value])
    params[1].grad = torch.ones(3)
    optimizer.step()
    # The first step of Adam is lr times the sign of the gradient, to fp32's rounding and eps 1e-8.
    expected = [0.9] * 5 + [0.9 if math.isfinite(value) else math.nan] * 2
    found = [*params[0].tolist()[:2], *params[1].tolist(), *params[0].tolist()[2:]]
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert optimizer.grad_norm is not None
    assert not optimizer.grad_norm.isfinite()
