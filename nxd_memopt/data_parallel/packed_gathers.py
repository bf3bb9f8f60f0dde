"""Gathers weights that share an input into one storage, so that one matmul computes them at ZeRO stage 3 too."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nxd_memopt.modules.packed_weights import PackedWeights
from nxd_memopt.ops.parts import packed_view, split_sizes

# What FSDP2 (torch 2.9 to 2.13) has for each parameter: the flat tensor into which its rows are
# gathered, the parameter that is a view of it, and the methods that allocate and free its memory.
_INTERNALS = ("all_gather_outputs", "alloc_all_gather_outputs", "free_unsharded_param", "_module_info")


PackedGroup = tuple[nn.Module, ...]
"""Layers whose weights are adjacent in memory, in this order."""


class _SharedStorage:
    """Memory of the gathered weights of a group; allocated and freed with each of its parameters."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(num_elements, dtype=dtype, device=device)
        self._bytes = self.tensor.untyped_storage().size()

    def allocate(self) -> None:
        # FSDP2 calls it for each parameter of the group, before the rows of any of them arrive.
        storage = self.tensor.untyped_storage()
        if storage.size() != self._bytes:
            storage.resize_(self._bytes)

    def free(self) -> None:
        storage = self.tensor.untyped_storage()
        if storage.size():
            storage.resize_(0)


def packed_groups(model: nn.Module) -> list[PackedGroup]:
    """Return the groups of trained weights that are packed now; call before they are sharded."""
    groups: list[PackedGroup] = []
    for module in model.modules():
        if not isinstance(module, PackedWeights):
            continue
        layers = [module.get_submodule(name) for name in module.shared_input_layers]
        weights = [getattr(layer, "weight", None) for layer in layers]
        if not all(isinstance(weight, nn.Parameter) and weight.requires_grad for weight in weights):
            continue
        if packed_view([weight for weight in weights if weight is not None], 0) is not None:
            groups.append(tuple(layers))
    return groups


def gather_packed(unit: nn.Module, groups: Sequence[PackedGroup], *, dtype: torch.dtype, num_ranks: int) -> None:
    """Let the weights of each group in ``unit`` be gathered next to each other.

    FSDP2 gathers the rows of each parameter into a tensor of its own and keeps that tensor for later
    gathers. These tensors are created here, as adjacent parts of one storage.

    A group whose rows the ranks do not divide equally stays separate: the padding of each gathered
    weight would be between it and the next one.

    Args:
        unit: a module that ``fully_shard`` has sharded, before its first forward.
        groups: the groups of the model; those in other units are left alone.
        dtype: dtype of the gathered weights.
        num_ranks: ranks that share the rows.
    """
    # Keyed by module and name: ``fully_shard`` has replaced the Parameter objects by DTensors.
    state: Any = unit
    params = {
        (id(param._module_info.module), param._module_info.param_name): param
        for param in state._get_fsdp_state()._fsdp_param_group.fsdp_params
        if _has_internals(param)
    }
    for layers in groups:
        found = [params.get((id(layer), "weight")) for layer in layers]
        shapes = [tuple(layer.get_parameter("weight").shape) for layer in layers]
        if None not in found and not any(shape[0] % num_ranks for shape in shapes):
            _share_storage(found, shapes, dtype)


def _has_internals(param: Any) -> bool:
    missing = [name for name in _INTERNALS if not hasattr(param, name)]
    if missing or param.all_gather_outputs:
        warnings.warn(
            f"torch {torch.__version__} gathers sharded weights in another way than 2.9 to 2.13 "
            f"({', '.join(missing) or 'before the first forward'}): weights with one input use several matmuls",
            stacklevel=2,
        )
        return False
    return True


def _share_storage(params: Sequence[Any], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
    """Make the gathered weights of ``params`` adjacent parts of one storage, which has no memory yet."""
    # FSDP2 copies the gathered rows into ``all_gather_outputs`` and reads ``_unsharded_param`` as their view. With
    # both prepared here it allocates nothing itself: its calls to allocate and to free reach the shared storage.
    sizes = [torch.Size(shape).numel() for shape in shapes]
    shared = _SharedStorage(sum(sizes), dtype, params[0].sharded_param.device)
    flat = split_sizes(shared.tensor, sizes)
    for param, part, shape in zip(params, flat, shapes, strict=True):
        param.all_gather_outputs = [part]
        param._unsharded_param = nn.Parameter(part.view(shape))
        param.alloc_all_gather_outputs = shared.allocate
        param.free_unsharded_param = shared.free
    shared.free()
