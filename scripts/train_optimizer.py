"""Owns the training script's optimizer, AdamW on fp32 weights, and its learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from train_config import OptimizerConfig

FUSED_ADAMW = ("cpu", "cuda")


class AdamW:
    """torch's AdamW on fp32 weights: the parameters themselves, or fp32 masters of parameters in a narrower dtype.

    A bf16 weight of 0.02 moves in steps of 1e-4, more than an update at a usual learning rate: alone it stands still.
    Gradients of such parameters accumulate in fp32 too, in ``main_grad``: a bf16 sum of 256 micro-batches would lose
    the late ones, each of which is near the sum's rounding step.
    """

    def __init__(self, parameters: list[nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters = parameters
        self.masters = [_master(p) if config.master_weights else p for p in parameters]
        for parameter, master in zip(parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(_accumulate_in_fp32)
        groups = [
            {"params": [p for p in self.masters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.masters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=backend.name in FUSED_ADAMW,
        )

    def step(self, lr: float) -> None:
        """Update the parameters with learning rate ``lr``."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        with_masters = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        for parameter, master in with_masters:
            master.grad = getattr(parameter, "main_grad", None)
        self._adamw.step()
        for parameter, master in with_masters:
            parameter.detach().copy_(master.detach())
            master.grad = None

    def zero_grad(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.grad = None
            if master is not parameter:
                parameter.main_grad = None  # pyright: ignore[reportAttributeAccessIssue]

    def state_dict(self) -> dict[str, Any]:
        """Running means and masters; parameters that are their own masters belong to the model's state."""
        masters = {str(i): m.detach() for i, m in enumerate(self.masters) if m is not self.parameters[i]}
        return {"adamw": self._adamw.state_dict()["state"], "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        current = self._adamw.state_dict()
        self._adamw.load_state_dict({"state": _with_int_keys(state["adamw"]), "param_groups": current["param_groups"]})
        for index, master in state["masters"].items():
            self.masters[int(index)].copy_(master)


def _master(parameter: nn.Parameter) -> Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()


def _accumulate_in_fp32(parameter: Any) -> None:
    """Move a micro-batch's gradient into ``main_grad``, which ``parallel_layers.grads`` reads in place of ``grad``."""
    accumulated = getattr(parameter, "main_grad", None)
    if accumulated is None:
        parameter.main_grad = parameter.grad.float()
    else:
        accumulated.add_(parameter.grad)
    parameter.grad = None


def _with_int_keys(state: dict[Any, Any]) -> dict[int, Any]:
    return {int(index): value for index, value in state.items()}


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def learning_rate(step: int, config: OptimizerConfig, decay_steps: int) -> float:
    """Learning rate of step ``step``, counted from 1: linear warm-up, then a cosine down to the minimum."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    minimum = config.lr * config.min_lr_ratio
    progress = min(1.0, (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps))
    return minimum + (config.lr - minimum) * 0.5 * (1 + math.cos(math.pi * progress))
