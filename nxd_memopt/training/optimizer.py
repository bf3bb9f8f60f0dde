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
    """AdamW on fp32 weights: fp32 parameters, or fp32 master weights of bf16 parameters.

    The spacing of bf16 numbers near 0.02 is 1e-4, more than an update at a usual learning rate,
    so without master weights such a weight does not change at all. Gradients of bf16 parameters
    are accumulated in fp32 too. With ``config.zero1`` master weights and optimizer states are
    sharded over the data-parallel ranks; without it they are replicated on each rank.

    Args:
        parameters: parameters to train. Weight decay applies to parameters with two or more
            dimensions.
        config: hyperparameters of AdamW, clipping, and how gradients and states are sharded.
    """

    def __init__(self, parameters: list[nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters = parameters
        self._is_sharded = config.zero1
        self._overlapped: OverlappedGradientReduction | None = None
        if config.overlap_grad_reduce:
            self._overlapped = OverlappedGradientReduction(parameters)
        # Matrices (embeddings and projections) decay; norm weights and biases do not.
        matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
        vectors = [parameter for parameter in parameters if parameter.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        # Without zero1 every rank is a sharding group of its own: one shard, so the states are
        # replicated over data parallelism by the same code. None takes the data-parallel groups.
        sharding_groups = None
        if not config.zero1:
            sharding_groups = [[rank] for rank in range(world_size())]
        optimizer_dtype = torch.float32 if config.master_weights else parameters[0].dtype
        self._zero1 = NeuronZero1Optimizer(
            [group for group in groups if group["params"]],
            AdamW,
            optimizer_dtype=optimizer_dtype,
            grad_clipping=config.clip_grad > 0,
            max_norm=config.clip_grad,
            sharding_groups=sharding_groups,
            # Gradients of bf16 parameters are accumulated in fp32 main_grad by a hook.
            use_grad_acc_hook=config.master_weights,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True if backend.name == "cpu" else None,
        )

    def last_backward(self) -> AbstractContextManager[None]:
        """Return the context of a step's last backward, which overlaps with gradient reduction.

        It reduces nothing unless ``config.overlap_grad_reduce`` is set.
        """
        if self._overlapped is None:
            return nullcontext()
        return self._overlapped.last_backward()

    def reduce_gradients(self) -> Tensor:
        """Sum gradients over sequence shards, average them over data-parallel ranks, and clip them.

        Returns:
            The global norm before clipping, 0-dim, fp32.
        """
        # With zero1 the reduction is a reduce-scatter inside the ZeRO-1 optimizer. With overlap
        # the hooks have reduced the gradients during backward.
        if not self._is_sharded and self._overlapped is None:
            grads.bucket_allreduce_gradients(self.parameters)
        return self._zero1.reduce_gradients()

    def step(self, lr: float) -> None:
        """Update the parameters with learning rate ``lr``; call after ``reduce_gradients``."""
        for group in self._zero1.param_groups:
            group["lr"] = lr
        self._zero1.update_parameters()

    def zero_grad(self) -> None:
        """Release the gradients of all parameters."""
        self._zero1.zero_grad()

    @property
    def inner(self) -> NeuronZero1Optimizer:
        """ZeRO-1 optimizer with the master weights and optimizer states, for checkpoints."""
        return self._zero1


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
