"""Pads attention heads to a multiple of the tensor-parallel size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_memopt.parallel_layers.rank_order import position_of_rank
from nxd_memopt.parallel_layers.utils import copy_tensor_model_parallel_attributes, padded_size


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Return how many heads to add to ``n_head`` so that ``tp_degree`` divides the sum."""
    return padded_size(n_head, tp_degree) - n_head


def pad_model(
    model: nn.Module,
    tp_degree: int,
    n_heads: int,
    wrapped_classes: Iterable[type[nn.Module]] = (),
    pad_hook_fn: Callable[[nn.Module, float], object] | None = None,
) -> nn.Module:
    """Pad parallel layers in place with zeros to their size for a padded number of heads.

    Column-parallel layers grow along their outputs, row-parallel layers along their inputs. Load
    the weights of an unpadded checkpoint before padding.

    Without ``wrapped_classes`` a column-parallel layer is padded if a submodule of ``model`` around it has a
    row-parallel layer too. Others, such as the output layer over the vocabulary, stay as they are: nothing would
    ignore their zeros. In neuronx-distributed they are padded too, which changes the loss.

    Args:
        model: model built for ``n_heads`` heads.
        tp_degree: tensor-parallel size that must divide the padded number of heads.
        n_heads: number of heads of ``model``.
        wrapped_classes: pad only modules of these classes and their submodules, with all their parallel
            layers.
        pad_hook_fn: called with each module and ``padded heads / n_heads``, to adapt head counts.

    Returns:
        ``model``.
    """
    ratio = (n_heads + get_number_of_extra_heads(n_heads, tp_degree)) / n_heads
    classes = tuple(wrapped_classes)
    roots = [model]
    unpaired: set[nn.Module] = set()
    if classes:
        roots = [module for module in model.modules() if isinstance(module, classes)]
    else:
        unpaired = _unpaired_layers(model)
    # Wrapped modules may contain each other: dict.fromkeys visits each module once, in order.
    # Padding a layer twice would multiply its size by the ratio twice.
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    for module in modules:
        if pad_hook_fn is not None:
            pad_hook_fn(module, ratio)
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module not in unpaired:
            _pad_linear(module, ratio)
    return model


def _unpaired_layers(model: nn.Module) -> set[nn.Module]:
    """Return the column-parallel layers whose output no row-parallel layer reads, such as one over the vocabulary.

    A layer has a partner if a module around it, other than ``model``, has a row-parallel layer at any depth. Of
    ``model`` itself its own row-parallel layers count.
    """
    paired: set[nn.Module] = set()
    for module in model.modules():
        inside = list(module.modules())
        if module is model:
            inside = list(module.children())
        if any(isinstance(each, RowParallelLinear) for each in inside):
            paired.update(inside)
    return {module for module in model.modules() if isinstance(module, ColumnParallelLinear) and module not in paired}


def _pad_linear(layer: ColumnParallelLinear | RowParallelLinear, ratio: float) -> None:
    # Zero output rows with zero biases give zero heads, which zero input columns of the following
    # row-parallel layer ignore: the model computes the same function as before.
    if isinstance(layer, ColumnParallelLinear):
        # Of the gathered output the first columns are kept, and each rank's zeros are between them.
        if layer.gather_output and round(layer.weight.size(0) * ratio) > layer.weight.size(0):
            raise ValueError(
                "pad_model pads each rank's output, and a ColumnParallelLinear has gather_output True: set it to "
                "False, or leave the layer out of wrapped_classes"
            )
        layer.weight = _padded(layer.weight, 0, ratio)
        if layer.bias is not None:
            layer.bias = _padded(layer.bias, 0, ratio)
        layer.output_size_per_partition = layer.weight.size(0)
    else:
        # The bias of a row-parallel layer belongs to its output, which stays as it is.
        layer.weight = _padded(layer.weight, 1, ratio)
        layer.input_size_per_partition = layer.weight.size(1)


def _padded(param: nn.Parameter, dim: int, ratio: float) -> nn.Parameter:
    """Return ``param`` with zeros appended along ``dim`` and the shard attributes updated."""
    extra = round(param.size(dim) * ratio) - param.size(dim)
    # F.pad takes (before, after) of the last dimension first, then of the dimension before it.
    padding = (0, extra)
    if dim < param.dim() - 1:
        padding = (0, 0, 0, extra)
    padded = nn.Parameter(F.pad(param.detach(), padding), requires_grad=param.requires_grad)
    copy_tensor_model_parallel_attributes(padded, param)
    # Each shard ends with zeros, so checkpoints written from now on have the padded full shape.
    description: Any = padded
    full_shape = list(description.full_shape)
    full_shape[dim] = padded.size(dim) * description.num_partitions
    description.full_shape = tuple(full_shape)
    return padded


def generate_padding_mask(
    num_heads: int,
    num_heads_with_pad: int,
    num_kv_heads: int,
    tp_degree: int,
    tp_rank: int,
    *,
    rank_stride: int | None = None,
) -> Tensor:
    """Return a mask of this rank's real query heads: boolean ``[num_heads_with_pad / tp_degree]``.

    The padding of each KV head is on the last of the ranks that hold a replica of the KV head.

    Args:
        num_heads: query heads of the model.
        num_heads_with_pad: query heads with padding; ``tp_degree`` divides it.
        num_kv_heads: KV heads.
        tp_degree: tensor-parallel size.
        tp_rank: tensor-parallel rank.
        rank_stride: distance between replicas of a KV head; default the layers' value.
    """
    per_rank = num_heads_with_pad // tp_degree
    replicas = max(tp_degree // num_kv_heads, 1)
    if rank_stride is None:
        rank_stride = backend.kv_rank_stride(tp_degree, replicas)
    kv_heads_per_rank = num_kv_heads * replicas // tp_degree
    # The query heads of a KV shard are numbered over the ranks with its replicas. This rank has
    # per_rank heads from ``first`` on; heads beyond the real ones of the KV shard are padding.
    first = per_rank * (position_of_rank(tp_rank, tp_degree, rank_stride) % replicas)
    return torch.arange(first, first + per_rank) < num_heads // num_kv_heads * kv_heads_per_rank
