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
from nxd_memopt.ops.autograd import first_derivative_only
from nxd_memopt.ops.norm import (
    affine_branches,
    affine_branches_gradient,
    normalise,
    normalise_gradient,
)
from nxd_memopt.ops.residual import add_residual
from nxd_memopt.parallel_layers.functional.linear import (
    ColumnActivationSharding,
    parameter_grads,
    products,
)
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from nxd_memopt.parallel_layers.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    row_parallel,
)
from nxd_memopt.parallel_layers.utils import cast_if_autocast_enabled


class _NormalisedColumns(torch.autograd.Function):
    """``Y_i = norm_i(X) W_i^t + b_i``, with one all-gather of the normalized X.

    Saves this rank's X; normalization, gather and affine parts are recomputed in backward. Backward
    gathers while it computes the first input gradients, and reduces their sum while it computes the
    weight gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        eps: float,
        comm: ColumnActivationSharding,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        gains, shifts, weights, biases = _by_kind(parameters)
        # Normalize the shard, gather it once, then apply each branch's gain and shift to the
        # rows.
        normalised, mean, rstd = normalise(x, eps)
        ctx.eps, ctx.comm = eps, comm
        ctx.save_for_backward(x, mean, rstd, *gains, *shifts, *weights)
        gathering = comm.gather(comm.sequence_first(normalised), materialize=False)
        outputs = products(gathering, weights, biases, lambda rows: affine_branches(rows, gains, shifts))
        return tuple(comm.original_layout(output) for output in outputs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm: ColumnActivationSharding = ctx.comm
        x, mean, rstd, *saved = ctx.saved_tensors
        count = len(grads)
        gains, shifts, weights = saved[:count], saved[count : 2 * count], saved[2 * count :]
        # On XLA the barrier keeps forward's normalized and gathered tensors from being reused.
        x, *output_grads = backend.optimization_barrier([x, *grads])
        normalised, _, _ = normalise(x, ctx.eps)
        gathering = comm.gather(comm.sequence_first(normalised))
        output_grads = [comm.sequence_first(grad) for grad in output_grads]
        by_affine: list[Tensor] = []

        def rows(start: int, stop: int) -> Tensor:
            # d(norm_i output) = dY_i W_i for each branch; one call gives the gradients of the
            # normalized rows, summed over the branches, and of gains and shifts.
            input_grads = [grad[start:stop] @ weight for grad, weight in zip(output_grads, weights, strict=True)]
            by_rows, part = affine_branches_gradient(gathering.wait()[start:stop], input_grads, gains)
            by_affine.append(part)
            return by_rows

        shape = (*output_grads[0].shape[:-1], x.size(-1))
        reduction = comm.reduce(rows, shape, x.dtype)
        inputs = affine_branches(gathering.wait(), gains, shifts)
        # Inputs per branch: gain, shift, weight, bias; needed here: weight and bias.
        wanted = [ctx.needs_input_grad[3:][4 * i + 2 : 4 * i + 4] for i in range(count)]
        by_linear = [
            parameter_grads(x, [grad], needs, [group])
            for x, grad, needs, group in zip(inputs, output_grads, wanted, comm.replica_groups, strict=True)
        ]
        by_affine_sum = torch.stack(by_affine).sum(0) if len(by_affine) > 1 else by_affine[0]
        # Each rank has the part of its own output columns. Under sequence parallelism the norms'
        # parameters are tagged, and allreduce_sequence_parallel_gradients sums them later.
        if comm.sequence_dimension is None:
            by_affine_sum = backend.all_reduce(by_affine_sum, comm.group)
        by_x = normalise_gradient(comm.original_layout(reduction.wait().to(x.dtype)), x, mean, rstd)
        results = ((*affine, *linear) for affine, linear in zip(by_affine_sum.to(x.dtype), by_linear, strict=True))
        return by_x, None, None, *(grad for branch in results for grad in branch)


def _by_kind(parameters: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Split ``gain, shift, weight, bias`` of each branch into gains, shifts, weights, biases."""
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
    parameters = [
        parameter for norm, layer in branches for parameter in (norm.weight, norm.bias, layer.weight, layer.bias)
    ]
    x, *flat = cast_if_autocast_enabled(input, *parameters)
    comm = layers[0].activation_sharding(*(layer.replica_group for layer in layers))
    with torch.autocast(input.device.type, enabled=False):
        return cast("tuple[Tensor, ...]", _NormalisedColumns.apply(x, norms[0].eps, comm, *flat))


def row_parallel_linears(inputs: Sequence[Tensor], layers: Sequence[RowParallelLinear], *, residual: Tensor) -> Tensor:
    """Compute ``residual + sum_i (X_i A_i^t + b_i)`` with one reduction for all layers.

    Args:
        inputs: ``[..., input_size/T]`` for each layer.
        layers: row-parallel layers with one output size and group; the first defines the reduction.
        residual: tensor with the shape of the result.

    Returns:
        ``[B, S, H]``, or ``[s, B, H]`` under sequence parallelism.

    Raises:
        ValueError: ``residual`` has another shape.
    """
    output = row_parallel([(x, layer.weight) for x, layer in zip(inputs, layers, strict=True)], layers[0])
    if residual.shape != output.shape:
        raise ValueError(f"residual {list(residual.shape)} has not the shape of the layers' sum, {list(output.shape)}")
    biases = [layer.bias.to(output.dtype) for layer in layers if layer.bias is not None]
    return add_residual(residual, output, sum(biases[1:], biases[0])) if biases else residual + output
