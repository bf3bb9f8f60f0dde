"""Finds the output projections whose input columns follow the ranks of a query projection's heads."""

from __future__ import annotations

from typing import Any

from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers.base_linear import BaseParallelLinear
from nxd_memopt.parallel_layers.utils import set_tensor_model_parallel_attributes


def describe_output_projections(model: nn.Module, *, strict: bool = True) -> None:
    """Set the shard attributes of each output projection to the order of its query heads.

    If replicas of KV heads are not on consecutive ranks (``rank_order``), a rank's query heads are
    not consecutive, and the output projection must hold the columns of the same heads. A
    ``RowParallelLinear`` built without ``rank_stride`` lacks this information:
    neuronx-distributed's models do not pass it. This function finds the layer as the only
    row-parallel layer with h * d inputs in the module that has the ``GQAQKVColumnParallelLinear``.

    Only attributes change, not values. The layer computes the same result; full tensors gathered
    from it, or sliced for it, have Hugging Face's order of heads. Call it before gathering or
    slicing; a second call changes nothing.

    Args:
        model: model with the attention modules.
        strict: False leaves layers unchanged if the output projection is not found.

    Raises:
        ValueError: none or several such layers, and none was built with ``rank_stride``.
    """
    for name, parent in model.named_modules():
        for projection in parent.children():
            stride = getattr(projection, "rank_stride", 1)
            query_size = getattr(projection, "query_size", None)
            if query_size is None or stride == 1 or getattr(projection, "gather_output", False):
                continue  # gathered outputs are in the full order
            rows = [layer for layer in parent.children() if _reads(layer, query_size)]
            # Built with ``rank_stride``, or set by an earlier call: nothing to do.
            if any(layer.rank_stride == stride for layer in rows):
                continue
            if len(rows) == 1:
                _describe(rows[0], stride)
            elif strict:
                raise ValueError(
                    f"{name or type(parent).__name__} has query heads on ranks {stride} apart and {len(rows)} "
                    f"row-parallel layers with {query_size} inputs: build the output projection, one of them, by "
                    f"RowParallelLinear(..., rank_stride={stride}), in the module that has the QKV projection"
                )


def _reads(layer: nn.Module, query_size: int) -> Any:
    """Return whether ``layer`` is row-parallel over the local query heads.

    A layer that splits a full input itself is not: its input is in the full order.
    """
    if not isinstance(layer, BaseParallelLinear) or layer.weight_partition_dim != 1:
        return False
    return getattr(layer, "input_is_parallel", False) and layer.full_input_size == query_size


def _describe(layer: Any, rank_stride: int) -> None:
    """Set ``rank_stride`` of ``layer`` and the shard attributes that depend on it."""
    # ``partition_index`` depends on the stride: which columns of the full weight this rank holds.
    # Every other attribute is the one that the layer was built with.
    layer.rank_stride = rank_stride
    weight = layer.weight
    set_tensor_model_parallel_attributes(
        weight,
        True,
        weight.partition_dim,
        weight.partition_stride,
        weight.num_partitions,
        full_shape=weight.full_shape,
        rank_stride=rank_stride,
        rank=backend.group_rank(layer.tensor_parallel_group),
    )
