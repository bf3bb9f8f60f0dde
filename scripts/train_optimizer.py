"""Owns the training script's optimizer, AdamW on fp32 weights, whole or sharded, and its learning-rate schedule."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.optimizer import AdamW as OnePassAdamW
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import grads
from nxd_memopt.parallel_layers.overlapped_grads import OverlappedGradientReduction
from train_config import OptimizerConfig
from train_errors import world_size


class AdamW:
    """torch's AdamW on fp32 weights: the parameters themselves, or fp32 masters of parameters in a narrower dtype.

    A bf16 weight of 0.02 moves in steps of 1e-4, more than an update at a usual learning rate: alone it stands still.
    Gradients of such parameters accumulate in fp32 too. With ``zero1`` masters and states are sharded over the
    data-parallel ranks; without it each of them holds all.
    """

    def __init__(self, parameters: list[nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters, self._is_sharded = parameters, config.zero1
        self._overlapped = OverlappedGradientReduction(parameters) if config.overlap_grad_reduce else None
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._adamw = NeuronZero1Optimizer(
            [group for group in groups if group["params"]],
            OnePassAdamW,
            optimizer_dtype=torch.float32 if config.master_weights else parameters[0].dtype,
            grad_clipping=config.clip_grad > 0,
            max_norm=config.clip_grad,
            sharding_groups=None if config.zero1 else [[rank] for rank in range(world_size())],
            use_grad_acc_hook=config.master_weights,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True if backend.name == "cpu" else None,
        )

    def last_backward(self) -> AbstractContextManager[None]:
        """Around the backward that completes a step's gradients."""
        return nullcontext() if self._overlapped is None else self._overlapped.last_backward()

    def reduce_gradients(self) -> Tensor:
        """Sum over sequence shards, average over data-parallel ranks, clip; return the norm before, fp32, 0-dim."""
        if not self._is_sharded and self._overlapped is None:
            grads.bucket_allreduce_gradients(self.parameters)
        return self._adamw.reduce_gradients()

    def step(self, lr: float) -> None:
        """Update the parameters with learning rate ``lr``, after ``reduce_gradients``."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.update_parameters()

    def zero_grad(self) -> None:
        self._adamw.zero_grad()

    @property
    def inner(self) -> NeuronZero1Optimizer:
        """The optimizer that holds masters and states, for checkpoints."""
        return self._adamw


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def learning_rate(step: int, config: OptimizerConfig, decay_steps: int) -> float:
    """Learning rate of step ``step``, counted from 1: linear warm-up, then a cosine or a line down to the minimum."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    minimum = config.lr * config.min_lr_ratio
    progress = min(1.0, (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps))
    remaining = 1 - progress if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return minimum + (config.lr - minimum) * remaining
