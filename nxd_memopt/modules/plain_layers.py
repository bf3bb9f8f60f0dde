"""Checks of layers that a technique computes without calling them, and the bias of a row-parallel layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from nxd_memopt.parallel_layers.fusion import has_hooks
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear


def require_plain(option: str, columns: Sequence[nn.Module], row: nn.Module, *others: nn.Module) -> None:
    """Raise ``ValueError`` if a layer is replaced, or has a hook or another forward, which ``option`` would ignore.

    Args:
        option: the technique's option, for messages.
        columns: column-parallel layers.
        row: row-parallel layer.
        others: modules of any class.
    """
    expected = [*((layer, ColumnParallelLinear) for layer in columns), (row, RowParallelLinear)]
    for module, cls in expected:
        if type(module) is not cls:
            raise ValueError(f"{option} needs a {cls.__name__}, got {type(module).__name__}: leave {option} out")
    for module in (*columns, row):
        if getattr(module, "fp8", None) is not None:
            raise ValueError(f"{option} computes layers in bf16, and fp8 is on in them: leave one of them out")
    for module in (*columns, *others, row):
        if has_hooks(module) or "forward" in vars(module):
            raise ValueError(
                f"{option} does not call {type(module).__name__}, which has a hook or another forward: remove it, or "
                f"leave {option} out"
            )


def add_bias(output: Tensor, row: RowParallelLinear) -> Tensor:
    """Return ``output`` with the bias of ``row``, which is replicated and added after the reduction."""
    if row.bias is None:
        return output
    return output + row.bias.to(output.dtype)
