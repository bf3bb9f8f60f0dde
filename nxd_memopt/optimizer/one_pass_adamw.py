"""Owns AdamW whose step reads and writes each tensor once on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.ops.cuda import adamw as cuda
from nxd_memopt.ops.cuda.support import serves

_OTHER_FORMS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` (arXiv:1711.05101): arguments, states and results are its own.

    On NVIDIA GPUs with Triton one kernel updates all parameters, in fp32 whatever the dtypes, at the memory's speed
    (torch's ``fused=True`` reaches about two thirds of it). Elsewhere, and for ``amsgrad``, ``maximize``,
    ``capturable``, ``differentiable``, ``fused`` or a learning rate that is a tensor, torch's own step runs.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return what ``closure`` returns."""
        if not all(_is_served(group) for group in self.param_groups):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put a saved state back, that of ``torch.optim.AdamW`` too: its fused form counts steps on the device."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if not (group["fused"] or group["capturable"]):
                for state in (self.state[param] for param in group["params"] if "step" in self.state[param]):
                    state["step"] = state["step"].cpu()

    def _update(self, group: dict[str, Any]) -> None:
        tensors: list[list[Tensor]] = [[] for _ in range(6)]
        params, grads, means, squares, _, steps = tensors
        self._init_group(group, *tensors)
        for step in steps:
            step.add_(1)
        beta1, beta2 = group["betas"]
        updates = [
            cuda.Update(*update, step=int(step))
            for *update, step in zip(params, grads, means, squares, steps, strict=True)
        ]
        options = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
        cuda.adamw(updates, beta1=beta1, beta2=beta2, **options)


def _is_served(group: dict[str, Any]) -> bool:
    is_plain = not any(group[name] for name in _OTHER_FORMS) and not isinstance(group["lr"], Tensor)
    params = [param for param in group["params"] if param.grad is not None]
    return is_plain and all(
        serves(param) and param.is_contiguous() and param.grad.is_contiguous() and serves(param.grad)
        for param in params
    )
