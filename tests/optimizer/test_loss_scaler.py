"""Tests the dynamic loss scale: its state machine against an independent one, unscaling, skipped steps, its state."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import nn

from nxd_memopt.optimizer import LossScaler, NeuronZero1Optimizer
from nxd_memopt.optimizer.loss_scaler import MAX_SCALE, MAX_SKIPS_AT_MIN_SCALE
from nxd_memopt.parallel_layers.loss_functions import fused_linear_cross_entropy, parallel_cross_entropy
from tests.reference import assert_says, error_message, tensors

SMALL: dict[str, Any] = {"initial_scale": 64.0, "min_scale": 0.5, "growth_interval": 3, "hysteresis": 2}


def step(scaler: LossScaler, overflow: bool) -> bool:
    scaler.unscale([torch.tensor([1.0, math.inf if overflow else 2.0])])
    return scaler.update()


def expected_scales(
    overflows: list[bool], *, initial: float, minimum: float, window: int, hysteresis: int
) -> list[float]:
    """The scale after each step, from the history alone: no state is carried from step to step.

    The rule as Megatron-LM states it: the scale doubles after ``window`` steps in a row without overflow, and halves at
    the ``hysteresis``-th overflow since it last doubled, and at each one after that.
    """
    scales = []
    scale, run_start, grown_at = initial, 0, 0
    for i, overflow in enumerate(overflows):
        if overflow:
            run_start = i + 1
            if sum(overflows[grown_at : i + 1]) >= hysteresis:
                scale = max(scale / 2, minimum)
        elif i + 1 - run_start == window:
            run_start = grown_at = i + 1
            scale *= 2
        scales.append(scale)
    return scales


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_scale_follows_the_rule(seed: int, hysteresis: int) -> None:
    draw = random.Random(seed)
    overflows = [draw.random() < (0.5 if i % 40 < 10 else 0.1) for i in range(200)]
    scaler = LossScaler(**SMALL | {"hysteresis": hysteresis, "min_scale": 2.0**-20})
    skipped, scales = [], []
    for overflow in overflows:
        skipped.append(step(scaler, overflow))
        scales.append(scaler.scale.item())
    assert skipped == overflows
    assert scales == expected_scales(overflows, initial=64.0, minimum=2.0**-20, window=3, hysteresis=hysteresis)
    assert scaler.skipped_steps == sum(overflows)


def test_repeated_overflow_at_the_smallest_scale_is_an_error() -> None:
    scaler = LossScaler(**SMALL | {"initial_scale": 1.0})
    step(scaler, True)  # 1.0 is kept by the hysteresis
    step(scaler, True)
    assert scaler.scale.item() == 0.5
    for _ in range(MAX_SKIPS_AT_MIN_SCALE - 1):
        step(scaler, True)
    step(scaler, False)  # the count starts again
    for _ in range(MAX_SKIPS_AT_MIN_SCALE - 1):
        step(scaler, True)
    assert scaler.scale.item() == 0.5
    with pytest.raises(
        ValueError, match=r"20 consecutive steps .* smallest loss scale 0.5: .* use precision bf16-mixed"
    ):
        step(scaler, True)


def test_the_scale_stops_growing_before_fp32_ends() -> None:
    scaler = LossScaler(initial_scale=MAX_SCALE / 2, growth_interval=1)
    for _ in range(3):
        step(scaler, False)
    assert scaler.scale.item() == MAX_SCALE


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_each_value_that_is_not_finite_is_found(bad: float) -> None:
    scaler = LossScaler(**SMALL)
    gradients = [torch.ones(3), torch.tensor([[1.0, bad]])]
    scaler.unscale(gradients)
    assert scaler.update()


def test_gradients_are_divided_by_the_scale_in_place() -> None:
    scaler = LossScaler(**SMALL)
    gradients = [tensors(3, 4, seed=1).float(), tensors(5, seed=2).float()]
    expected = [gradient / 64 for gradient in gradients]
    scaler.unscale(gradients)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    assert not scaler.update()
    with pytest.raises(RuntimeError, match="call unscale\\(\\) first"):
        scaler.update()


def test_a_restored_scaler_continues_exactly() -> None:
    draw = random.Random(0)
    overflows = [draw.random() < 0.3 for _ in range(60)]
    for cut in (0, 1, 2, 5, 17, 40):
        whole, first, second = (LossScaler(**SMALL | {"min_scale": 2.0**-20}) for _ in range(3))
        history = [(step(whole, overflow), whole.scale.item(), whole.state_dict()) for overflow in overflows]
        for overflow in overflows[:cut]:
            step(first, overflow)
        second.load_state_dict(first.state_dict())
        rest = [(step(second, overflow), second.scale.item(), second.state_dict()) for overflow in overflows[cut:]]
        assert rest == history[cut:], cut


def resumed(**changes: Any) -> LossScaler:
    """A scaler of other options in the state of one whose scale is 16, after 5 finite steps of an interval of 100."""
    saved = LossScaler(initial_scale=16.0, min_scale=0.5, growth_interval=100, hysteresis=3)
    for _ in range(5):
        step(saved, False)
    options: dict[str, Any] = {"initial_scale": 64.0, "min_scale": 0.5, "growth_interval": 100, "hysteresis": 3}
    scaler = LossScaler(**options | changes)
    scaler.load_state_dict(saved.state_dict())
    return scaler


def test_options_that_change_at_a_resume_hold_from_then_on() -> None:
    # 6 steps in a row are more than the interval: counting to exactly 4 would never end
    scaler = resumed(growth_interval=4)
    step(scaler, False)
    assert scaler.scale.item() == 32.0
    # an overflow never raises the scale
    scaler = resumed(min_scale=32.0, hysteresis=1)
    assert scaler.scale.item() == 32.0
    step(scaler, True)
    assert scaler.scale.item() == 32.0
    # the first overflow lowers the scale at once
    scaler = resumed(hysteresis=1)
    step(scaler, True)
    assert scaler.scale.item() == 8.0


@pytest.mark.parametrize(
    "options", [{"initial_scale": math.nan}, {"min_scale": 2.0**40}, {"growth_interval": 0}, {"hysteresis": 0}]
)
def test_bad_options_are_errors(options: dict[str, Any]) -> None:
    assert_says(error_message(lambda: LossScaler(**options)), *options)


def test_a_damaged_state_is_an_error() -> None:
    state = LossScaler().state_dict()
    for damaged in (state | {"scale": 0.0}, state | {"scale": math.nan}):
        assert_says(error_message(lambda damaged=damaged: LossScaler().load_state_dict(damaged)), "loss scaler's state")


def test_a_step_of_fp16_parameters_is_that_of_fp32_with_the_unscaled_gradient() -> None:
    """Clipping sees the gradient without the scale: with it, the norm would be 1000 times larger."""
    start = tensors(6, 4, seed=3).half()
    gradient = tensors(6, 4, seed=4).half() / 8
    half, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    scaler = LossScaler(initial_scale=1024.0)
    optimizer = NeuronZero1Optimizer(
        [half], torch.optim.AdamW, max_norm=0.5, use_grad_acc_hook=True, loss_scaler=scaler, lr=0.1
    )
    scaler.scale_gradients_of((half.float() * gradient.float()).sum()).backward()
    optimizer.step()
    wide.grad = gradient.float()
    norm = nn.utils.clip_grad_norm_([wide], 0.5)
    reference = torch.optim.AdamW([wide], lr=0.1)
    reference.step()
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-6, atol=0)  # fp32 sum of 24 squares
    master = optimizer.base_optimizer.param_groups[0]["params"][0]
    torch.testing.assert_close(master.detach(), wide.detach(), rtol=1e-6, atol=1e-7)  # fp32 rounding of Adam's update
    # exp_avg is (1 - beta1) times the clipped gradient: Adam's first update alone would hide any factor
    mean = optimizer.base_optimizer.state[master]["exp_avg"]
    torch.testing.assert_close(mean, reference.state[wide]["exp_avg"], rtol=1e-5, atol=1e-8)  # the clip factor's 1e-6


def test_an_overflow_changes_neither_weights_nor_states() -> None:
    half = nn.Parameter(tensors(6, 4, seed=3).half())
    scaler = LossScaler(**SMALL | {"hysteresis": 1})
    optimizer = NeuronZero1Optimizer([half], torch.optim.AdamW, use_grad_acc_hook=True, loss_scaler=scaler, lr=0.1)

    def take_step(factor: float) -> None:
        scaler.scale_gradients_of((half.float() * factor).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    take_step(1.0)
    base = optimizer.base_optimizer
    before = [half.detach().clone(), *(value.clone() for state in base.state.values() for value in state.values())]
    take_step(1e6)  # 64e6 is infinite in fp16
    after = [half.detach(), *(value for state in base.state.values() for value in state.values())]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert (scaler.skipped_last, scaler.last_scale, scaler.scale.item()) == (True, 64.0, 32.0)
    take_step(1.0)
    assert not scaler.skipped_last
    assert not torch.equal(before[0], half.detach())


@pytest.mark.parametrize("fused", [True, False])
def test_the_scale_enters_the_loss_before_gradients_are_rounded_to_fp16(fused: bool) -> None:
    """Gradients of a mean over 4096 tokens are below fp16's 6e-8 without the scale; float64 is the reference."""
    tokens, hidden_size, vocabulary = 4096, 8, 600
    hidden = (tensors(tokens, hidden_size, seed=1) / 8).half()
    weight = (tensors(vocabulary, hidden_size, seed=2) / 8).half()
    target = torch.arange(tokens) % vocabulary
    divisor = torch.tensor([3.0 * tokens])  # of a step with three such micro-batches

    def gradients(dtype: torch.dtype, scaler: LossScaler | None) -> list[torch.Tensor]:
        x, w = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight))
        if fused:
            loss = fused_linear_cross_entropy(x, w, target, num_items_in_batch=divisor)
        else:
            loss = parallel_cross_entropy(x @ w.t(), target).sum() / divisor
        if scaler is not None:
            loss = scaler.scale_gradients_of(loss)
        loss.backward()
        assert x.grad is not None and w.grad is not None
        return [grad.double() / (1 if scaler is None else scaler.scale.item()) for grad in (x.grad, w.grad)]

    expected = gradients(torch.float64, None)
    found = gradients(torch.float16, LossScaler(initial_scale=2.0**17))
    for half, exact in zip(found, expected, strict=True):
        assert (half - exact).norm() < 2e-3 * exact.norm()  # fp16 keeps 11 bits


def test_small_probabilities_keep_their_gradient_in_fp16() -> None:
    """The gradient of a logit whose probability is 1.5e-8, which fp16 cannot store, with the scale of a loss."""
    logits = torch.zeros(1, 50).half()
    logits[0, 7] = 18.0
    target = torch.tensor([7])

    def gradient(dtype: torch.dtype, scale: float) -> torch.Tensor:
        x = logits.to(dtype, copy=True).requires_grad_()
        (parallel_cross_entropy(x, target).sum() * scale).backward()
        assert x.grad is not None
        return x.grad.double() / scale

    found, exact = gradient(torch.float16, 2.0**17), gradient(torch.float64, 1.0)
    others = torch.arange(50) != 7
    torch.testing.assert_close(found[0, others], exact[0, others], rtol=2e-3, atol=0)  # fp16 keeps 11 bits
