"""Weights of several experts in one tensor: shard attributes, and equal values for every number of ranks."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.initialization import InitMethod, initialize_sharded_, is_skipped
from nxd_memopt.parallel_layers.random import fork_if
from nxd_memopt.parallel_layers.utils import set_expert_model_parallel_attributes, set_tensor_model_parallel_attributes


def expert_weight(
    full_shape: tuple[int, ...],
    dim: int,
    stride: int,
    init_method: InitMethod,
    *,
    on_cpu: bool,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> nn.Parameter:
    """Return this rank's part of the weights of all experts, initialized unless on the meta device.

    Args:
        full_shape: ``(E, rows, columns)`` of all ranks together.
        dim: tensor-parallel dimension of one expert's weight, 0 or 1.
        stride: number of separately sharded blocks along it.
        init_method: initializes the full weight of one expert in place.
        on_cpu: draw full weights on the CPU, equal for every T and EP; False draws shards on the device.
        dtype: dtype of the weights.
        device: device of the weights.
    """
    experts, *one = full_shape
    shape = list(one)
    shape[dim] //= parallel_state.get_tensor_model_parallel_size()
    per_rank = experts // parallel_state.get_expert_model_parallel_size()
    weight = nn.Parameter(torch.empty(per_rank, *shape, dtype=dtype, device=device))
    set_tensor_model_parallel_attributes(weight, True, dim + 1, stride, full_shape=full_shape)
    set_expert_model_parallel_attributes(weight)
    if not is_skipped(weight):
        _initialize(weight, full_shape, dim, stride, init_method, on_cpu=on_cpu)
    return weight


@torch.no_grad()
def _initialize(
    weight: Tensor, full_shape: tuple[int, ...], dim: int, stride: int, init_method: InitMethod, *, on_cpu: bool
) -> None:
    """Draw the experts one after another; every rank draws all of them and keeps its own.

    The weights are then independent of EP, and no two experts are equal.
    """
    per_rank = weight.size(0)
    first_expert = parallel_state.get_expert_model_parallel_rank() * per_rank
    # Room for one expert of other ranks, whose values are drawn to keep the random streams equal and thrown away.
    dropped = torch.empty_like(weight[0])
    for expert in range(full_shape[0]):
        index = expert - first_expert
        own = weight[index] if 0 <= index < per_rank else dropped
        if on_cpu:
            set_tensor_model_parallel_attributes(own, True, dim, stride, full_shape=full_shape[1:])
            initialize_sharded_(cast(nn.Parameter, own), init_method)
        else:
            with fork_if(parallel_state.get_tensor_model_parallel_size() > 1):
                init_method(own)
