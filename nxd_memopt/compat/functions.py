"""neuronx-distributed's calling conventions of gradients and mappings, where they differ from ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.compat.layers import refuse
from nxd_memopt.parallel_layers import grads, mappings, parallel_state

Parameters = Tensor | Iterable[Tensor]


def get_grad_norm(
    parameters: Parameters,
    norm_type: float = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Sequence[Sequence[int]] | None = None,
    force_spmd: bool = True,
) -> Tensor:
    """``grads.get_grad_norm``; with ``zero1_optimizer`` each data-parallel rank holds a part of every parameter."""
    del force_spmd  # every rank runs the same program
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
    """``grads.clip_grad_norm``; see ``get_grad_norm``."""
    del force_spmd
    group = _sharding_group(zero1_optimizer, zero1_optimizer_groups)
    return grads.clip_grad_norm(parameters, max_norm, norm_type, sharding_group=group)


def _sharding_group(sharded: bool, groups: Sequence[Sequence[int]] | None) -> ProcessGroup | None:
    if not sharded:
        return None
    if groups is None:
        return parallel_state.get_data_parallel_group()
    return parallel_state.group_of([list(ranks) for ranks in groups])


def bucket_allreduce_gradients(grads_list: Iterable[Tensor], reduce_over_ep_group: bool = False) -> None:
    """``grads.bucket_allreduce_gradients``: the mean over the data-parallel group, in place."""
    refuse(reduce_over_ep_group=reduce_over_ep_group)
    grads.bucket_allreduce_gradients(grads_list)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: ProcessGroup | None = None,
    tile_cc: bool = False,
) -> Tensor:
    """``mappings.gather_from_sequence_parallel_region``; ``tile_cc`` is refused (``ValueError``)."""
    refuse(tile_cc=tile_cc)
    return mappings.gather_from_sequence_parallel_region(input_, sequence_dimension, to_model_parallel, process_group)
