"""Autograd function of an MLP computed by tiles of tokens, which saves its input only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import ChunkedAllGather
from nxd_memopt.ops.activation import ACTIVATIONS, activation_gradient, gated_activation, gated_activation_gradient
from nxd_memopt.ops.autograd import SavedInputs, as_dtype, first_derivative_only, link_saved_inputs, saved_inputs
from nxd_memopt.ops.cross_entropy import add_matmul
from nxd_memopt.ops.parts import packed_view, split_sizes
from nxd_memopt.parallel_layers.functional.linear import (
    ActivationSharding,
    ColumnActivationSharding,
    input_grad_reduction,
    packed_products,
)


@dataclass(frozen=True)
class TiledMLPOptions:
    """What a tiled MLP computes.

    Args:
        column: sharding of the input.
        row: sharding of the output.
        hidden_act: one of ``ops.activation.ACTIVATIONS``.
        num_columns: weights of the first layer: 2 for gate and up of a gated MLP, else 1.
        tile_rows: rows of this rank's input that are computed at a time.
    """

    column: ColumnActivationSharding
    row: ActivationSharding
    hidden_act: str
    num_columns: int
    tile_rows: int

    def tiles(self, x: Tensor) -> Iterator[slice]:
        """Yield the tiles of the rows of ``x``; the last one may be shorter."""
        for start in range(0, x.size(0), self.tile_rows):
            yield slice(start, min(start + self.tile_rows, x.size(0)))

    def activate(self, columns: Sequence[Tensor]) -> Tensor:
        if self.num_columns == 2:
            gate, up = columns
            return gated_activation(gate, up, self.hidden_act)
        return ACTIVATIONS[self.hidden_act](columns[0])

    def activation_gradient(self, columns: Sequence[Tensor], grad: Tensor) -> Tensor:
        """Overwrite ``columns`` with their gradients, and return the activation."""
        if self.num_columns == 2:
            gate, up = columns
            return gated_activation_gradient(gate, up, grad, self.hidden_act)
        return activation_gradient(columns[0], grad, self.hidden_act)

    def by_kind(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        """Split (column weights, row weight, column biases)."""
        return tensors[: self.num_columns], tensors[self.num_columns], tensors[self.num_columns + 1 :]


class TiledMLP(torch.autograd.Function):
    """``Y = reduce(act(X W_i^t + b_i) W^t)`` on sequence-first rows ``[rows, H]``, tile by tile.

    Under sequence parallelism a tile is gathered and reduced by itself: the full sequence ``[S, H]``
    never exists, and the bytes that move are those of one gather. All ranks have equally many tiles
    and the same order of collectives, because their shards are equally long.

    Forward saves X and the weights before it computes, so a recomputed layer that ends in the MLP
    does not run the MLP again; backward computes the first layer of each tile once more, but not the
    second one. Weight gradients of the tiles are summed in fp32 (fp64 for fp64) and rounded once;
    each parameter gets one gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, options: TiledMLPOptions, handle: SavedInputs | None, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.options = options
        link_saved_inputs(ctx, handle, x, *parameters)
        weights, row_weight, biases = options.by_kind(parameters)
        output = x.new_empty(x.size(0), row_weight.size(0))
        for tile in options.tiles(x):
            gathering = options.column.gather(x[tile], materialize=False)
            activated = options.activate(_columns(gathering, weights, biases))

            def rows(start: int, stop: int, activated: Tensor = activated) -> Tensor:
                return F.linear(activated[start:stop], row_weight)

            reduction = options.row.reduce(rows, (activated.size(0), row_weight.size(0)), x.dtype)
            output[tile] = as_dtype(reduction.wait(), x.dtype)
            # Otherwise this tile would still exist while the next one is computed.
            del activated, rows, reduction
        return output

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        options: TiledMLPOptions = ctx.options
        (x, *parameters), (needs_input, *needs_grad) = saved_inputs(ctx)
        sums = _ParameterSums(options.num_columns, needs_grad, torch.promote_types(x.dtype, torch.float32))
        input_grad = torch.empty_like(x) if needs_input else None
        for tile in options.tiles(x):
            tile_grad = None
            if input_grad is not None:
                tile_grad = input_grad[tile]
            _tile_backward(options, parameters, sums, x[tile], grad[tile], tile_grad)
        return None, None, input_grad, *sums.results(parameters)


