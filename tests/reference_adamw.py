"""AdamW in float64, written from its definition, with a bound of what fp32 arithmetic may differ by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDING = 2.0**-24  # half of fp32's spacing at 1


class Float64AdamW:
    """AdamW (arXiv:1711.05101) with clipping by the global norm; a missing gradient is zero.

    The bounds are a running error analysis to first order: each fp32 operation adds ``ROUNDING`` times
    its result, and errors go on through the recurrences of both moments. They are of every element.

    Args:
        values: initial weights.
        weight_decay: of each weight.
        max_norm: infinity clips nothing.
    """

    def __init__(
        self,
        values: Sequence[Tensor],
        *,
        weight_decay: Sequence[float],
        betas: tuple[float, float],
        eps: float,
        max_norm: float,
    ) -> None:
        self.weights = [value.detach().double().clone() for value in values]
        self.means = [torch.zeros_like(weight) for weight in self.weights]
        self.squares = [torch.zeros_like(weight) for weight in self.weights]
        self.weight_errors = [torch.zeros_like(weight) for weight in self.weights]
        self._mean_errors = [torch.zeros_like(weight) for weight in self.weights]
        self._square_errors = [torch.zeros_like(weight) for weight in self.weights]
        self._weight_decay = weight_decay
        self._betas, self._eps, self._max_norm = betas, eps, max_norm
        self._steps = 0

    def step(self, gradients: Sequence[Tensor | None], lr: float, *, errors: Sequence[Tensor | float]) -> float:
        """Update all weights; return the norm before clipping. ``errors`` bounds those of the gradients."""
        grads = [
            torch.zeros_like(weight) if gradient is None else gradient.double()
            for gradient, weight in zip(gradients, self.weights, strict=True)
        ]
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads))
        factor = min(1.0, self._max_norm / (norm + 1e-6))
        self._steps += 1
        for index, (grad, error) in enumerate(zip(grads, errors, strict=True)):
            # The factor has the error of the norm: of its sums over blocks and ranks, at most 16 roundings.
            self._update(index, grad * factor, error * factor + 16 * ROUNDING * grad.abs() * factor, lr)
        return norm

    def _update(self, index: int, grad: Tensor, error: Tensor, lr: float) -> None:
        beta1, beta2 = self._betas
        weight, mean, square = self.weights[index], self.means[index], self.squares[index]
        new_mean = beta1 * mean + (1 - beta1) * grad
        new_square = beta2 * square + (1 - beta2) * grad**2
        # Four roundings: of both factors, the product and the sum.
        mean_error = beta1 * self._mean_errors[index] + (1 - beta1) * error
        mean_error += 4 * ROUNDING * (mean.abs() + grad.abs())
        square_error = beta2 * self._square_errors[index] + (1 - beta2) * 2 * grad.abs() * error
        square_error += 4 * ROUNDING * (new_square + square)
        root = math.sqrt(1 - beta2**self._steps)
        denominator = new_square.sqrt() / root + self._eps
        # d sqrt(v) = dv / (2 sqrt(v)), and at most sqrt(dv)
        root_error = torch.minimum(square_error / (2 * new_square.sqrt()).clamp_min(1e-300), square_error.sqrt()) / root
        step_size = lr / (1 - beta1**self._steps)
        update = step_size * new_mean / denominator
        update_error = step_size * mean_error / denominator + update.abs() * root_error / denominator
        decayed = weight * (1 - lr * self._weight_decay[index])
        self.weight_errors[index] += update_error + 8 * ROUNDING * update.abs() + 4 * ROUNDING * weight.abs()
        self.weights[index], self.means[index], self.squares[index] = decayed - update, new_mean, new_square
        self._mean_errors[index], self._square_errors[index] = mean_error, square_error

    def require(self, index: int, *, weight: Tensor, mean: Tensor, square: Tensor, what: str) -> None:
        """Assert that fp32 weight and moments, flat and perhaps padded, are within the bounds."""
        found = {"weight": weight, "exp_avg": mean, "exp_avg_sq": square}
        expected = (self.weights[index], self.means[index], self.squares[index])
        bounds = (self.weight_errors[index], self._mean_errors[index], self._square_errors[index])
        for (name, tensor), value, bound in zip(found.items(), expected, bounds, strict=True):
            flat = tensor.detach().double().reshape(-1)[: value.numel()].view(value.shape)
            difference = (flat - value).abs()
            # twice, for what the first order leaves out; 1e-38 is below fp32's normal range
            assert bool((difference <= 2 * bound + 1e-38).all()), (what, name, difference.max(), bound.max())
