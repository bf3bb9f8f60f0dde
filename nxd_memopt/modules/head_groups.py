"""Attention for a few heads at a time, from the projection of its input to the output projection.

Queries, keys, values, the attention result and their gradients then exist for one group of heads
only. The group runs again in backward, so that the layer saves its input alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from nxd_memopt.modules.attention import AttentionMask, RopeTables
from nxd_memopt.modules.plain_layers import add_bias, require_plain
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear, column_parallel, row_parallel
from nxd_memopt.planner.techniques.tiling import head_group_counts, require_head_groups

Checkpoint = Callable[..., Any]
"""Runs a function with arguments, saves the arguments only, and runs it again in backward."""


@dataclass(frozen=True)
class AttentionLayers:
    """The submodules of an attention module.

    Args:
        columns: projections of the input; the local output of each consists of heads.
        head_columns: output columns of one head of each projection.
        row: output projection.
        context: maps the outputs of ``columns``, the RoPE tables and the mask to the input of
            ``row``, for any number of heads.
    """

    columns: Sequence[nn.Module]
    head_columns: int
    row: nn.Module
    context: Callable[[tuple[Tensor, ...], RopeTables, AttentionMask], Tensor]

    def num_heads(self) -> list[int]:
        """Return the heads of each projection on this rank."""
        columns = cast("Sequence[ColumnParallelLinear]", self.columns)
        return [layer.output_size_per_partition // self.head_columns for layer in columns]

    def require_plain(self) -> None:
        """Raise ``ValueError`` if a projection is replaced, or has a hook or another forward."""
        require_plain("attention_head_groups", self.columns, self.row)

    def require_divisible(self, num_groups: int) -> None:
        """Raise ``ValueError`` unless this rank's heads can be divided into ``num_groups``."""
        require_head_groups(num_groups, self.num_heads())

    def group_counts(self) -> list[int]:
        """Return the numbers of groups into which this rank's heads can be divided, ascending."""
        return head_group_counts(self.num_heads())


def attention_by_head_groups(
    hidden: Tensor,
    rope: RopeTables,
    mask: AttentionMask,
    layers: AttentionLayers,
    num_groups: int,
    checkpoint: Checkpoint,
) -> Tensor:
    """Compute attention for one group of heads after the other.

    The result is the sum of the groups' contributions to the output projection, in the dtype of
    ``hidden``: the same sums as over tensor-parallel ranks. Under sequence parallelism each group
    gathers its input and reduces its output.

    Args:
        hidden: ``[B, S, H]``; under sequence parallelism ``[s, B, H]``.
        rope: RoPE tables.
        mask: mask in addition to causality.
        layers: the attention module's submodules.
        num_groups: number of groups.
        checkpoint: runs each group.

    Returns:
        Tensor with the shape of ``hidden``.

    Raises:
        ValueError: a submodule is replaced or has a hook, or the heads are not divisible.
    """
    layers.require_plain()
    layers.require_divisible(num_groups)
    output: Tensor | None = None
    for group in range(num_groups):
        part = checkpoint(_group_output, hidden, rope, mask, layers, group, num_groups)
        output = part if output is None else output + part
    assert output is not None
    return add_bias(output, cast(RowParallelLinear, layers.row))


def _group_output(
    hidden: Tensor, rope: RopeTables, mask: AttentionMask, layers: AttentionLayers, group: int, num_groups: int
) -> Tensor:
    """Return the contribution of one group of heads to the output, reduced over the ranks."""
    columns = cast("Sequence[ColumnParallelLinear]", layers.columns)
    row = cast(RowParallelLinear, layers.row)
    parameters: list[tuple[Tensor, Tensor | None]] = []
    for layer, num_heads in zip(columns, layers.num_heads(), strict=True):
        rows = _rows_of(group, num_groups, num_heads, layer.output_size_per_partition)
        parameters.append((layer.weight[rows], None if layer.bias is None else layer.bias[rows]))
    sharding = columns[0].activation_sharding(*(layer.replica_group for layer in columns))
    projected = column_parallel(hidden, parameters, sharding)
    context = layers.context(projected, rope, mask)
    width = row.weight.size(1) // num_groups
    return row_parallel([(context, row.weight[:, group * width : (group + 1) * width])], row)


def _rows_of(group: int, num_groups: int, num_heads: int, num_rows: int) -> slice:
    """Return the rows of a projection's weight that belong to the heads of ``group``.

    With more groups than heads (KV heads of grouped-query attention), consecutive groups share one.
    """
    head_rows = num_rows // num_heads
    first = group * num_heads // num_groups
    count = max(1, num_heads // num_groups)
    return slice(first * head_rows, (first + count) * head_rows)
