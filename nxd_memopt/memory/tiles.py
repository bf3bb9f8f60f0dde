"""Computes the MLPs of a model by tiles of tokens, and its attention by groups of heads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.memory.recompute import checkpoint
from nxd_memopt.memory.wrapping import Forward, unwrap_forward, wrap_forward
from nxd_memopt.modules.head_groups import attention_by_head_groups
from nxd_memopt.modules.tiled_mlp import MLPLayers, tiled_mlp
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear
from nxd_memopt.planner.formulas import auto_tile_tokens, mlp_tile_bytes


class TileableMLP(Protocol):
    """An MLP module that names its submodules."""

    def layers(self) -> MLPLayers: ...


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
        layers = cast(TileableMLP, module).layers()
        tile_tokens = self._tile_tokens
        if isinstance(tile_tokens, str):
            tile_tokens = _fitting_tokens(layers, hidden)
            self._tile_tokens = tile_tokens
        return tiled_mlp(hidden, layers, tile_tokens)


def _fitting_tokens(layers: MLPLayers, hidden: Tensor) -> int:
    """Return the tokens of a tile that fits the free memory, equal on all ranks of a group."""
    layers.require_plain()
    column = cast(ColumnParallelLinear, layers.columns[0])
    transfers = backend.host_transfers()
    free_bytes = None
    if transfers is not None:
        # Ranks with different tiles would wait for each other's collectives forever.
        free = torch.tensor(transfers.free_bytes(), device=hidden.device, dtype=torch.int64)
        free_bytes = int(backend.all_reduce(free, column.tensor_parallel_group, "min").item())
    bytes_per_token = mlp_tile_bytes(
        1,
        hidden_size=hidden.size(-1),
        columns_per_partition=len(layers.columns) * column.output_size_per_partition,
        width_per_partition=column.output_size_per_partition,
        element_bytes=hidden.element_size(),
    )
    return auto_tile_tokens(free_bytes, bytes_per_token)


def apply_tiles(modules: Sequence[nn.Module], tile_tokens: int | Literal["auto"]) -> None:
    """Compute the MLPs ``modules`` by tiles; replaces an earlier choice.

    Raises:
        ValueError: the device's views do not share memory, or a module is no MLP of this library.
    """
    if not backend.views_share_memory:
        raise ValueError(
            f"mlp_tile_tokens {tile_tokens!r} writes tiles in place, and the backend {backend.name} "
            "compiles tensors without shared memory: leave it out"
        )
    for module in modules:
        if not hasattr(module, "layers"):
            raise ValueError(f"mlp_tile_tokens {tile_tokens!r} has no tiles of a {type(module).__name__}: leave it out")
    tiles = MLPTiles(tile_tokens)
    for module in modules:
        wrap_forward(module, "tiles", functools.partial(_tiled, tiles, module))


def apply_head_groups(modules: Sequence[nn.Module], num_groups: int) -> None:
    """Compute the attention ``modules`` by groups of heads; replaces an earlier choice.

    Raises:
        ValueError: the device recomputes from arguments only, a module is no attention module of
            this library, or its heads are not divisible.
    """
    if not backend.views_share_memory:
        raise ValueError(
            f"attention_head_groups {num_groups} recomputes slices of weights, and the backend {backend.name} "
            "recomputes from a function's arguments only: leave it out"
        )
    for module in modules:
        if not hasattr(module, "layers"):
            raise ValueError(
                f"attention_head_groups {num_groups} has no groups of a {type(module).__name__}: leave it out"
            )
        cast(Any, module).layers().require_divisible(num_groups)
    for module in modules:
        wrap_forward(module, "tiles", functools.partial(_by_head_groups, num_groups, module))


def _by_head_groups(num_groups: int, module: nn.Module, forward: Forward) -> Any:
    del forward
    return functools.partial(_attention_by_head_groups, num_groups, module)


def _attention_by_head_groups(num_groups: int, module: nn.Module, hidden: Tensor, rope: Any, mask: Any) -> Tensor:
    layers = cast(Any, module).layers()
    return attention_by_head_groups(hidden, rope, mask, layers, num_groups, checkpoint)


def remove_tiles(modules: Sequence[nn.Module]) -> None:
    """Undo ``apply_tiles``."""
    for module in modules:
        unwrap_forward(module, "tiles")


def _tiled(tiles: MLPTiles, module: nn.Module, forward: Forward) -> Any:
    del forward
    return functools.partial(tiles.run, module)
