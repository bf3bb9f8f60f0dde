"""Computes the MLPs of a model by tiles of tokens, and its attention by groups of heads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.memory.recompute import checkpoint
from nxd_memopt.modules.attention import AttentionMask, RopeTables
from nxd_memopt.modules.head_groups import AttentionLayers, attention_by_head_groups
from nxd_memopt.modules.tiled_mlp import MLPLayers, tiled_mlp
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear
from nxd_memopt.parallel_layers.wrapping import Forward, unwrap_forward, wrap_forward
from nxd_memopt.planner.techniques.tiling import auto_head_groups, auto_tile_tokens, head_group_bytes, mlp_tile_bytes


class MLPTiles:
    """The tile size of all MLPs of a model.

    Args:
        tile_tokens: tokens of a tile, or ``"auto"``: chosen in the first call, from the memory that
            is free on the fullest tensor-parallel rank, and then fixed.
    """

    def __init__(self, tile_tokens: int | Literal["auto"]) -> None:
        self._tile_tokens = tile_tokens

    def run(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """Return the output of the MLP ``module`` for ``hidden``."""
        layers = cast(Any, module).layers()
        tile_tokens = self._tile_tokens
        if isinstance(tile_tokens, str):
            tile_tokens = _fitting_tokens(layers, hidden)
            self._tile_tokens = tile_tokens
        return tiled_mlp(hidden, layers, tile_tokens)


def _fitting_tokens(layers: MLPLayers, hidden: Tensor) -> int:
    """Return the tokens of a tile that fits the free memory, equal on all ranks of a group."""
    layers.require_plain()
    column = cast(ColumnParallelLinear, layers.columns[0])
    bytes_per_token = mlp_tile_bytes(
        hidden_size=hidden.size(-1),
        columns_per_partition=len(layers.columns) * column.output_size_per_partition,
        width_per_partition=column.output_size_per_partition,
        element_bytes=hidden.element_size(),
    )
    return auto_tile_tokens(_free_bytes(column, hidden.device), bytes_per_token)


def _free_bytes(layer: ColumnParallelLinear, device: torch.device) -> int | None:
    """Return the free bytes of the fullest tensor-parallel rank, or None if the device does not report them."""
    transfers = backend.host_transfers()
    if transfers is None:
        return None
    # Ranks with different tiles or groups would wait for each other's collectives forever.
    free = torch.tensor(transfers.free_bytes(), device=device, dtype=torch.int64)
    return int(backend.all_reduce(free, layer.tensor_parallel_group, "min").item())


def apply_tiles(modules: Sequence[nn.Module], tile_tokens: int | Literal["auto"]) -> None:
    """Compute the MLPs ``modules``, which ``require_tiles`` accepts, by tiles; replaces an earlier choice."""
    tiles = MLPTiles(tile_tokens)
    for module in modules:
        wrap_forward(module, "tiles", functools.partial(_tiled, tiles, module))


def require_tiles(modules: Sequence[nn.Module], tile_tokens: int | Literal["auto"]) -> None:
    """Raise ``ValueError`` if a module is no MLP of this library."""
    if not modules:
        raise ValueError(f"mlp_tile_tokens {tile_tokens!r}: the model has no MLP to compute by tiles: leave it out")
    for module in modules:
        if not hasattr(module, "layers"):
            raise ValueError(f"mlp_tile_tokens {tile_tokens!r} has no tiles of a {type(module).__name__}: leave it out")


class HeadGroups:
    """The groups of heads of all attention modules of a model.

    Args:
        num_groups: groups, or ``"auto"``: chosen in the first call, from the memory that is free on
            the fullest tensor-parallel rank, and then fixed. If all heads together fit, the modules
            run without groups.
    """

    def __init__(self, num_groups: int | Literal["auto"]) -> None:
        self._num_groups = num_groups
        self._is_chosen = num_groups == "auto"

    def run(self, module: nn.Module, forward: Forward, hidden: Tensor, rope: RopeTables, mask: AttentionMask) -> Tensor:
        """Return the output of the attention ``module``, whose own forward is ``forward``."""
        layers = cast(Any, module).layers()
        num_groups = self._num_groups
        if isinstance(num_groups, str):
            num_groups = _fitting_groups(layers, hidden)
            self._num_groups = num_groups
        # A single group would run attention once more in backward and save nothing.
        if self._is_chosen and num_groups == 1:
            return forward(hidden, rope, mask)
        return attention_by_head_groups(hidden, rope, mask, layers, num_groups, checkpoint)


def _fitting_groups(layers: AttentionLayers, hidden: Tensor) -> int:
    """Return the groups of heads of which one fits the free memory, equal on all ranks of a group."""
    layers.require_plain()
    column = cast(ColumnParallelLinear, layers.columns[0])
    sharding = column.activation_sharding()
    tokens = hidden.numel() // hidden.size(-1)
    if sharding.sequence_dimension is not None:
        tokens *= backend.group_size(sharding.group)
    query_size = cast(Tensor, layers.row.weight).size(1)
    columns = sum(cast(ColumnParallelLinear, layer).output_size_per_partition for layer in layers.columns)
    bytes_of_all = head_group_bytes(
        tokens,
        query_size=query_size,
        kv_size=(columns - query_size) // 2,
        num_heads=max(layers.num_heads()),
        element_bytes=hidden.element_size(),
    )
    return auto_head_groups(_free_bytes(column, hidden.device), layers.group_counts(), bytes_of_all)


def apply_head_groups(modules: Sequence[nn.Module], num_groups: int | Literal["auto"]) -> None:
    """Compute ``modules``, which ``require_head_groups`` accepts, by groups of heads; replaces an earlier choice."""
    groups = HeadGroups(num_groups)
    for module in modules:
        wrap_forward(module, "tiles", functools.partial(_by_head_groups, groups, module))


def require_head_groups(modules: Sequence[nn.Module], num_groups: int | Literal["auto"]) -> None:
    """Raise ``ValueError`` if a module is no attention module of this library, or its heads are not divisible."""
    for module in modules:
        if not hasattr(module, "layers"):
            raise ValueError(
                f"attention_head_groups {num_groups!r} has no groups of a {type(module).__name__}: leave it out"
            )
        if not isinstance(num_groups, str):
            cast(Any, module).layers().require_divisible(num_groups)


def _by_head_groups(groups: HeadGroups, module: nn.Module, forward: Forward) -> Any:
    return functools.partial(groups.run, module, forward)


def remove_tiles(modules: Sequence[nn.Module]) -> None:
    """Undo ``apply_tiles`` and ``apply_head_groups``."""
    for module in modules:
        unwrap_forward(module, "tiles")


def _tiled(tiles: MLPTiles, module: nn.Module, forward: Forward) -> Any:
    del forward
    return functools.partial(tiles.run, module)
