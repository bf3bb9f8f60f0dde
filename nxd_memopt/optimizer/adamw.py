"""AdamW with fp32 moments for parameters of any dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.adamw import number_tensor
from nxd_memopt.optimizer.closures import loss_of

Numbers = dict[tuple[Any, ...], tuple[float | Tensor, float | Tensor]]
"""Step size and decay by what they depend on: step, device, dtype, and whether the parameter is 0-dim."""


class AdamW_FP32OptimParams(torch.optim.Optimizer):  # noqa: N801 (neuronx-distributed's name)
    """Adam with decoupled weight decay (arXiv:1711.05101), moments in fp32, or in float64 for
    float64 gradients.

    Weight decay is applied after the Adam update, to its result, as in Hugging Face's AdamW.
    ``torch.optim.AdamW`` decays first. The two differ by ``lr * weight_decay`` times one update.

    Args:
        params: parameters or groups.
        lr: learning rate, at least 0; a number or a tensor of one element, which is only read.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment, before the bias correction; at least 0.
        weight_decay: at least 0.
        correct_bias: divide the moments by ``1 - beta ** step``.
        no_deprecation_warning: accepted for compatibility and ignored; this class never warns.
        differentiable: must be False.
        capturable: must be False.

    Raises:
        ValueError: a value is outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = True,
        differentiable: bool = False,
        capturable: bool = False,
    ) -> None:
        del no_deprecation_warning
        if differentiable or capturable:
            raise ValueError("differentiable and capturable must be False: the step runs eagerly, without gradients")
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0):
            raise ValueError(f"lr {lr}, eps {eps} and weight_decay {weight_decay} must be at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas {betas} must be at least 0 and below 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "correct_bias": correct_bias}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return what ``closure`` returns."""
        loss = loss_of(closure)
        for group in self.param_groups:
            numbers: Numbers = {}
            for param in group["params"]:
                if param.grad is not None:
                    _update(param, param.grad, self.state[param], group, numbers)
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state. torch's own method would round the moments to the dtype of the
        parameters.
        """
        super().load_state_dict(state_dict)
        # ``super()`` loads steps and options; copy the moments again in the dtype of the file.
        states = state_dict["state"]
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            if index not in states:
                continue  # the parameter had no gradient before the state was saved
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[param][name] = states[index][name].to(param.device, copy=True)


def _update(param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], numbers: Numbers) -> None:
    """Update one parameter and its moments."""
    if not state:
        # fp32 for bf16, fp16 and fp32 gradients; float64 stays float64.
        wide = torch.promote_types(grad.dtype, torch.float32)
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(grad, dtype=wide)
        state["exp_avg_sq"] = torch.zeros_like(grad, dtype=wide)
    state["step"] += 1
    mean = state["exp_avg"]
    mean_of_squares = state["exp_avg_sq"]
    beta1, beta2 = group["betas"]
    wide_grad = grad.to(mean.dtype)
    # m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2
    mean.mul_(beta1).add_(wide_grad, alpha=1 - beta1)
    mean_of_squares.mul_(beta2).addcmul_(wide_grad, wide_grad, value=1 - beta2)
    # All parameters of one step share the step size: on compiled backends it is one small
    # host-to-device copy per step and dtype, not one per parameter.
    key = (state["step"], mean.device, mean.dtype, mean.dim() == 0)
    if key not in numbers:
        numbers[key] = (_step_size(state["step"], group, mean), _operand(1 - group["lr"] * group["weight_decay"], mean))
    step_size, decay = numbers[key]
    # p = (p - step_size m / (sqrt(v) + eps)) (1 - lr weight_decay), in fp32; ``copy_`` rounds once.
    updated = param.to(mean.dtype)
    updated = updated - step_size * mean / mean_of_squares.sqrt().add_(group["eps"])
    param.copy_(updated.mul_(decay))


def _step_size(step: int, group: dict[str, Any], mean: Tensor) -> float | Tensor:
    """Return the learning rate times the ratio of the bias corrections of both moments."""
    size = group["lr"]
    if group["correct_bias"]:
        beta1, beta2 = group["betas"]
        # Not in place: a tensor learning rate belongs to the group.
        size = size * (math.sqrt(1 - beta2**step) / (1 - beta1**step))
    return _operand(size, mean)


def _operand(number: float | Tensor, tensor: Tensor) -> float | Tensor:
    """Return ``number`` as an operand of ``tensor``: a tensor if numbers are compiled into kernels.

    A number that changes in each step would otherwise compile new kernels in each step.
    """
    if not backend.scalars_are_compiled:
        return number
    return number_tensor(number, tensor, tensor.dtype)
