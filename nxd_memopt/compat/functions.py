"""Owns neuronx-distributed's calling conventions of checkpoints, gradients and mappings, where not ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.compat.layers import refuse
from nxd_memopt.parallel_layers import checkpointing, grads, mappings, parallel_state

Parameters = Tensor | Iterable[Tensor]


def save(
    checkpoint: Mapping[str, Any],
    output_dir: str | Path,
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """``checkpointing.save``; ``save_xser``, a file per tensor, changes nothing in what ``load`` returns."""
    del save_xser
    checkpointing.save(checkpoint, output_dir, save_serially, down_cast_bf16, master_dp_only)


def load(
    chkpt_path: str | Path,
    model: torch.nn.Module | None = None,
    model_or_optimizer: torch.nn.Module | torch.optim.Optimizer | None = None,
    model_key: str | None = "model",
    load_xser: bool = False,
    sharded: bool = True,
    strict: bool = True,
    master_dp_only: bool = True,
    weights_only: bool = False,
) -> Any:
    """``checkpointing.load`` of what ``save`` wrote, which never unpickles code, with or without ``weights_only``.

    Raises:
        ValueError: ``master_dp_only=False``: files of each data-parallel rank are not told apart.
    """
    del load_xser, weights_only
    refuse(load_of_every_data_parallel_rank=not master_dp_only)
    target = model if model is not None else model_or_optimizer
    return checkpointing.load(chkpt_path, target, model_key, sharded, strict)


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
