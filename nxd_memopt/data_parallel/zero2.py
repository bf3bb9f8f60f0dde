"""The optimizer that reduces gradients to shards during backward (ZeRO stage 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.data_parallel.gradient_scatter import GradientScatter
from nxd_memopt.data_parallel.hybrid import hybrid_groups
from nxd_memopt.optimizer.groups import join_group
from nxd_memopt.optimizer.zero1 import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.summed_gradients import is_sequence_parallel
from nxd_memopt.planner.techniques.buckets import BUCKET_BYTES


class Zero2Optimizer(NeuronZero1Optimizer):
    """``NeuronZero1Optimizer`` whose gradients are sharded too (ZeRO-2, arXiv:1910.02054).

    During backward, a bucket of gradients is reduce-scattered to its mean as soon as it is complete,
    added to this rank's shards in ``optimizer_dtype``, and freed. Backward passes of one step add up
    in the shards, so ``param.grad`` is None after each of them. ``reduce_gradients`` sums the
    sequence-parallel shards over tensor-parallel ranks and clips. Parameters are replicated.

    Bytes per parameter with AdamW, bf16 weights and D ranks: 2 + (4 master + 4 gradient + 8 moments)
    / D, and the buckets in flight. Each backward pass communicates the gradients once; zero1 once a
    step. With one data-parallel rank it equals ``NeuronZero1Optimizer``.

    Args:
        params: see ``NeuronZero1Optimizer``, like all other arguments.
        optimizer_class: optimizer class with the interface of torch.optim.
        reduce_dtype: dtype of the reduction; None takes the gradients' dtype, with half of the traffic
            for bf16 and one more rounding.
        bucket_cap_mb_reduce_scatter: MiB of gradients in one reduce-scatter; 0 means 25.
        ranks_per_replica: hybrid sharding: shard over runs of this many consecutive data-parallel
            ranks, such as those of a host, and replicate over the runs. ``reduce_gradients`` averages
            the shards over the replicas, once a step. Default: all ranks.
        options: the remaining options of ``NeuronZero1Optimizer`` and defaults of
            ``optimizer_class``. ``use_grad_acc_hook`` must be left out: gradients accumulate in the
            shards.

    Raises:
        ValueError: the backend cannot reduce in backward, ``ranks_per_replica`` is no divisor above
            1 of D, or smaller than D under expert parallelism, or see ``NeuronZero1Optimizer``.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        reduce_dtype: torch.dtype | None = torch.float32,
        bucket_cap_mb_reduce_scatter: float = 0,
        ranks_per_replica: int | None = None,
        **options: Any,
    ) -> None:
        refusal = backend.gradient_sharding_refusal()
        if refusal is not None:
            raise ValueError(f"zero2 {refusal}")
        # The hook would move each gradient to ``main_grad`` before this class sees it.
        if options.get("use_grad_acc_hook"):
            raise ValueError("use_grad_acc_hook keeps full gradients, zero2 adds to shards: leave it out")
        self._reduce_dtype = reduce_dtype
        self._scatter: GradientScatter | None = None
        self._replica_group: ProcessGroup | None = None
        if ranks_per_replica not in (None, parallel_state.get_data_parallel_size()):
            if options.get("sharding_groups") is not None:
                raise ValueError("sharding_groups and ranks_per_replica both say who shards: pass one")
            shards, replicas = hybrid_groups(ranks_per_replica)
            options["sharding_groups"] = shards
            self._replica_group = join_group(replicas)
        bucket_mb = bucket_cap_mb_reduce_scatter or BUCKET_BYTES / 2**20
        super().__init__(params, optimizer_class, bucket_cap_mb_reduce_scatter=bucket_mb, **options)

    def init_zero(self) -> None:
        super().init_zero()
        self._scatter_all()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.inited:
            self._scatter_all()

    def _shares_parameter(self, param: nn.Parameter) -> bool:
        # Experts may have one rank each, with D above 1: the gradient of a micro-batch is in
        # ``param.grad``, the sum over micro-batches in that of the master.
        return backend.group_size(self.sharding_group) == 1 and super()._shares_parameter(param)

    def _scatter_all(self) -> None:
        """Reduce the gradients of all trained parameters in backward from now on."""
        if backend.group_size(self.sharding_group) == 1:
            return
        if self._scatter is not None:
            self._scatter.remove()
        self._scatter = GradientScatter(
            [(each.param, each.shard) for each in self._sharded],
            self.sharding_group,
            expert_group=self.expert_sharding_group,
            bucket_bytes=self._reduce_bytes,
            reduce_dtype=self._reduce_dtype,
        )

    @torch.no_grad()
    def reduce_gradients(self) -> Tensor:
        """Average the shards over replicas, sum them over sequence shards and clip them.

        Returns:
            The norm before clipping, 0-dim fp32.
        """
        if self._scatter is None:
            return super().reduce_gradients()
        self._require_shards()
        # A second call of a step changes nothing: the gradients are unscaled and clipped.
        if self._scatter.is_finished and self.grad_norm is not None:
            return self.grad_norm
        self._scatter.finish()
        # ``GradientScatter`` took the mean over the ranks of one replica: the mean over replicas completes it. The
        # sums over sequence shards follow, on 1/D of the elements.
        shards = [cast(Tensor, each.shard.grad) for each in self._sharded]
        grads.average_gradients(shards, self._replica_group, bucket_bytes=self._reduce_bytes)
        # The shards have parts alone: ``GradientScatter`` takes no sum.
        parts = [shard for each, shard in zip(self._sharded, shards, strict=True) if is_sequence_parallel(each.param)]
        grads.sum_over_tensor_ranks(parts)
        self.grad_norm = self._clip(shards)
        return self.grad_norm

    @torch.no_grad()
    def update_parameters(self) -> None:
        super().update_parameters()
        if self._scatter is not None:
            self._scatter.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._scatter is not None:
            self._scatter.clear()
