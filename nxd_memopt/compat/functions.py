"""neuronx-distributed's calling conventions of gradients and mappings, where they differ from ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.compat.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, refuse
from nxd_memopt.parallel_layers import grads, mappings, parallel_state
from nxd_memopt.parallel_layers.loss_functions import parallel_cross_entropy

PARALLEL_MODULES = [ColumnParallelLinear, RowParallelLinear, ParallelEmbedding]
"""Layers that a trace of a model does not enter."""
PARALLEL_FUNCTIONS = [
    parallel_cross_entropy,
    mappings.copy_to_tensor_model_parallel_region,
    mappings.gather_from_tensor_model_parallel_region,
    mappings.reduce_from_tensor_model_parallel_region,
    mappings.scatter_to_tensor_model_parallel_region,
]
"""Functions that a trace of a model does not enter."""
Parameters = Tensor | Iterable[Tensor]


def get_grad_norm(
    parameters: Parameters,
    norm_type: float = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Sequence[Sequence[int]] | None = None,
    force_spmd: bool = True,
) -> Tensor:
    """Return the global gradient norm, 0-dim; see ``grads.get_grad_norm``.

    Args:
        parameters: parameters of this rank.
        norm_type: p of the p-norm.
        zero1_optimizer: whether each data-parallel rank has a shard of every parameter.
        zero1_optimizer_groups: ranks over which parameters are sharded; default: data-parallel.
        force_spmd: ignored, every rank runs the same program.
    """
    del force_spmd
    group = _sharding_group(zero1_optimizer, zero1_optimizer_groups)
    return grads.get_grad_norm(parameters, norm_type, sharding_group=group)


def clip_grad_norm(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Sequence[Sequence[int]] | None = None,
    force_spmd: bool = True,
) -> Tensor:
    """Clip gradients in place to ``max_norm`` and return the norm before; see ``get_grad_norm``."""
    del force_spmd
    group = _sharding_group(zero1_optimizer, zero1_optimizer_groups)
    return grads.clip_grad_norm(parameters, max_norm, norm_type, sharding_group=group)


def _sharding_group(sharded: bool, groups: Sequence[Sequence[int]] | None) -> ProcessGroup | None:
    """Return the process group over which parameters are sharded, or None if they are not."""
    # The norm's sum of squares is summed over this group: for parameters that are not sharded
    # that would count each of them once per rank.
    if not sharded:
        if groups is not None:
            raise ValueError(f"zero1_optimizer_groups {groups} are given, and zero1_optimizer is False: set it to True")
        return None
    if groups is None:
        return parallel_state.get_data_parallel_group()
    return parallel_state.group_of([list(ranks) for ranks in groups])


def bucket_allreduce_gradients(grads_list: Iterable[Tensor], reduce_over_ep_group: bool = False) -> None:
    """Average gradients over the data-parallel group in place."""
    # Expert parallelism has its own data-parallel groups, which this library does not reduce
    # over.
    refuse(reduce_over_ep_group=reduce_over_ep_group)
    grads.bucket_allreduce_gradients(grads_list)


def allreduce_sequence_parallel_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Sum the gradients of norms and biases under sequence parallelism; see ``grads``."""
    grads.allreduce_sequence_parallel_gradients(optimizer)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: ProcessGroup | None = None,
    tile_cc: bool = False,
) -> Tensor:
    """Gather sequence shards; see ``mappings.gather_from_sequence_parallel_region``.

    Raises:
        ValueError: ``tile_cc`` is set.
    """
    refuse(tile_cc=tile_cc)
    return mappings.gather_from_sequence_parallel_region(input_, sequence_dimension, to_model_parallel, process_group)