def _tile_backward(
    options: TiledMLPOptions,
    parameters: Sequence[Tensor],
    sums: _ParameterSums,
    x: Tensor,
    grad: Tensor,
    input_grad: Tensor | None,
) -> None:
    """Add the gradients of a tile to ``sums``, and write that of its input to ``input_grad``.

    A function of its own, so that a tile's tensors are free before those of the next one exist.
    """
    weights, row_weight, biases = options.by_kind(parameters)
    gathering = options.column.gather(x)
    columns = _columns(gathering, weights, biases)
    # The gather of dY may reuse the buffer of this one.
    full = gathering.wait(copy=True)
    # dA = dY W, and one kernel that recomputes A and overwrites the columns with their
    # gradients: 4 * F/T FLOPs for each element of dY, two GEMMs.
    arriving = options.row.gather(grad, materialize=False)
    for start, rows in arriving.chunks(4 * row_weight.size(1)):
        part = slice(start, start + rows.size(0))
        activated = options.activation_gradient([column[part] for column in columns], rows @ row_weight)
        sums.add_row(rows, activated)
        del activated
    reduction = None
    if input_grad is not None:
        reduction = input_grad_reduction(options.column, columns, weights)
    # These GEMMs overlap with the reduction.
    sums.add_columns(columns, full)
    if input_grad is not None and reduction is not None:
        input_grad.copy_(reduction.wait())


def _columns(gathering: ChunkedAllGather, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Sequence[Tensor]:
    return packed_products(gathering, weights, biases or [None] * len(weights))


class _ParameterSums:
    """Sums of the tiles' parameter gradients, by position among the parameters: columns, row, biases."""

    def __init__(self, num_columns: int, needed: Sequence[bool], dtype: torch.dtype) -> None:
        self._num_columns = num_columns
        self._needed = needed
        self._dtype = dtype
        self._sums: dict[int, Tensor] = {}
        self._packed: Tensor | None = None  # the sum of all columns, if their gradients are one tensor

    def _add(self, position: int, a: Tensor, b: Tensor) -> None:
        if self._needed[position]:
            self._sums[position] = add_matmul(self._sums.get(position), a, b, self._dtype)

    def add_row(self, grads: Tensor, activated: Tensor) -> None:
        """Add ``dW = dY^t A`` of some rows of a tile."""
        self._add(self._num_columns, grads.t(), activated)

    def add_columns(self, grads: Sequence[Tensor], x: Tensor) -> None:
        """Add ``dW_i = dZ_i^t X`` and ``db_i`` of a tile."""
        needs_biases = self._needed[self._num_columns + 1 :]
        for position, grad in enumerate(grads[: len(needs_biases)], self._num_columns + 1):
            if self._needed[position]:
                self._sums[position] = self._sums.get(position, 0) + grad.sum(0, dtype=self._dtype)
        # Packed gradients give all dW_i in one GEMM.
        packed = None
        if all(self._needed[: self._num_columns]):
            packed = packed_view(grads, -1)
        if packed is not None:
            self._packed = add_matmul(self._packed, packed.t(), x, self._dtype)
            return
        assert self._packed is None, "the gradients of all tiles have one layout"
        for position, grad in enumerate(grads):
            self._add(position, grad.t(), x)

    def results(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients in the order and the dtypes of ``parameters``, None if not needed."""
        if self._packed is not None:
            rounded = self._packed.to(parameters[0].dtype)
            sizes = [weight.size(0) for weight in parameters[: self._num_columns]]
            self._sums |= dict(enumerate(split_sizes(rounded, sizes)))
        results: list[Tensor | None] = []
        for position, (param, is_needed) in enumerate(zip(parameters, self._needed, strict=True)):
            if not is_needed:
                results.append(None)
            elif position in self._sums:
                results.append(self._sums[position].to(param.dtype))
            else:  # without a token no tile has run
                results.append(torch.zeros_like(param))
        return results
