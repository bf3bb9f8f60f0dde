"""AdamW whose step reads and writes each tensor once on GPUs, and compiles one set of kernels on Neuron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.adamw import StepNumbers, adamw_update, arithmetic_dtype, step_numbers
from nxd_memopt.ops.cuda import adamw as cuda
from nxd_memopt.ops.cuda.support import can_use_triton
from nxd_memopt.optimizer.closures import loss_of

_TORCH_ONLY_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` (arXiv:1711.05101) with the same arguments, states and results.

    On NVIDIA GPUs with Triton one kernel updates all parameters, in fp32 for all dtypes, at memory
    bandwidth (torch's ``fused=True`` reaches about two thirds of it). torch's own step runs on
    other devices; for ``amsgrad``, ``maximize``, ``capturable``, ``differentiable`` and ``fused``;
    for learning rates and betas that are tensors; and for parameters, gradients and moments that
    are not plain contiguous tensors.

    If ``backend.scalars_are_compiled`` (Neuron), the learning rate and the bias corrections are
    tensors, because a number would compile new kernels in each step. The results equal
    those of torch's step bit for bit in fp32; narrower parameters are updated in fp32. torch's own
    step runs for the arguments above.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return what ``closure`` returns."""
        loss = loss_of(closure)
        # Every group takes the same path: torch's step does not update single groups.
        if not _is_capturing() and all(self._is_supported(group) for group in self.param_groups):
            for group in self.param_groups:
                self._update(group)
        elif backend.scalars_are_compiled and all(_can_use_tensors(group) for group in self.param_groups):
            for group in self.param_groups:
                self._update_by_tensors(group)
        else:
            _run_torch_step(self)
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, also of ``torch.optim.AdamW``, whose fused form keeps the step on the
        device.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if group["fused"] or group["capturable"]:
                continue
            for param in group["params"]:
                # A step on the device would cost a device-to-host synchronization in each
                # ``step()``.
                state = self.state[param]
                if "step" in state:
                    state["step"] = state["step"].cpu()

    def _update(self, group: dict[str, Any]) -> None:
        """Update one group with the Triton kernel."""
        params, grads, means, squares, steps = self._begin_step(group)
        beta1, beta2 = group["betas"]
        # All parameters of the group go to one call of the kernel, not several calls per parameter.
        updates = [
            cuda.Update(param, grad, mean, square, step=int(step))
            for param, grad, mean, square, step in zip(params, grads, means, squares, steps, strict=True)
        ]
        cuda.adamw(
            updates,
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
        )
        # The kernel writes without autograd's knowledge: raise the version counters.
        torch.autograd.graph.increment_version([*params, *means, *squares])

    def _update_by_tensors(self, group: dict[str, Any]) -> None:
        """Update one group with step size and decay as tensors on the device."""
        params, grads, means, squares, steps = self._begin_step(group)
        betas = group["betas"]
        eps = group["eps"]
        # Parameters of one dtype share the numbers, unless one of them had no gradient in some
        # step.
        numbers: dict[tuple[Any, ...], StepNumbers] = {}
        for param, grad, mean, square, step in zip(params, grads, means, squares, steps, strict=True):
            # ``step`` is on the host: reading it does not wait for the device
            key = (int(step), param.device, arithmetic_dtype(param), param.dim() == 0)
            if key not in numbers:
                options = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
                numbers[key] = step_numbers(key[0], param, betas=betas, **options)
            adamw_update(param, grad, mean, square, numbers[key], betas=betas, eps=eps)

    def _begin_step(self, group: dict[str, Any]) -> tuple[list[Tensor], ...]:
        """Count the step; return parameters with a gradient, gradients, both moments and steps of ``group``."""
        # ``_init_group`` fills: parameters, gradients, exp_avg, exp_avg_sq, max_exp_avg_sq, steps.
        tensors: list[list[Tensor]] = [[] for _ in range(6)]
        params, grads, means, squares, _, steps = tensors
        self._init_group(group, *tensors)
        for step in steps:
            step.add_(1)
        return params, grads, means, squares, steps

    def _is_supported(self, group: dict[str, Any]) -> bool:
        """Return whether the Triton kernel supports all parameters of ``group``."""
        if _needs_torch_step(group):
            return False
        for param in group["params"]:
            if param.grad is not None and not _fits(param, self.state.get(param, {})):
                return False
        return True


def for_this_device(optimizer_class: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return this module's ``AdamW`` for ``torch.optim.AdamW`` if ``backend.scalars_are_compiled``.

    It has the same arguments, states and results. torch's own class may compile kernels for the
    numbers of each step. Every other class is returned unchanged.
    """
    if optimizer_class is torch.optim.AdamW and backend.scalars_are_compiled:
        return AdamW
    return optimizer_class


def _needs_torch_step(group: dict[str, Any]) -> bool:
    """Return whether ``group`` has options that only torch's own step implements."""
    if any(group[name] for name in _TORCH_ONLY_OPTIONS):
        return True
    numbers = (group["lr"], *group["betas"])
    return any(isinstance(number, Tensor) for number in numbers)


def _can_use_tensors(group: dict[str, Any]) -> bool:
    """Return whether ``_update_by_tensors`` supports ``group``."""
    return not (_needs_torch_step(group) or any(param.is_complex() for param in group["params"]))


def _is_capturing() -> bool:
    """Return whether a CUDA graph is captured, in which case torch's step raises its error.

    A graph would repeat the step number of the capture in each replay.
    """
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _run_torch_step(optimizer: torch.optim.AdamW) -> None:
    """Run torch's step without the hooks of ``step``: this class's own step has run them."""
    # torch.optim.Optimizer wraps ``step`` of each class that is instantiated, once, and marks the
    # wrapper with ``hooked``. The wrapper runs the pre- and post-step hooks.
    step: Any = torch.optim.AdamW.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def _fits(param: Tensor, state: dict[str, Any]) -> bool:
    """Return whether the tensors of ``param`` are plain and its moments have one dtype."""
    assert param.grad is not None
    moments: list[Tensor] = [state[name] for name in ("exp_avg", "exp_avg_sq") if name in state]
    # the kernel reads both moments through pointers of one type
    if len({moment.dtype for moment in moments}) > 1:
        return False
    tensors = (param, param.grad, *moments)
    return all(_is_plain(tensor, param.device) for tensor in tensors)


def _is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Return whether ``tensor`` is a contiguous strided tensor on ``device`` without a subclass."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return False
    return tensor.device == device and tensor.is_contiguous() and can_use_triton(tensor)
