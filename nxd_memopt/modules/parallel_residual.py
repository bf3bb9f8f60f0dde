"""Parallel branches of one residual stream: one all-gather of the input, one reduction of the outputs.

The parallel residual of GPT-J, ``x + attention(norm_1(x)) + mlp(norm_2(x))``, is used by GPT-NeoX
(arXiv:2204.06745, section 2.1). Both norms normalize the same x, and the partial outputs of both
branches are terms of one sum. A layer therefore needs one all-gather and one reduce-scatter instead
of two each; the result is equal up to rounding. T ranks; ``s = S/T``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.autograd import cast_if_autocast_enabled, first_derivative_only
from nxd_memopt.ops.norm import affine_branches, affine_branches_gradient, normalise, normalise_gradient
from nxd_memopt.ops.residual import add_residual
from nxd_memopt.parallel_layers.functional.fp8_branches import Fp8NormalisedColumns
from nxd_memopt.parallel_layers.functional.fp8_linear import Source
from nxd_memopt.parallel_layers.functional.linear import ColumnActivationSharding, parameter_grads, products
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear, row_parallel


class _NormalisedColumns(torch.autograd.Function):
    """``Y_i = norm_i(X) W_i^t + b_i``, with one all-gather of the normalized X.

    Saves this rank's X; normalization, gather and affine parts are recomputed in backward. Backward
    gathers while it computes the first input gradients, and reduces their sum while it computes the
    weight gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, comm: ColumnActivationSharding, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        norm_weights, norm_biases, weights, biases = _by_kind(parameters)
        # Normalize the shard, gather it once, then apply each branch's affine part to the rows.
        # The gathered tensor is the same for all branches; after the affine parts it would not
        # be.
        normalised, mean, rstd = normalise(x, eps)
        ctx.eps = eps
        ctx.comm = comm
        ctx.save_for_backward(x, mean, rstd, *norm_weights, *norm_biases, *weights)

        def normed(rows: Tensor) -> list[Tensor]:
            return affine_branches(rows, norm_weights, norm_biases)

        gathering = comm.gather(comm.sequence_first(normalised), materialize=False)
        outputs = products(gathering, weights, biases, normed)
        return tuple(comm.original_layout(output) for output in outputs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm: ColumnActivationSharding = ctx.comm
        x, mean, rstd, *saved = ctx.saved_tensors
        count = len(grads)
        norm_weights = saved[:count]
        norm_biases = saved[count : 2 * count]
        weights = saved[2 * count :]
        # On XLA the barrier keeps forward's normalized and gathered tensors from being reused,
        # and thus stored until backward.
        x, *output_grads = backend.optimization_barrier([x, *grads])
        normalised, _, _ = normalise(x, ctx.eps)
        gathering = comm.gather(comm.sequence_first(normalised))
        output_grads = [comm.sequence_first(grad) for grad in output_grads]
        grad_affine_chunks: list[Tensor] = []

        def rows(start: int, stop: int) -> Tensor:
            # d(norm_i output) = dY_i W_i for each branch; one call gives the gradients of the
            # normalized rows, summed over the branches, and of the norms' weights and biases.
            input_grads = [grad[start:stop] @ weight for grad, weight in zip(output_grads, weights, strict=True)]
            grad_rows, grad_affine_chunk = affine_branches_gradient(
                gathering.wait()[start:stop], input_grads, norm_weights
            )
            grad_affine_chunks.append(grad_affine_chunk)
            return grad_rows

        shape = (*output_grads[0].shape[:-1], x.size(-1))
        reduction = comm.reduce(rows, shape, x.dtype)
        # The linear layers' inputs, recomputed: one tensor [S, B, H] for each branch, which
        # forward would otherwise have to save. Their dW GEMMs overlap with the reduction of dX.
        inputs = affine_branches(gathering.wait(), norm_weights, norm_biases)
        # Parameters per branch: the norm's weight and bias, the layer's weight and bias. The
        # first three arguments of forward are x, eps and comm.
        needs_parameters = ctx.needs_input_grad[3:]
        linear_grads: list[list[Tensor | None]] = []
        for i, (branch_input, grad, group) in enumerate(zip(inputs, output_grads, comm.replica_groups, strict=True)):
            needs_linear = needs_parameters[4 * i + 2 : 4 * i + 4]
            linear_grads.append(parameter_grads(branch_input, [grad], needs_linear, [group]))
        # Each chunk of rows has a term [branches, 2, H] of the sum over all rows.
        grad_affine = grad_affine_chunks[0]
        if len(grad_affine_chunks) > 1:
            grad_affine = torch.stack(grad_affine_chunks).sum(0)
        # Each rank has the part of its own output columns. Under sequence parallelism the norms'
        # parameters are tagged, and allreduce_sequence_parallel_gradients sums them later.
        if comm.sequence_dimension is None:
            grad_affine = backend.all_reduce(grad_affine, comm.group)
        grad_normalised = comm.original_layout(reduction.wait().to(x.dtype))
        grad_x = normalise_gradient(grad_normalised, x, mean, rstd)
        # In the order of forward's parameters: norm weight, norm bias, weight, bias of each
        # branch.
        results: list[Tensor | None] = []
        for affine, linear in zip(grad_affine.to(x.dtype), linear_grads, strict=True):
            results += [*affine, *linear]
        return grad_x, None, None, *results


def _by_kind(parameters: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Regroup the norm's weight and bias and the layer's weight and bias of each branch by kind."""
    return tuple(parameters[kind::4] for kind in range(4))


def normalised_column_parallel_linears(
    input: Tensor, *branches: tuple[LayerNorm, ColumnParallelLinear]
) -> tuple[Tensor, ...]:
    """Compute ``linear_i(norm_i(X))`` for norms of one input, with one all-gather of X.

    The norms may differ only in their affine parameters.

    Args:
        input: ``[B, S, H]``, or ``[s, B, H]`` under sequence parallelism of the linear layers.
        branches: pairs of a norm and a column-parallel layer, all of one process group.

    Returns:
        The local output of each layer, ``[..., output_size/T]``, with the full sequence.

    Raises:
        ValueError: the norms have different eps.
    """
    norms, layers = zip(*branches, strict=True)
    if len({norm.eps for norm in norms}) > 1:
        raise ValueError(
            f"the norms' eps {[norm.eps for norm in norms]} differ: the branches need one normalised input"
        )
    # Weights that are stored in float8 were rounded without the norm's affine part.
    if not _multiply_alike(layers):
        return tuple(cast(Tensor, layer(norm(input))) for norm, layer in branches)
    parameters: list[Tensor | None] = []
    for norm, layer in branches:
        parameters += [norm.weight, norm.bias, layer.weight, layer.bias]
    # The casts are done here; autocast must not change dtypes inside the Function, whose backward
    # runs without it. All layers share one gather, so the first one defines group and layout.
    x, *flat = cast_if_autocast_enabled(input, *parameters)
    comm = layers[0].activation_sharding(*(layer.replica_group for layer in layers))
    function = _NormalisedColumns if comm.fp8 is None else Fp8NormalisedColumns
    with torch.autocast(input.device.type, enabled=False):
        return cast("tuple[Tensor, ...]", function.apply(x, norms[0].eps, comm, *flat))


def _multiply_alike(layers: Sequence[ColumnParallelLinear | RowParallelLinear]) -> bool:
    """Return whether one function computes all layers: none of them alone rounds, or has a scale of its own."""
    return len({layer.rounding for layer in layers}) == 1 and all(layer.weight_scale is None for layer in layers)


def row_parallel_linears(
    inputs: Sequence[Tensor],
    layers: Sequence[RowParallelLinear],
    *,
    residual: Tensor,
    sources: Sequence[Source | None],
) -> Tensor:
    """Compute ``residual + sum_i (X_i A_i^t + b_i)`` with one reduction for all layers.

    Args:
        inputs: ``[..., input_size/T]`` for each layer.
        layers: row-parallel layers with one output size and group; the first defines the reduction.
        residual: tensor with the shape of the result.
        sources: for each input what backward computes it from in float8, or None where it is kept.

    Returns:
        ``[B, S, H]``, or ``[s, B, H]`` under sequence parallelism.

    Raises:
        ValueError: ``residual`` has another shape.
    """
    pairs = [(x, layer.weight) for x, layer in zip(inputs, layers, strict=True)]
    if _multiply_alike(layers):
        output = row_parallel(pairs, layers[0], *sources)
    else:  # a reduction each
        each = zip(pairs, layers, sources, strict=True)
        first, *others = (row_parallel([pair], layer, source) for pair, layer, source in each)
        output = sum(others, first)
    # A residual that broadcasts would give a wrong sum without an error, e.g. the full sequence
    # in place of a shard with s = 1.
    if residual.shape != output.shape:
        raise ValueError(f"residual {list(residual.shape)} has not the shape of the layers' sum, {list(output.shape)}")
    biases = [layer.bias.to(output.dtype) for layer in layers if layer.bias is not None]
    if not biases:
        return residual + output
    # All biases in one sum [H], and then one pass over the residual stream instead of two.
    return add_residual(residual, output, sum(biases[1:], biases[0]))
