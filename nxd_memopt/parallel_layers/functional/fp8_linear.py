"""Autograd functions of column- and row-parallel linear layers whose matmuls have float8 operands.

They communicate as ``functional.linear`` does, but all-gather float8 rows: half the bytes. A tensor whose
rows are gathered has the scales of all rows; a shard that no rank gathers has scales of its own. Weights are
rounded where they are used: a copy of all of them for the whole step would take a byte for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import ChunkedReduction, backend
from nxd_memopt.ops.autograd import (
    SavedInputs,
    as_dtype,
    first_derivative_only,
    link_saved_inputs,
    save_inputs_first,
    saved_inputs,
)
from nxd_memopt.ops.fp8 import (
    FORWARD_DTYPE,
    Fp8Recipe,
    Magnitudes,
    Operand,
    as_both,
    as_bytes,
    as_columns,
    as_rows,
    magnitudes,
    padded,
    product,
    transposed,
)
from nxd_memopt.ops.low_rank import LowRankTerm
from nxd_memopt.ops.parts import flat_rows, joined, split_sizes
from nxd_memopt.parallel_layers.functional.linear import (
    ActivationSharding,
    ColumnActivationSharding,
    summed_over_replicas,
)


class Fp8ColumnParallel(torch.autograd.Function):
    """``Y_i = X W_i^t + b_i``; see ``functional.linear.ColumnParallel``.

    All W_i are one operand, as are all dY_i: with one scale for a tensor they share it. X is saved in float8.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: ColumnActivationSharding,
        weight: Tensor,
        *remaining: Tensor | None,
    ) -> tuple[Tensor, ...]:
        # weight is a named parameter for the reason in ColumnParallel.forward
        parameters = (weight, *remaining)
        weights = cast("tuple[Tensor, ...]", parameters[0::2])
        shard = comm.sequence_first(x)
        flat = flat_rows(shard)
        sizes = magnitudes(flat, recipe_of(comm), gathering_group(comm))
        # The columns are for the weights' gradients alone.
        rows, columns = operands(flat, sizes, FORWARD_DTYPE, needs_columns=any(ctx.needs_input_grad[2::2]))
        ctx.comm = comm
        ctx.dtype = x.dtype
        ctx.shard_rows = flat.size(0)
        ctx.save_for_backward(*weights, *(columns or ()))
        outputs, ctx.weight_sizes = column_outputs(comm, shard, weights, parameters[1::2], rows)
        return tuple(comm.original_layout(each) for each in outputs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm: ColumnActivationSharding = ctx.comm
        needs_input, _, *needed = ctx.needs_input_grad
        saved = ctx.saved_tensors  # once: a recomputed region is computed again for each read
        weights, columns_of_x = saved[: len(grads)], saved[len(grads) :]
        grad = joined([comm.sequence_first(each) for each in grads], -1)
        needs_weights = bool(columns_of_x)
        rows, columns = gradient_operands(comm, grad, needs_columns=needs_weights)
        # The order of ColumnParallel.backward: gather X, compute and reduce dX, compute dW.
        whole = gathered_columns(Operand(*columns_of_x), ctx.shard_rows, comm) if needs_weights else None
        reduction = None
        if needs_input:
            operand = weight_columns(comm, joined(weights, 0), ctx.weight_sizes)
            reduction = reduced_products(comm, grad.shape, [(rows, operand)], ctx.dtype)
            del operand
        del rows  # a byte for each element of dY, which dW does not read
        weight_grads: Sequence[Tensor | None] = [None] * len(weights)
        if whole is not None and columns is not None:
            weight_grad = product(columns, whole(), ctx.dtype)
            parts = split_sizes(weight_grad, [weight.size(0) for weight in weights])
            weight_grads = [part if is_needed else None for part, is_needed in zip(parts, needed[0::2], strict=True)]
        results = summed_over_replicas(weight_grads, grads, needed[1::2], comm.replica_groups)
        input_grad = None
        if reduction is not None:
            input_grad = comm.original_layout(as_dtype(reduction.wait(), ctx.dtype))
        return input_grad, None, *results


def column_outputs(
    comm: ActivationSharding,
    shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: Operand | None = None,
) -> tuple[Sequence[Tensor], Magnitudes | None]:
    """Return ``X W_i^t + b_i`` for all rows X of the ranks, and ``weight_sizes_of`` the joined weights.

    Args:
        comm: sharding of X.
        shard: this rank's rows, ``[s, ..., H]``.
        weights: W_i, ``[n_i, H]``.
        biases: b_i, ``[n_i]`` or None.
        rows: the rows of the shard in float8, None to round them.
    """
    if rows is None:
        flat = flat_rows(shard)
        rows = as_rows(flat, magnitudes(flat, recipe_of(comm), gathering_group(comm)), FORWARD_DTYPE)
    packed = joined(weights, 0)
    weight_sizes = weight_sizes_of(comm, packed)
    gathered = GatheredRows(comm, shard.shape, rows, materialize=False)
    operand = weight_rows(comm, packed, weight_sizes)
    (output,) = gathered.products([operand], shard.dtype, [_joined_bias(biases)], fast=True)
    return split_sizes(output, [each.size(0) for each in weights], dim=-1), weight_sizes


class Source(NamedTuple):
    """How an input is computed again in backward.

    Args:
        function: returns the input.
        argument: of ``function``; a tensor that another module keeps.
    """

    function: Callable[[Tensor], Tensor]
    argument: Tensor


def fp8_row_parallel(comm: ActivationSharding, factors: Sequence[Tensor], sources: Sequence[Source | None]) -> Tensor:
    """Return ``sum_i X_i W_i^t`` reduced over the ranks.

    Args:
        comm: sharding of the output.
        factors: ``[X_1, W_1, X_2, W_2, ...]``.
        sources: for each X_i what backward computes it from, or None where X_i is kept; empty: all are kept.
    """
    weights = factors[1::2]
    # The compiler decides what is kept, and only dW_i reads X_i.
    if not sources or torch.compiler.is_compiling():
        sources = [None] * len(weights)
    sources = [each if weight.requires_grad else None for each, weight in zip(sources, weights, strict=True)]
    is_read: list[bool] = []
    for weight, source in zip(weights, sources, strict=True):
        is_read += [weight.requires_grad and source is None, True]
    arguments = [each.argument.detach() for each in sources if each is not None]
    handle, saved = save_inputs_first(*factors, is_read=is_read, added=arguments)
    functions = [each and each.function for each in sources]
    return cast(Tensor, Fp8RowParallel.apply(comm, handle, functions, *saved))


def frozen_input_grad_reduction(
    comm: ActivationSharding,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    weight_sizes: Magnitudes | None,
    term: LowRankTerm,
) -> ChunkedReduction:
    """Start reducing ``dX = sum_i dY_i W_i + term`` over the ranks; dY_i are not needed for the gradients of W_i."""
    grad = joined(grads, -1)
    rows, _ = gradient_operands(comm, grad, needs_columns=False)
    operand = weight_columns(comm, joined(weights, 0), weight_sizes)
    return reduced_products(comm, grad.shape, [(rows, operand)], grad.dtype, term=term)


def row_reduction(
    comm: ActivationSharding, rows: Tensor, weight: Tensor, term: LowRankTerm | None
) -> tuple[ChunkedReduction, Magnitudes | None]:
    """Start reducing ``X W^t`` of sequence-first rows over the ranks; return ``weight_sizes_of`` the weight too."""
    sizes, flat = weight_sizes_of(comm, weight), flat_rows(rows)
    operand = as_rows(flat, magnitudes(flat, recipe_of(comm)), FORWARD_DTYPE)
    pairs = [(operand, weight_rows(comm, weight, sizes))]
    return reduced_products(comm, rows.shape, pairs, rows.dtype, fast=True, term=term), sizes


def frozen_row_input_grad(
    comm: ActivationSharding, shard: Tensor, weight: Tensor, weight_sizes: Magnitudes | None
) -> Tensor:
    """Return ``dY W`` of all ranks' rows, ``[S, ..., n]``; dY is not needed for the gradient of W."""
    gradient = RowGradient(comm, shard, needs_columns=False)
    (result,) = gradient.products([weight_columns(comm, weight, weight_sizes)], shard.dtype)
    return result


class Fp8RowParallel(torch.autograd.Function):
    """``Y = reduce(sum_i X_i W_i^t)``; see ``functional.linear.RowParallel``.

    Saves X_i unrounded: another module keeps it too, as attention keeps its output, and a float8 copy would add to
    that. An X_i with a ``Source`` is computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        comm: ActivationSharding,
        handle: SavedInputs | None,
        functions: Sequence[Callable[[Tensor], Tensor] | None],
        x: Tensor,
        *remaining: Tensor,
    ) -> Tensor:
        factors = (x, *remaining)
        ctx.comm, ctx.functions = comm, functions
        recipe = recipe_of(comm)
        link_saved_inputs(ctx, handle, *factors)
        inputs = [flat_rows(comm.sequence_first(each)) for each in factors[0::2]]
        # Tensors of one element, or one for each row and column, which a recompute need not compute again.
        ctx.input_sizes = [magnitudes(each, recipe) for each in inputs]
        ctx.weight_sizes = [weight_sizes_of(comm, each) for each in factors[1::2]]
        pairs = [
            (as_rows(each, sizes, FORWARD_DTYPE), weight_rows(comm, weight, weight_sizes))
            for each, sizes, weight, weight_sizes in zip(
                inputs, ctx.input_sizes, factors[1::2], ctx.weight_sizes, strict=True
            )
        ]
        reduction = reduced_products(comm, comm.sequence_first(x).shape, pairs, x.dtype, fast=True)
        return comm.original_layout(as_dtype(reduction.wait(), x.dtype))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        comm: ActivationSharding = ctx.comm
        saved, needs_grad = saved_inputs(ctx)
        factors, arguments = saved[: len(needs_grad)], iter(saved[len(needs_grad) :])
        weights, needs_weights = factors[1::2], needs_grad[1::2]
        gradient = RowGradient(comm, comm.sequence_first(grad), needs_columns=any(needs_weights))
        operands = [
            weight_columns(comm, weight, sizes) for weight, sizes in zip(weights, ctx.weight_sizes, strict=True)
        ]
        # inputs of frozen weights are not kept, so that only the gradient has a dtype
        input_grads = gradient.products(operands, grad.dtype)
        columns_of_grad = gradient.columns() if any(needs_weights) else None
        results: list[Tensor | None] = []
        for x, function, input_grad, sizes, needs_weight in zip(
            factors[0::2], ctx.functions, input_grads, ctx.input_sizes, needs_weights, strict=True
        ):
            weight_grad = None
            if needs_weight and columns_of_grad is not None:
                values = x if function is None else function(next(arguments))
                columns = as_columns(flat_rows(comm.sequence_first(values)), sizes, FORWARD_DTYPE)
                del values
                weight_grad = product(columns_of_grad, columns, grad.dtype)
            results += [comm.original_layout(input_grad), weight_grad]
        return None, None, None, *results


class GatheredRows:
    """Rows of one rank's shard that are all-gathered as float8.

    Args:
        comm: sharding of the rows.
        shape: ``[s, ..., K]``, of the shard.
        rows: the shard's rows.
        materialize: whether ``whole`` will be called.
    """

    def __init__(self, comm: ActivationSharding, shape: Sequence[int], rows: Operand, *, materialize: bool) -> None:
        self._dtype = rows.data.dtype
        self._is_rowwise = recipe_of(comm).is_rowwise
        # A scale for each row travels with its row, of a shard with one row too.
        self._scale = rows.scale
        if self._is_rowwise:
            self._scale = backend.all_gather(rows.scale.view(*shape[:-1], 1), gathering_group(comm))
        self._gathering = comm.gather(as_bytes(rows.data).view(shape), materialize=materialize)

    def whole(self) -> Operand:
        """Return the rows of all ranks."""
        return self._operand(0, self._gathering.wait())

    def products(
        self,
        weights: Sequence[Operand],
        dtype: torch.dtype,
        biases: Sequence[Tensor | None] | None = None,
        *,
        fast: bool = False,
    ) -> list[Tensor]:
        """Return ``rows weight^t + bias``, ``[S, ..., n]`` for each weight, chunk by chunk as rows arrive."""
        biases = biases or [None] * len(weights)
        results: list[Tensor] = []
        # Rows arrive in another order than their own, this rank's first.
        for start, rows in self._gathering.chunks(2 * sum(weight.data.size(0) for weight in weights)):
            operand = self._operand(start, rows)
            shape = (self._gathering.length, *rows.shape[1:-1])
            results = results or [rows.new_empty((*shape, weight.data.size(0)), dtype=dtype) for weight in weights]
            for result, weight, bias in zip(results, weights, biases, strict=True):
                part = flat_rows(result[start : start + rows.size(0)])
                product(operand, weight, dtype, bias, fast=fast, out=part)
        return results

    def _operand(self, start: int, rows: Tensor) -> Operand:
        scale = self._scale
        if self._is_rowwise:
            scale = scale[start : start + rows.size(0)].reshape(-1, 1)
        return Operand(flat_rows(rows).view(self._dtype), scale)


def gathered_columns(columns: Operand, rows: int, comm: ActivationSharding) -> Callable[[], Operand]:
    """Start gathering the columns ``[K, s]`` of all ranks; the result waits for ``[K, S]``.

    Args:
        columns: of this rank's shard.
        rows: number of rows of the shard, without padding.
        comm: sharding of the rows.
    """
    group = gathering_group(comm)
    size = backend.group_size(group)
    if size == 1:
        return lambda: columns
    width = columns.data.size(0)
    gathering = backend.start_all_gather(as_bytes(columns.data), group)

    def wait() -> Operand:
        # [T K, s] -> [K, T s], without the padding of each shard
        shards = gathering.wait().view(size, width, -1)[:, :, :rows]
        whole = padded(shards.permute(1, 0, 2).reshape(width, -1))
        return Operand(whole.view(columns.data.dtype), columns.scale)

    return wait


class RowGradient:
    """Gradient ``[s, ..., H]`` of a row-parallel layer's output as float8 rows and columns of all ranks.

    Args:
        comm: sharding of the output.
        grad: this rank's gradient, sequence first.
        needs_columns: whether ``columns`` will be called, after ``products``.
    """

    def __init__(self, comm: ActivationSharding, grad: Tensor, *, needs_columns: bool) -> None:
        self._comm = comm
        self._columns: Callable[[], Operand] | None = None
        group, recipe = gathering_group(comm), recipe_of(comm)
        flat = flat_rows(grad)
        # With one scale the gathered rows are transposed. Columns with scales of their own are gathered too.
        casts_columns = needs_columns and (recipe.is_rowwise or backend.group_size(group) == 1)
        sizes = magnitudes(flat, recipe, group)
        rows, self._shard = operands(flat, sizes, recipe.gradient_dtype, needs_columns=casts_columns)
        self._shard_rows = flat.size(0)
        self._rows = GatheredRows(comm, grad.shape, rows, materialize=needs_columns and not casts_columns)

    def products(self, weights: Sequence[Operand], dtype: torch.dtype) -> list[Tensor]:
        """Return ``rows weight^t`` for each weight; see ``GatheredRows.products``."""
        results = self._rows.products(weights, dtype)
        # A gather may overwrite the rows of the one before it: this one starts when they have been read.
        if self._shard is not None:
            self._columns = gathered_columns(self._shard, self._shard_rows, self._comm)
        return results

    def columns(self) -> Operand:
        """Return the columns ``[H, S]`` of all ranks' rows."""
        return transposed(self._rows.whole()) if self._columns is None else self._columns()


def weight_sizes_of(comm: ActivationSharding, weight: Tensor) -> Magnitudes | None:
    """Return the magnitudes of a weight; None for one that is stored in float8."""
    return magnitudes(weight, recipe_of(comm)) if comm.weight_scale is None else None


def weight_rows(comm: ActivationSharding, weight: Tensor, sizes: Magnitudes | None) -> Operand:
    """Return the rows ``[n, H]`` of a weight that is rounded here, or stored in float8."""
    if sizes is not None:
        return as_rows(weight, sizes, FORWARD_DTYPE)
    assert comm.weight_scale is not None
    return Operand(weight, comm.weight_scale)


def weight_columns(comm: ActivationSharding, weight: Tensor, sizes: Magnitudes | None) -> Operand:
    """Return the columns ``[H, n]`` of ``weight_rows``."""
    if sizes is not None:
        return as_columns(weight, sizes, FORWARD_DTYPE)
    return transposed(weight_rows(comm, weight, None))


def reduced_products(
    comm: ActivationSharding,
    shape: Sequence[int],
    pairs: Sequence[tuple[Operand, Operand]],
    dtype: torch.dtype,
    *,
    fast: bool = False,
    term: LowRankTerm | None = None,
) -> ChunkedReduction:
    """Start reducing ``sum_i rows_i weight_i^t`` over the ranks, chunk by chunk.

    Args:
        comm: sharding of the result.
        shape: of the inputs, ``[S, ..., K]``; of K nothing is read.
        pairs: rows ``[S..., K_i]`` and weight ``[n, K_i]``.
        dtype: of the partial sums.
        fast: see ``ops.fp8.product``.
        term: in ``dtype``, added to the sum.
    """
    rows_each = torch.Size(shape[1:-1]).numel()
    width = pairs[0][1].data.size(0)

    def partial_sums(start: int, stop: int) -> Tensor:
        part = slice(start * rows_each, stop * rows_each)
        total, *others = (product(_rows_of(rows, part), weight, dtype, fast=fast) for rows, weight in pairs)
        for other in others:
            total += other
        if term is not None:
            total = term.rows(start, stop).added_to(total)
        return total.view(stop - start, *shape[1:-1], width)

    return comm.reduce(partial_sums, (*shape[:-1], width), dtype)


def _rows_of(operand: Operand, part: slice) -> Operand:
    scale = operand.scale[part] if operand.scale.numel() > 1 else operand.scale
    return Operand(operand.data[part], scale)


def operands(
    x: Tensor, sizes: Magnitudes, dtype: torch.dtype, *, needs_columns: bool
) -> tuple[Operand, Operand | None]:
    """Return the rows of ``x``, and its columns or None."""
    if needs_columns:
        return as_both(x, sizes, dtype)
    return as_rows(x, sizes, dtype), None


def gradient_operands(comm: ActivationSharding, grad: Tensor, *, needs_columns: bool) -> tuple[Operand, Operand | None]:
    """Return the rows of a column-parallel layer's dY, which no rank gathers, and its columns or None."""
    recipe = recipe_of(comm)
    sizes = magnitudes(flat_rows(grad), recipe)
    return operands(flat_rows(grad), sizes, recipe.gradient_dtype, needs_columns=needs_columns)


def recipe_of(comm: ActivationSharding) -> Fp8Recipe:
    """Return the rounding of a layer that rounds."""
    assert comm.fp8 is not None
    return comm.fp8


def gathering_group(comm: ActivationSharding) -> ProcessGroup | None:
    """Return the ranks whose shards ``comm.gather`` joins, or None."""
    return None if comm.sequence_dimension is None else comm.group


def _joined_bias(biases: Sequence[Tensor | None]) -> Tensor | None:
    """Return the bias of the joined weights.

    Raises:
        ValueError: only some layers have a bias.
    """
    present = [bias for bias in biases if bias is not None]
    if len(present) not in (0, len(biases)):
        raise ValueError("layers with one input and float8 operands need biases for all or none of them: use bf16")
    return joined(present, 0) if present else None
