"""The optimizer of the training program: AdamW on fp32 weights at any ZeRO stage, with an optional loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.data_parallel import Zero2Optimizer, Zero3Optimizer
from nxd_memopt.memory import weights_to_device
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.optimizer import (
    AdamW,
    LossScaler,
    NeuronZero1Optimizer,
    OffloadedZero1Optimizer,
    OptimizerInBackward,
)
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.data_shards import local_rows, model_dtype
from nxd_memopt.parallel_layers.overlapped_grads import OverlappedGradientReduction
from nxd_memopt.training.config.data_parallel import DataParallelConfig
from nxd_memopt.training.config.train_config import OptimizerConfig
from nxd_memopt.training.parameter_groups import parameter_groups
from nxd_memopt.training.reporting.metrics import LossScaling
from nxd_memopt.training.runtime.distributed import world_size


class MasterWeightOptimizer:
    """AdamW on fp32 weights: fp32 parameters, or fp32 master weights of bf16 and fp16 parameters.

    The spacing of bf16 numbers near 0.02 is 1e-4, more than an update at a usual learning rate,
    so without master weights such a weight does not change at all. Gradients of bf16 and fp16
    parameters are accumulated in fp32 too, unless ``grad_reduce_in_fp32`` is False. For fp16
    parameters the loss is scaled (``loss_scaler``), and ``step`` skips the update if a gradient has
    overflowed on any rank. ``data_parallel`` says what the data-parallel ranks share of masters,
    states and gradients.

    Args:
        parameters: parameters to train, for zero3 those of a model that ``shard_model`` has
            sharded; with their names, or without names, which no pattern of ``config`` matches.
        config: hyperparameters of AdamW, and clipping.
        data_parallel: the ZeRO stage.
        master_weights: keep fp32 weights, states and gradient sums for bf16 and fp16 parameters.
        shard_ranks: zero2: number of consecutive data-parallel ranks that share the shards.
            Default: all.
        pool: ledger of the host memory for offloaded states; default a new one.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter | tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        data_parallel: DataParallelConfig | None = None,
        *,
        master_weights: bool = True,
        shard_ranks: int | None = None,
        pool: HostPool | None = None,
    ) -> None:
        named = [each if isinstance(each, tuple) else ("", each) for each in parameters]
        self.parameters = [parameter for _, parameter in named]
        self._groups = parameter_groups(named, config)
        self.loss_scaler: LossScaler | None = None
        # Not ``dtype``: the rows of a zero3 parameter are its fp32 masters.
        if model_dtype(self.parameters[0]) == torch.float16:
            self.loss_scaler = LossScaler(initial_scale=config.initial_loss_scale)
        data_parallel = data_parallel or DataParallelConfig()
        self._stage = data_parallel.sharding
        self._has_masters = master_weights
        self._reduce_dtype = reduction_dtype(master_weights, data_parallel)
        self._overlapped: OverlappedGradientReduction | None = None
        if config.overlap_grad_reduce:
            self._overlapped = OverlappedGradientReduction(self.parameters)
        self._sharded = self._optimizer_of_stage(config, shard_ranks, pool)
        # Without shards and masters the inner AdamW updates the parameters themselves.
        self._in_backward: OptimizerInBackward | None = None
        if config.in_backward:
            self._in_backward = OptimizerInBackward(self._sharded.base_optimizer, computes_norm=True)
        self._options = [
            {"weight_decay": group["weight_decay"], "betas": group["betas"], "eps": group["eps"]}
            for group in self._sharded.param_groups
        ]

    def _optimizer_of_stage(
        self, config: OptimizerConfig, shard_ranks: int | None, pool: HostPool | None
    ) -> NeuronZero1Optimizer:
        """Return the optimizer of the stage, with AdamW inside."""
        groups = [{"params": list(group.parameters), "weight_decay": group.weight_decay} for group in self._groups]
        options: dict[str, Any] = {
            "grad_clipping": config.clip_grad > 0,
            "max_norm": config.clip_grad,
            "loss_scaler": self.loss_scaler,
            "lr": config.lr,
            "betas": (config.betas[0], config.betas[1]),
            "eps": config.eps,
            "fused": backend.name == "cpu" or None,
        }
        if self._stage == "zero3":
            return Zero3Optimizer(groups, AdamW, **options)
        options["optimizer_dtype"] = torch.float32 if self._has_masters else self.parameters[0].dtype
        # One data-parallel rank has nothing to scatter, and its micro-batches must add up in fp32.
        if self._stage == "zero2" and parallel_state.get_data_parallel_size() > 1:
            return Zero2Optimizer(
                groups,
                AdamW,
                reduce_dtype=self._reduce_dtype,
                ranks_per_replica=shard_ranks,
                **options,
            )
        # Without sharding every rank is a sharding group of its own: one shard, so the states are
        # replicated over data parallelism by the same code. None takes the data-parallel groups.
        sharding_groups = None
        if self._stage == "none":
            sharding_groups = [[rank] for rank in range(world_size())]
        # Gradients of bf16 and fp16 parameters are accumulated in fp32 main_grad by a hook.
        options["use_grad_acc_hook"] = self._reduce_dtype is not None
        options["sum_tied"] = parallel_state.get_pipeline_model_parallel_size() > 1
        if config.offloads_states:
            for name in ("fused", "optimizer_dtype", "loss_scaler"):
                del options[name]
            return OffloadedZero1Optimizer(
                groups,
                optimizer_offload_fraction=config.optimizer_offload_fraction,
                staging_bytes=int(config.optimizer_staging_gib * 2**30),
                store_param_remainders=config.store_param_remainders,
                pool=pool,
                sharding_groups=sharding_groups,
                **options,
            )
        return NeuronZero1Optimizer(groups, AdamW, sharding_groups=sharding_groups, **options)

    def use_configured_options(self) -> None:
        """Set the hyperparameters of the configuration again, after a checkpoint has been loaded.

        The learning rate is set by every step.
        """
        for group, options in zip(self._sharded.param_groups, self._options, strict=True):
            group.update(options)

    def begin_step(self, lr: float) -> None:
        """Set the learning rate ``lr`` of a step whose updates run in its backward; no-op for other steps."""
        if self._in_backward is None:
            return
        self._set_learning_rate(lr)
        self._sharded.copy_options()

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
            The global norm before clipping and without the loss scale, 0-dim, fp32. It is not
            finite if a gradient has overflowed.
        """
        if self._in_backward is not None:
            return self._in_backward.grad_norm()
        # With zero1 the reduction is a reduce-scatter inside the optimizer; with zero2, zero3 and
        # overlap the gradients have been reduced during backward.
        if self._stage == "none" and self._overlapped is None:
            grads.bucket_allreduce_gradients(self.parameters)
        return self._sharded.reduce_gradients()

    def step(self, lr: float) -> None:
        """Update the parameters with learning rate ``lr``; call after ``reduce_gradients``.

        Raises:
            ValueError: on every rank, at an overflow: a weight is not finite, or the loss scale
                cannot be lowered any more.
        """
        if self._in_backward is not None:
            self._in_backward.step()
            return
        self._set_learning_rate(lr)
        self._sharded.update_parameters()
        if self.loss_scaler is not None and self.loss_scaler.skipped_last:
            self._require_finite_weights(self.loss_scaler)

    def _set_learning_rate(self, lr: float) -> None:
        for group in self._sharded.param_groups:
            group["lr"] = lr

    def _require_finite_weights(self, scaler: LossScaler) -> None:
        """Raise ``ValueError`` on every rank if a weight of any rank is NaN or infinite.

        Then no loss scale helps, and further steps would all be skipped. A step that updates
        reads the weights too, so the check makes a skipped step no slower than any other.
        """
        dtype = model_dtype(self.parameters[0])
        # A skipped step has not touched weights that wait in host memory since backward.
        weights_to_device(self.parameters)
        weights = [local_rows(parameter).detach() for parameter in self.parameters]
        # A rank may have no rows of a small zero3 parameter; an empty tensor has no maximum.
        weights = [weight for weight in weights if weight.numel()]
        maxima = torch._foreach_norm(weights, torch.inf)  # pyright: ignore[reportPrivateImportUsage]
        # The model computes with the rounded weights: a finite fp32 row may be infinite in fp16.
        is_finite = torch.stack(maxima).to(dtype).isfinite().all()
        if scaler.any_rank_has(~is_finite):
            raise ValueError(
                "a weight is NaN or infinite, so every gradient is: resume from an earlier checkpoint "
                "with a lower optimizer.lr, or start again with trainer.precision bf16-mixed"
            )

    @property
    def skipped_steps(self) -> int:
        """Steps so far that updated nothing because a gradient had overflowed."""
        if self.loss_scaler is None:
            return 0
        return self.loss_scaler.skipped_steps

    @property
    def loss_scaling(self) -> LossScaling | None:
        """Loss scale of the last step and whether it was skipped; None without a loss scale."""
        if self.loss_scaler is None:
            return None
        return LossScaling(self.loss_scaler.last_scale, self.loss_scaler.skipped_last)

    def pace_backward(self, layers: Sequence[nn.Module]) -> None:
        """Let states in host memory arrive during the backward of ``layers``; no-op without such states."""
        if isinstance(self._sharded, OffloadedZero1Optimizer):
            self._sharded.pace_backward(layers)

    def update_in_forward(self, model: ParallelCausalLM) -> None:
        """Leave the updates of offloaded states to the next forward of each decoder layer of ``model``."""
        assert isinstance(self._sharded, OffloadedZero1Optimizer)
        self._sharded.update_in_forward(model.decoder_layers(), after_layers=model.modules_after_layers())

    def finish_update(self) -> None:
        """Complete a step whose updates were left to the next forward.

        Call it before parameters are read outside of a forward.
        """
        self._sharded.finish_update()

    def zero_grad(self) -> None:
        """Release the gradients of all parameters."""
        self._sharded.zero_grad()

    @property
    def inner(self) -> NeuronZero1Optimizer:
        """The stage's optimizer with the master weights and optimizer states, for checkpoints."""
        return self._sharded


def reduction_dtype(master_weights: bool, data_parallel: DataParallelConfig) -> torch.dtype | None:
    """Return the dtype in which gradients of micro-batches and ranks are added; None is their own."""
    if not master_weights or data_parallel.grad_reduce_in_fp32 is False:
        return None
    return torch.float32
