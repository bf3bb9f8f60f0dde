"""Tiles of attention in plain operations: their length, which ``ops/tiled_attention.py`` takes, and a report line."""

from __future__ import annotations

_SHORTEST_TILE = 512
_MOST_TILES = 8
_TILE_MULTIPLE = 128


def tile_length(sequence_length: int) -> int:
    """Return the positions per tile: S / 8 rounded up to a multiple of 128, and at least 512.

    With at most 8 x 8 tiles, of which causality needs 36, the number of operations per layer in a
    compiled graph is bounded for every S. The scores of one tile are 1/64 of S x S from
    4,096 positions on.
    """
    eighth = -(-sequence_length // _MOST_TILES)
    return max(_SHORTEST_TILE, -(-eighth // _TILE_MULTIPLE) * _TILE_MULTIPLE)


def describe_tiles(sequence_length: int) -> str:
    """Return what tiled attention of ``sequence_length`` computes, for a report."""
    tile = tile_length(sequence_length)
    tiles = -(-sequence_length // tile)
    visible = tiles * (tiles + 1) // 2
    share = visible * tile**2 / sequence_length**2
    return (
        f"{visible} tiles of {min(tile, sequence_length)} x {min(tile, sequence_length)} scores, one at a time and "
        f"never S x S: {min(share, 1):.0%} of all scores are computed, tiles between two documents are not skipped"
    )
