"""The ``data_parallel`` section: which ZeRO stage shards what, and the options that stages and offload exclude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nxd_memopt.config import require_divisible
from nxd_memopt.options import Resume, check_options, option

STAGES = ("none", "zero1", "zero2", "zero3")
"""ZeRO stages, each of which shards what the one before does and more."""

# Megatron's values of data_parallel_sharding_strategy.
STRATEGIES = {"no_shard": "none", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}

SHARDS_GRADIENTS = ("zero2", "zero3")
"""Stages that reduce gradients during backward, into shards."""


@dataclass(frozen=True)
class DataParallelConfig:
    """What the D data-parallel ranks share of one replica of the model (ZeRO, arXiv:1910.02054).

    Args:
        sharding: ``none`` replicates everything; ``zero1`` shards optimizer states and master
            weights, ``zero2`` also gradients, ``zero3`` also parameters, which are gathered layer by
            layer (PyTorch's FSDP2). Bytes per parameter with bf16 weights and fp32 master weights:
            18, 6 + 12/D, 2 + 16/D and 16/D. The results are the same, up to the order of additions.
        num_distributed_optimizer_instances: hybrid sharding, with zero2 and zero3: the shards are
            of D divided by this many consecutive data-parallel ranks, and replicated over the
            instances. ``hosts`` is one instance per host: all traffic but one reduction of the
            shards stays on the host.
        reshard_after_forward: with zero3, free the gathered parameters of each layer after its
            forward and gather them again in backward. ``False`` keeps them: 2 more bytes per
            parameter with bf16, and half of the all-gathers.
        grad_reduce_in_fp32: add the gradients of micro-batches and of ranks in fp32 (Megatron's
            name). ``False``, with bf16-mixed: in bf16, which halves the traffic of the
            reductions and rounds each sum. With none and zero1 gradients take 2 bytes per parameter
            less until the update, which with none casts all of them to fp32 first; zero2 and zero3
            still add micro-batches in fp32. ``None`` is True with master weights.
    """

    # What ranks share does not change what they compute, nor what a checkpoint stores.
    sharding: Literal["none", "zero1", "zero2", "zero3"] = option(
        "none",
        resume=Resume.REPORTED,
        nemo={
            "data_parallel_sharding_strategy": STRATEGIES,
            "use_distributed_optimizer": {True: "zero1", False: "none"},
        },
    )
    num_distributed_optimizer_instances: int | Literal["hosts"] = option(
        1, resume=Resume.REPORTED, minimum=1, nemo=["num_distributed_optimizer_instances"]
    )
    reshard_after_forward: bool = option(True, resume=Resume.REPORTED)
    grad_reduce_in_fp32: bool | None = option(None, resume=Resume.WHEN_ASKED, nemo=["grad_reduce_in_fp32"])

    def __post_init__(self) -> None:
        check_options(self, "data_parallel")

    def ranks_per_instance(self, data_parallel_size: int, *, num_hosts: int) -> int:
        """Return over how many consecutive data-parallel ranks zero2 and zero3 shard.

        Args:
            data_parallel_size: D.
            num_hosts: hosts of the run, each with as many ranks.

        Raises:
            ValueError: the instances do not divide D into groups of at least 2 ranks.
        """
        instances = self.num_distributed_optimizer_instances
        name = "data_parallel.num_distributed_optimizer_instances"
        if instances == "hosts":
            instances = num_hosts
            name += " hosts ="
        if instances == 1:
            return data_parallel_size
        size = require_divisible("data-parallel size", data_parallel_size, name, instances)
        if size == 1:
            raise ValueError(
                f"{name} {instances} leaves one of {data_parallel_size} data-parallel ranks to each instance, so "
                "nothing would be sharded: use fewer instances, or data_parallel.sharding none"
            )
        return size


def require_compatible(config: DataParallelConfig, *, overlap_grad_reduce: bool, offloads_weights: bool) -> None:
    """Raise ``ValueError`` for options that the stage excludes or would ignore.

    Args:
        config: the section, with its stage resolved.
        overlap_grad_reduce: ``optimizer.overlap_grad_reduce``.
        offloads_weights: ``memory.cpu_offloading_weights``.
    """
    stage = config.sharding
    # Overlapped reduction leaves full averaged gradients on each rank: each stage would reduce
    # them a second time.
    if overlap_grad_reduce and stage != "none":
        when = "after backward" if stage == "zero1" else "during backward"
        raise ValueError(
            f"optimizer.overlap_grad_reduce is true and data_parallel.sharding is {stage}, which scatters the "
            f"gradients itself, {when}: set overlap_grad_reduce to false, or sharding to none"
        )
    if offloads_weights and stage == "zero3":
        raise ValueError(
            "memory.cpu_offloading_weights is true and data_parallel.sharding is zero3, whose gathered weights live "
            "for one layer only: set cpu_offloading_weights to false, or sharding to zero2"
        )
    instances = config.num_distributed_optimizer_instances
    if instances != 1 and stage not in SHARDS_GRADIENTS:
        raise ValueError(
            f"data_parallel.num_distributed_optimizer_instances {instances} needs data_parallel.sharding zero2 or "
            f"zero3, got {stage}: leave it out, or choose one of them"
        )
    if not config.reshard_after_forward and stage != "zero3":
        raise ValueError(
            f"data_parallel.reshard_after_forward is false and data_parallel.sharding is {stage}, which does not "
            "shard parameters: leave it out, or set sharding to zero3"
        )


def require_gradient_sums(grad_reduce_in_fp32: bool | None, precision: str) -> None:
    """Raise ``ValueError`` if the precision leaves no choice of the dtype of gradient sums."""
    allowed = {"bf16-mixed": (True, False), "16-mixed": (True,)}.get(precision, ())
    if grad_reduce_in_fp32 is not None and grad_reduce_in_fp32 not in allowed:
        dtype = {"16-mixed": "fp32, the range of fp16 is too small", "32-true": "fp32"}.get(precision, "bf16")
        raise ValueError(
            f"data_parallel.grad_reduce_in_fp32 is {grad_reduce_in_fp32} and trainer.precision {precision} sums "
            f"gradients in {dtype}: leave it out, or use bf16-mixed"
        )


def require_offloadable(stage: str, precision: str, *, keeps_remainders: bool) -> None:
    """Raise ``ValueError`` if ``optimizer.optimizer_cpu_offload`` does not support the stage or the precision.

    Args:
        stage: ZeRO stage.
        precision: ``trainer.precision``.
        keeps_remainders: ``optimizer.store_param_remainders``.
    """
    name = "optimizer.optimizer_cpu_offload"
    if stage in SHARDS_GRADIENTS:
        raise ValueError(
            f"{name} is true and data_parallel.sharding is {stage}, whose optimizer keeps its states on the device: "
            "set sharding to zero1, or leave optimizer_cpu_offload out"
        )
    if precision == "16-mixed":
        raise ValueError(
            f"{name} is true and trainer.precision is 16-mixed, whose gradients are unscaled before states move: "
            "use bf16-mixed, or leave optimizer_cpu_offload out"
        )
    if precision == "bf16-true":
        raise ValueError(
            f"{name} is true and trainer.precision is bf16-true, without fp32 masters and states to offload: "
            "use bf16-mixed, or leave optimizer_cpu_offload out"
        )
    if keeps_remainders and precision != "bf16-mixed":
        raise ValueError(
            f"optimizer.store_param_remainders keeps what fp32 masters have beyond bf16 parameters, and "
            f"trainer.precision is {precision}: use bf16-mixed, or leave store_param_remainders out"
        )


def require_updates_in_backward(stage: str, precision: str, *, in_backward: bool) -> None:
    """Raise ``ValueError`` if ``optimizer.in_backward`` does not support the stage or the precision."""
    name = "optimizer.in_backward"
    if not in_backward:
        return
    if stage != "none":
        raise ValueError(
            f"{name} is true and data_parallel.sharding is {stage}, which reduces gradients in buckets of many "
            "parameters: set sharding to none, or in_backward to false"
        )
    if precision not in ("32-true", "bf16-true"):
        raise ValueError(
            f"{name} is true and trainer.precision is {precision}, which adds up gradients in fp32 and updates fp32 "
            "master weights after backward: use bf16-true or 32-true, or set in_backward to false"
        )


def require_expert_groups(expert_model_parallel_size: int, config: DataParallelConfig) -> None:
    """Raise ``ValueError`` if parts of the data-parallel ranks would shard what they do not all have."""
    instances = config.num_distributed_optimizer_instances
    if expert_model_parallel_size > 1 and instances not in (1, "hosts"):  # hosts are counted when the run starts
        raise ValueError(
            f"parallel.expert_model_parallel_size {expert_model_parallel_size} and "
            f"data_parallel.num_distributed_optimizer_instances {instances}, whose shards are of parameters that all "
            "data-parallel ranks have: leave the instances out, or set expert_model_parallel_size to 1"
        )
