"""Both AdamW on a CPU: the formula in float64, moments' dtype through a resume, closures and hooks of torch's step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nxd_memopt.optimizer import AdamW, AdamW_FP32OptimParams
from tests.reference import assert_says, error_message, tensors

OPTIONS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}


@pytest.mark.parametrize("correct_bias", [False, True])
def test_three_steps_follow_the_formula(correct_bias):
    param = nn.Parameter(tensors(7, 3))
    optimizer = AdamW_FP32OptimParams([param], correct_bias=correct_bias, **OPTIONS)
    want, mean, square = param.detach().clone(), torch.zeros(7, 3), torch.zeros(7, 3)
    mean, square = mean.double(), square.double()
    for step in range(1, 4):
        grad = tensors(7, 3, seed=step)
        param.grad = grad.clone()
        optimizer.step()
        mean, square = 0.8 * mean + 0.2 * grad, 0.95 * square + 0.05 * grad**2
        size = 0.1 * math.sqrt(1 - 0.95**step) / (1 - 0.8**step) if correct_bias else 0.1
        want = (want - size * mean / (square.sqrt() + 1e-3)) * (1 - 0.1 * 0.2)
    torch.testing.assert_close(param.detach(), want, rtol=1e-13, atol=1e-13)  # float64


def test_moments_stay_fp32_through_a_resume_of_bf16_parameters():
    def run(param, optimizer, steps):
        for step in steps:
            param.grad = tensors(50, seed=step, dtype=torch.bfloat16)
            optimizer.step()

    straight = nn.Parameter(tensors(50, dtype=torch.bfloat16))
    optimizer = AdamW_FP32OptimParams([straight], **OPTIONS)
    run(straight, optimizer, range(3))
    resumed = nn.Parameter(straight.detach().clone())
    other = AdamW_FP32OptimParams([resumed], lr=1.0)
    other.load_state_dict(optimizer.state_dict())
    assert {value.dtype for name, value in other.state[resumed].items() if name != "step"} == {torch.float32}
    run(straight, optimizer, range(3, 6))
    run(resumed, other, range(3, 6))
    assert torch.equal(resumed, straight)


def test_refusals():
    def build(**options):
        return AdamW_FP32OptimParams([nn.Parameter(torch.zeros(2))], **options)

    assert_says(error_message(lambda: build(lr=-1.0)), "lr -1.0", "at least 0")
    assert_says(error_message(lambda: build(betas=(0.9, 1.0))), "(0.9, 1.0)", "below 1")
    assert_says(error_message(lambda: build(capturable=True)), "capturable", "False")


@pytest.mark.parametrize("correct_bias", [False, True])
def test_a_tensor_learning_rate_is_read_only(correct_bias):
    params = [nn.Parameter(tensors(7, 3)) for _ in range(2)]
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizers = [
        AdamW_FP32OptimParams([param], correct_bias=correct_bias, **{**OPTIONS, "lr": lr})
        for param, lr in zip(params, (0.1, rate), strict=True)
    ]
    for step in range(1, 4):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = tensors(7, 3, seed=step)
            optimizer.step()
    assert rate.item() == 0.1
    torch.testing.assert_close(params[1], params[0], rtol=1e-13, atol=1e-13)  # float64


def test_closures_and_hooks_are_called_once_as_by_torch():
    params = [nn.Parameter(tensors(5, 3)) for _ in range(2)]
    calls: list[str] = []
    for kind, param in zip((AdamW, torch.optim.AdamW), params, strict=True):
        optimizer = kind([param], lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("behind"))

        def closure(param=param, optimizer=optimizer):
            optimizer.zero_grad()
            loss = param.square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert losses[0] > losses[1] > losses[2]
    assert calls == ["before", "behind"] * 6
    assert torch.equal(*params)


def test_hooks_run_once_beside_an_optimizer_of_torchs():
    torch.optim.AdamW([nn.Parameter(torch.ones(2))])  # makes torch call hooks in its own step
    param, calls = nn.Parameter(torch.ones(2)), []
    optimizer = AdamW([param])
    optimizer.register_step_post_hook(lambda *_: calls.append("behind"))
    optimizer.step()  # without a gradient
    assert torch.equal(param, torch.ones(2))
    param.grad = torch.ones(2)
    optimizer.step()
    assert calls == ["behind"] * 2 and param[0] < 1
