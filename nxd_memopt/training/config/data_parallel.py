"""The ``data_parallel`` section: which ZeRO stage shards what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nxd_memopt.config import require_divisible
from nxd_memopt.options import Resume, check_options, option

# Megatron's values of data_parallel_sharding_strategy.
STRATEGIES = {"no_shard": "none", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}

SHARDS_GRADIENTS = ("zero2", "zero3")
"""Stages that reduce gradients during backward, into shards."""


@dataclass(frozen=True)
class DataParallelConfig:
    """What is divided over the D data-parallel ranks instead of replicated (ZeRO, arXiv:1910.02054).

    Args:
        sharding: ``none`` replicates everything; ``zero1`` shards optimizer states and master
            weights, ``zero2`` also gradients, ``zero3`` also parameters, which are gathered layer by
            layer (PyTorch's FSDP2). Bytes per parameter with bf16 weights and fp32 master weights:
            18 = 2 for the weight + 4 for the gradient + 12 for master and moments, 6 + 12/D, 2 + 16/D and
            16/D, because zero3 stores only the fp32 shards. The results are the same, up to the order of additions.
        num_distributed_optimizer_instances: hybrid sharding, with zero2 and zero3: N instances of
            D / N consecutive data-parallel ranks; tensors are sharded within an instance and
            replicated across instances. ``hosts`` is one instance per host: all traffic but one reduction of the
            shards stays on the host.
        reshard_after_forward: with zero3, free the gathered parameters of each layer after its
            forward and gather them again in backward. ``False`` keeps them: 2 more bytes per
            parameter with bf16, and half of the all-gathers.
        grad_reduce_in_fp32: add the gradients of micro-batches and of ranks in fp32 (Megatron's
            name). ``False``, with bf16-mixed: in bf16, which halves the traffic of the
            reductions and rounds each sum. With ``none`` and ``zero1`` gradients then take 2 bytes
            per parameter less until the update; the update of ``none`` casts all of them to fp32
            first. ``zero2`` and ``zero3`` still add micro-batches in fp32. ``None`` is True with
            master weights; without, gradients are summed in the dtype of the parameters.
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
