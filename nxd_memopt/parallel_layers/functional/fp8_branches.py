"""Autograd function of float8 linear layers after norms of one input, whose normalized rows are gathered once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, autograd

from nxd_memopt.backends import backend
from nxd_memopt.ops.autograd import as_dtype, first_derivative_only
from nxd_memopt.ops.folded_norm import folded_bias, folded_gradients
from nxd_memopt.ops.fp8 import FORWARD_DTYPE, Operand, as_columns, as_rows, magnitudes, product
from nxd_memopt.ops.norm import normalise, normalise_gradient
from nxd_memopt.ops.parts import flat_rows
from nxd_memopt.ops.sums import column_sums
from nxd_memopt.parallel_layers.functional.fp8_linear import (
    GatheredRows,
    gathered_columns,
    gathering_group,
    gradient_operands,
    recipe_of,
    reduced_products,
)
from nxd_memopt.parallel_layers.functional.linear import ColumnActivationSharding


class Fp8NormalisedColumns(autograd.Function):
    """``Y_i = norm_i(X) W_i^t + b_i``; see ``modules.parallel_residual``.

    The affine part of each norm becomes part of its layer (``ops.folded_norm``): what is rounded and
    gathered is the normalized X, which all branches share. Saves X; backward normalizes it again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, comm: ColumnActivationSharding, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        gains, shifts, weights = (cast("tuple[Tensor, ...]", parameters[kind::4]) for kind in range(3))
        recipe = recipe_of(comm)
        normalised, mean, rstd = normalise(x, eps)
        shard = comm.sequence_first(normalised)
        ctx.comm, ctx.eps = comm, eps
        ctx.input_sizes = magnitudes(flat_rows(shard), recipe, gathering_group(comm))
        ctx.save_for_backward(x, mean, rstd, *gains, *shifts, *weights)
        rows = as_rows(flat_rows(shard), ctx.input_sizes, FORWARD_DTYPE)
        gathered = GatheredRows(comm, shard.shape, rows, materialize=False)
        ctx.weight_sizes = [magnitudes(w, recipe, factors=g) for w, g in zip(weights, gains, strict=True)]
        products = zip(weights, ctx.weight_sizes, gains, strict=True)
        outputs = gathered.products(
            [as_rows(weight, sizes, FORWARD_DTYPE, gain) for weight, sizes, gain in products],
            x.dtype,
            [folded_bias(w, b, s) for w, b, s in zip(weights, parameters[3::4], shifts, strict=True)],
            fast=True,
        )
        return tuple(comm.original_layout(output) for output in outputs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm: ColumnActivationSharding = ctx.comm
        x, mean, rstd, *saved = ctx.saved_tensors
        gains, shifts, weights = (saved[i * len(grads) : (i + 1) * len(grads)] for i in range(3))
        needed = ctx.needs_input_grad[3:]
        output_grads = [comm.sequence_first(grad) for grad in grads]
        # Columns of the normalized X are for the parameters' gradients alone.
        whole = None
        if any(needed):
            shard = flat_rows(comm.sequence_first(normalise(x, ctx.eps)[0]))
            whole = gathered_columns(as_columns(shard, ctx.input_sizes, FORWARD_DTYPE), shard.size(0), comm)
            del shard
        both = [gradient_operands(comm, grad, needs_columns=whole is not None) for grad in output_grads]
        # The order of ColumnParallel.backward: gather X, compute and reduce dX, compute dW.
        pairs = [
            (rows, as_columns(weight, sizes, FORWARD_DTYPE, gain))
            for (rows, _), weight, sizes, gain in zip(both, weights, ctx.weight_sizes, gains, strict=True)
        ]
        reduction = reduced_products(comm, output_grads[0].shape, pairs, x.dtype)
        columns = [each for _, each in both]
        del both, pairs  # a byte for each element of all dY_i and W_i, which dW_i do not read
        results: list[Tensor | None] = [None] * len(needed)
        if whole is not None:
            columns_of_x = whole()
            products = [product(cast(Operand, each), columns_of_x, x.dtype) for each in columns]
            found = _parameter_grads(comm, output_grads, products, list(zip(weights, gains, shifts, strict=True)))
            results = [each if is_needed else None for each, is_needed in zip(found, needed, strict=True)]
        grad_normalised = comm.original_layout(as_dtype(reduction.wait(), x.dtype))
        return normalise_gradient(grad_normalised, x, mean, rstd), None, None, *results


def _parameter_grads(
    comm: ColumnActivationSharding,
    output_grads: Sequence[Tensor],
    products: Sequence[Tensor],
    parameters: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> list[Tensor]:
    """Return for each branch the gradients of the norm's gain and shift, and of the layer's weight and bias.

    Args:
        comm: sharding of the branches' input.
        output_grads: dY_i, ``[S, ..., n_i]``.
        products: gradients of ``W_i g_i``, ``[n_i, H]``.
        parameters: W_i, g_i and s_i.
    """
    results: list[Tensor] = []
    for grad, folded_grad, (weight, gain, shift), group in zip(
        output_grads, products, parameters, comm.replica_groups, strict=True
    ):
        bias_grad = column_sums(grad)
        weight_grad, affine_grad = folded_gradients(folded_grad, bias_grad, weight, gain, shift)
        # Each rank has the part of its own output columns. Under sequence parallelism the norms'
        # parameters are tagged, and allreduce_sequence_parallel_gradients sums them later.
        if comm.sequence_dimension is None:
            affine_grad = backend.all_reduce(affine_grad, comm.group)
        results += affine_grad.to(gain.dtype)
        results += [backend.all_reduce(local, group) for local in (weight_grad, bias_grad)]
    return results
