"""The optimizer of the training program: AdamW on fp32 weights, replicated or sharded over data-parallel ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer
from nxd_memopt.parallel_layers import grads
from nxd_memopt.parallel_layers.overlapped_grads import OverlappedGradientReduction
from nxd_memopt.training.config import OptimizerConfig
from nxd_memopt.training.distributed import world_size


class MasterWeightOptimizer:
    """AdamW on fp32 weights: the parameters themselves, or fp32 master weights of parameters in a narrower dtype.

    A bf16 weight of 0.02 moves in steps of 1e-4, more than an update at a usual learning rate, so without master
    weights it does not move at all. Gradients of such parameters accumulate in fp32 too. With ``config.zero1`` master
    weights and optimizer states are sharded over the data-parallel ranks; without it each rank holds all of them.

    Args:
        parameters: to train. Weight decay applies to those of two or more dimensions.
    """

    def __init__(self, parameters: list[nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters = parameters
        self._is_sharded = config.zero1
        self._overlapped = OverlappedGradientReduction(parameters) if config.overlap_grad_reduce else None
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._zero1 = NeuronZero1Optimizer(
            [group for group in groups if group["params"]],
            AdamW,
            optimizer_dtype=torch.float32 if config.master_weights else parameters[0].dtype,
            grad_clipping=config.clip_grad > 0,
            max_norm=config.clip_grad,
            # Groups of one rank each shard nothing: the same code then serves replicated optimizer states.
            sharding_groups=None if config.zero1 else [[rank] for rank in range(world_size())],
            use_grad_acc_hook=config.master_weights,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True if backend.name == "cpu" else None,
        )

    def last_backward(self) -> AbstractContextManager[None]:
        """Return a context for the backward that completes a step's gradients: their reduction may overlap with it."""
        return nullcontext() if self._overlapped is None else self._overlapped.last_backward()

    def reduce_gradients(self) -> Tensor:
        """Sum gradients over sequence shards, average them over data-parallel ranks, clip them.

        Returns:
            The global norm before clipping, fp32, 0-dim.
        """
        if not self._is_sharded and self._overlapped is None:
            grads.bucket_allreduce_gradients(self.parameters)
        return self._zero1.reduce_gradients()

    def step(self, lr: float) -> None:
        """Update the parameters with learning rate ``lr``; call after ``reduce_gradients``."""
        for group in self._zero1.param_groups:
            group["lr"] = lr
        self._zero1.update_parameters()

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters."""
        self._zero1.zero_grad()

    @property
    def inner(self) -> NeuronZero1Optimizer:
        """The optimizer that holds master weights and states, for checkpoints."""
        return self._zero1


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
