"""The temporary tensors of linear layers and experts with float8 operands, in the moments of a layer's backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from nxd_memopt.architectures.experts import TILE_ROWS, MoESizes
from nxd_memopt.planner.memory.expert_tensors import has_expert_kernels
from nxd_memopt.planner.memory.layer_moment import Moment
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.sizes.rank_sizes import RankSizes

OPERANDS = "float8 operands"
"""Name of the temporary tensors of a byte an element."""
_LINEARS = {
    "MLP, last projection": ("mlp out",),
    "MLP, first projections": ("mlp in",),
    "attention output projection": ("attention output",),
    "query, key and value projections": ("qkv",),
    "output projections": ("attention output", "mlp out"),
    "input projections": ("qkv", "mlp in"),
    "shared expert, last projection": ("mlp out",),
    "shared expert, first projections": ("mlp in",),
}
"""Moment -> linear layers whose weight gradients it computes, by the names of ``RankSizes.linear_elements``."""


_COLUMN_PARALLEL = ("qkv", "mlp in")


def with_operands(moments: Sequence[Moment], sizes: RankSizes, kernels: Kernels, fp8: Collection[str]) -> list[Moment]:
    """Return ``moments`` with the float8 operands of the linear layers ``fp8``, which replace gathered tensors.

    Column-parallel layers that train have a moment more: the gradient of their input has other operands than the
    gradients of their weights.
    """
    if not fp8:
        return list(moments)
    found: list[Moment] = []
    for moment in moments:
        names = [name for name in _LINEARS.get(moment.name, ()) if name in fp8]
        # Of a mixture of experts the shared one alone rounds.
        if sizes.moe is not None and moment.name.startswith("MLP"):
            names = []
        temporary = dict(moment.temporary)
        # Merged branches whose inputs are rounded have them in float8; dX of each branch exists before their sum.
        merged = {"normalised": 0, "inputs of the branches": 0} if set(_COLUMN_PARALLEL) <= set(names) else {}
        if names:
            # Columns of the inputs, rows of the gradients of outputs; frozen column-parallel layers gather nothing.
            is_frozen = sizes.adapters is not None and names[0] in _COLUMN_PARALLEL
            gathered = 0 if is_frozen else _joined_bytes(sizes)
            temporary |= {"gathered": gathered, **merged, OPERANDS: _operand_bytes(sizes, names)}
        if moment.name == "output projections" and "mlp out" in names and sizes.hidden_act != "relu":
            temporary["activation"] = sizes.column_bytes(sizes.width)
        # The gradient of the activation is computed at once, where bf16 has tiles of it.
        if names == ["mlp out"] and kernels.fused and sizes.is_gated and sizes.moe is None:
            temporary["dA"] = sizes.column_bytes(sizes.width)
        if names and names[0] in _COLUMN_PARALLEL and sizes.adapters is None:
            before = temporary | {"dW": 0, "dX": len(names) * temporary["dX"]}
            before[OPERANDS] += _input_gradient_bytes(sizes, names) - _joined_bytes(sizes)
            found.append(replace(moment, name=f"{moment.name}, gradient of the input", temporary=before))
        found.append(replace(moment, temporary=temporary))
    return found


def _widths(sizes: RankSizes, names: Sequence[str]) -> list[int]:
    """Return the outputs of column-parallel layers, or the inputs of row-parallel ones, on this rank."""
    return [sizes.linear_elements[name] // sizes.hidden for name in names]


def _input_gradient_bytes(sizes: RankSizes, names: Sequence[str]) -> int:
    """Return the operands that column-parallel layers free before the gradients of their weights.

    Rows of the outputs' gradients and the transposed weights.
    """
    return sum(_widths(sizes, names)) * (sizes.tokens + sizes.hidden)


def _operand_bytes(sizes: RankSizes, names: Sequence[str]) -> int:
    """Return the bytes of the float8 tensors of the weights' gradients of layers that are computed together.

    Of column-parallel layers the columns of the outputs' gradients, of this rank's inputs where backward rounds them
    again, and of the gathered inputs a copy that joins the ranks' columns. Of row-parallel layers, whose outputs are
    one tensor, rows and columns of its gradient, the transposed weights, and the columns of the inputs, one at a time.
    Columns are for gradients of weights.
    """
    widths = _widths(sizes, names)
    shard = sizes.shard_tokens * sizes.hidden
    if names[0] in _COLUMN_PARALLEL:
        if sizes.adapters is not None:
            return _input_gradient_bytes(sizes, names)
        again = shard * int(len(names) > 1)
        return sizes.tokens * sum(widths) + again + _joined_bytes(sizes)
    weights = sum(widths) * sizes.hidden
    if sizes.adapters is not None:
        return shard + weights
    # The columns of all ranks are gathered or transposed, next to this rank's rows and columns.
    return 2 * shard + _joined_bytes(sizes) + weights + sizes.tokens * max(widths)


def _joined_bytes(sizes: RankSizes) -> int:
    """Return the bytes of the residual stream's columns of all ranks, if the ranks have shards of them."""
    return sizes.tokens * sizes.hidden * int(sizes.shards > 1)


def with_expert_operands(moments: Sequence[Moment], sizes: RankSizes, kernels: Kernels) -> list[Moment]:
    """Return the moments of the kernels of experts with their float8 operands (``ops/fp8_experts.py``).

    A tensor is rounded before its product: rows, their columns for gradients of weights, and transposed weights. The
    copies of rows in bf16 are not made.
    """
    if sizes.moe is None or not (kernels.fused and has_expert_kernels(sizes, sizes.moe)):
        return list(moments)
    operands = _expert_operands(sizes, sizes.moe)
    found: list[Moment] = []
    for moment in moments:
        temporary = {**moment.temporary, "copied rows": 0}
        if moment.name == "MLP, last projection":
            # The gradient of the activation, which is freed before the gradient of the weight exists.
            before = {**temporary, "dW": 0, OPERANDS: operands["activation"]}
            found.append(replace(moment, name="MLP, gradient of the activation", temporary=before))
            temporary["dA of the rows"] = 0
        if moment.name in operands:
            temporary[OPERANDS] = operands[moment.name]
        found.append(replace(moment, temporary=temporary))
    return found


def _expert_operands(sizes: RankSizes, moe: MoESizes) -> dict[str, int]:
    """Return the bytes of float8 operands at the moments of the experts' backward."""
    rows, weight = moe.rows(sizes.tokens), moe.local_experts * sizes.hidden * moe.width
    # The columns of an expert end with zeros.
    columns = (rows + moe.local_experts * TILE_ROWS) * int(sizes.adapters is None)
    return {
        "activation": max((rows + columns) * sizes.hidden + weight, columns * (sizes.hidden + moe.width)),
        "MLP, last projection": columns * (sizes.hidden + moe.width),
        "MLP, gradient of the tokens": (rows + columns) * 2 * moe.width + 2 * weight,
        "MLP, first projections": columns * (2 * moe.width + sizes.hidden),
    }
