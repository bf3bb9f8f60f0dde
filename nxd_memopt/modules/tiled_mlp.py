"""The interface of MLP modules that can be computed by tiles of tokens, and the computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.modules.plain_layers import add_bias, require_plain
from nxd_memopt.ops.autograd import cast_if_autocast_enabled, save_inputs_first
from nxd_memopt.parallel_layers.functional.tiled_mlp import TiledMLP, TiledMLPOptions
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class MLPLayers:
    """The submodules of an MLP.

    Args:
        columns: gate and up projection of a gated MLP, or the first layer of another one.
        act: activation.
        row: the last layer, with ``input_is_parallel``.
        hidden_act: name of the activation.
    """

    columns: Sequence[nn.Module]
    act: nn.Module
    row: nn.Module
    hidden_act: str

    def require_plain(self) -> None:
        """Raise ``ValueError`` if a submodule is replaced, or has a hook or another forward.

        The tiles call none of the submodules.
        """
        require_plain("mlp_tile_tokens", self.columns, self.row, self.act)


def tiled_mlp(hidden: Tensor, layers: MLPLayers, tile_tokens: int) -> Tensor:
    """Compute the MLP for ``tile_tokens`` tokens at a time, forward and backward.

    Args:
        hidden: ``[B, S, H]``; under sequence parallelism ``[s, B, H]``.
        layers: the MLP's submodules.
        tile_tokens: tokens of a tile; under sequence parallelism the tokens of all ranks together.

    Returns:
        Tensor with the shape of ``hidden``.

    Raises:
        ValueError: a submodule is replaced or has a hook.
    """
    layers.require_plain()
    columns = cast("list[ColumnParallelLinear]", list(layers.columns))
    row = cast(RowParallelLinear, layers.row)
    biases = [layer.bias for layer in columns if layer.bias is not None]
    assert len(biases) in (0, len(columns)), "all layers have a bias, or none has"
    weights = [layer.weight for layer in columns]
    tensors = cast("list[Tensor]", cast_if_autocast_enabled(hidden, *weights, row.weight, *biases))
    column = columns[0].activation_sharding(*(layer.replica_group for layer in columns))
    gathered = 1
    if column.sequence_dimension is not None:
        gathered = backend.group_size(column.group)
    first = column.sequence_first(tensors[0])
    options = TiledMLPOptions(
        column, row.activation_sharding(), layers.hidden_act, len(columns), max(1, tile_tokens // gathered)
    )
    rows = first.reshape(-1, first.size(-1))
    with torch.autocast(hidden.device.type, enabled=False):
        # Saved before the Function runs, so that a recompute that ends here skips it.
        handle, saved = save_inputs_first(rows, *tensors[1:])
        output = cast(Tensor, TiledMLP.apply(options, handle, *saved))
    output = column.original_layout(output.view(first.shape))
    return add_bias(output, row)
