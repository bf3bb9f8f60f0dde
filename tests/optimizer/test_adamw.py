"""AdamW_FP32OptimParams against the formula in float64, and its moments' dtype through a resume."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nxd_memopt.optimizer import AdamW_FP32OptimParams
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
