"""Writes ZeRO-1 states in neuronx-distributed's layout.

With D data-parallel ranks, torch_xla pads dimension 0 of a parameter ``[n_0, ...]`` to a multiple
of D. Rank i stores the rows ``[i R, (i + 1) R)``, R = ceil(n_0 / D). This library shards by
elements: rank i stores ``[i c, (i + 1) c)`` of the flat parameter, c = ceil(n / D). If D divides
n_0, both are the same elements.

torch_xla cannot shard a 0-dim parameter. Its states and master are written as for a parameter of
shape ``[1]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers.utils import padded_size


def to_row_shards(flat: Tensor, shape: Sequence[int], sharding: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Return the rows that torch_xla assigns to this rank, ``[R, ...]``, from this rank's flat
    shard.

    If D does not divide the rows, all ranks of the group must call: each all-gathers the full
    parameter.

    Args:
        flat: this rank's shard, 1-D of ceil(n / D) elements.
        shape: shape of the parameter on this tensor-parallel rank, ``[n_0, ...]``.
        sharding: ``[rank, D]``.
        group: the sharding group.
    """
    rank, size = sharding
    shape = shape or (1,)
    rows = padded_size(shape[0], size) // size
    # If D divides n_0, c = R n_1 n_2 ...: the flat shard is exactly the R rows, without
    # communication.
    if shape[0] % size == 0:
        return flat.view(rows, *shape[1:])
    # Otherwise the row boundaries lie inside flat shards of other ranks. Memory: one full parameter
    # at a time.
    with backend.outside_step():
        gathered = backend.all_gather(flat.contiguous(), group)
        full = gathered[: math.prod(shape)].view(*shape)
        return cut_rows(full, rank, size).clone()


def cut_rows(full: Tensor, rank: int, size: int) -> Tensor:
    """Return rows ``[rank R, (rank + 1) R)`` of ``full``, zero-padded to a multiple of ``size``
    rows.
    """
    if full.dim() == 0:
        full = full.reshape(1)
    rows = padded_size(full.size(0), size) // size
    # ``F.pad`` takes pairs from the last dimension to the first: only dimension 0 grows.
    padded = F.pad(full, [0, 0] * (full.dim() - 1) + [0, rows * size - full.size(0)])
    return padded.narrow(0, rank * rows, rows)


def to_nxd_layout(
    state: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    masters: Mapping[int, Tensor],
    group: ProcessGroup | None,
) -> dict[str, Any]:
    """Return the state dict for torch_xla's ``ZeroRedundancyOptimizer.load_state_dict``.

    All ranks of the group call.

    Args:
        state: ``NeuronZero1Optimizer.state_dict()``, which numbers only the trained parameters.
        param_groups: the optimizer's groups, frozen parameters included: torch_xla numbers frozen
            parameters too.
        masters: flat masters by the numbers in ``state``; of all parameters, or empty.
        group: the sharding group.
    """
    sharding = state["sharding"]
    params = [param for options in param_groups for param in options["params"]]
    # ``position[k]`` is the number of the k-th trained parameter among all parameters.
    position = [i for i, param in enumerate(params) if param.requires_grad]
    # The order of these calls is the order of the all-gathers, and equal on all ranks of the group:
    # every rank has a shard of each state, under the same numbers and names.
    base_state: dict[int, dict[str, Any]] = {}
    for i, values in state["state"].items():
        param = params[position[i]]
        base_state[position[i]] = {
            name: _state_to_rows(value, name, param, sharding, group) for name, value in values.items()
        }
    # torch_xla numbers all parameters, ``state_dict()`` only the trained ones
    groups = []
    numbers_by_group = number_parameters(param_groups)
    for options, numbers in zip(state["param_groups"], numbers_by_group, strict=True):
        groups.append({**options, "params": numbers})
    # torch_xla stores the base optimizer's states under ``base_state`` and leaves ``state`` empty.
    nxd: dict[str, Any] = {
        "state": {},
        "param_groups": groups,
        "base_state": base_state,
        "shape_info": {i: torch.Size(param.shape) for i, param in enumerate(params)},
        "sharding": list(sharding),
    }
    if masters:
        rows: dict[int, Tensor] = {}
        for i, master in masters.items():
            param = params[position[i]]
            rows[position[i]] = _state_to_rows(master, "master", param, sharding, group)
        # torch_xla keeps masters of frozen parameters too. The optimizer has none: cut them from
        # the parameters.
        for i, param in enumerate(params):
            if i not in rows:
                rows[i] = cut_rows(param.detach().float(), *sharding)
        nxd["sharded_master_weights"] = dict(sorted(rows.items()))
    return nxd


def _state_to_rows(value: Any, name: str, param: Tensor, sharding: Sequence[int], group: ProcessGroup | None) -> Any:
    """Return ``value`` as torch_xla's rows if it is a flat shard of ``param``, and else unchanged.

    A state with one value per element of the shard is converted; step counters and scalars are
    not.
    """
    length = padded_size(math.prod(param.shape), sharding[1]) // sharding[1]
    if has_elements(value, name, param) and value.numel() == length:
        return to_row_shards(value, param.shape, sharding, group)
    return value


def has_elements(value: Any, name: str, param: Tensor) -> bool:
    """Return whether the state ``name`` has one value per element of ``param``, unlike a step
    counter.

    The states of a 0-dim parameter have no dimension either. Its counter is recognized by torch's
    name, ``step``.
    """
    if not isinstance(value, Tensor):
        return False
    return value.dim() > 0 or (param.dim() == 0 and name != "step")


def number_parameters(param_groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the numbers of the parameters by group, counted over all groups."""
    numbers = []
    start = 0
    for options in param_groups:
        stop = start + len(options["params"])
        numbers.append(list(range(start, stop)))
        start = stop
    return numbers
