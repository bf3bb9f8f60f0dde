"""Autograd functions of column- and row-parallel linear layers, whose matmuls overlap with their collectives.

T ranks; ``s = S/T``. Tensors are sequence-first inside, whatever ``sequence_dimension`` the caller has: a piece of a
gather or of a reduction is a range of the sequence. Sources: arXiv:1909.08053, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import ChunkedAllGather, ChunkedReduction, backend
from nxd_memopt.ops.autograd import as_dtype, first_derivative_only
from nxd_memopt.ops.early_save import SavedInputs, link_saved_inputs, saved_inputs
from nxd_memopt.ops.packed_view import packed_view
from nxd_memopt.ops.parts import split_sizes
from nxd_memopt.ops.sums import column_sums
from nxd_memopt.parallel_layers.functional.activation_sharding import ActivationSharding


@dataclass(frozen=True)
class ColumnActivationSharding(ActivationSharding):
    """How column-parallel weights of one input meet that input and its gradient.

    Args:
        replica_groups: for each weight the ranks that hold the same shard.
    """

    replica_groups: tuple[ProcessGroup | None, ...]


def products(
    gathering: ChunkedAllGather,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    inputs_of: Callable[[Tensor], Sequence[Tensor]] | None = None,
) -> list[Tensor]:
    """``X_i W_i^t + b_i`` for the X that is being gathered, computed as rows arrive.

    Args:
        gathering: of X, ``[S, ..., H]``.
        weights: ``[n_i, H]``.
        biases: ``[n_i]`` or ``None`` each; default none.
        inputs_of: makes the X_i from rows of X; default X for each weight.

    Returns:
        ``[S, ..., n_i]`` each.
    """
    biases = biases or [None] * len(weights)
    results: list[Tensor] = []
    for start, rows in gathering.pieces(2 * sum(weight.size(0) for weight in weights)):
        inputs = [rows] * len(weights) if inputs_of is None else inputs_of(rows)
        if rows.size(0) == gathering.length:
            return [F.linear(*each) for each in zip(inputs, weights, biases, strict=True)]
        shape = (gathering.length, *rows.shape[1:-1])
        results = results or [rows.new_empty((*shape, weight.size(0))) for weight in weights]
        for result, x, weight, bias in zip(results, inputs, weights, biases, strict=True):
            _linear_into(_flat(result[start : start + rows.size(0)]), x, weight, bias)
    return results


def _linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(_flat(x), weight.t(), out=out)
    else:
        torch.addmm(bias, _flat(x), weight.t(), out=out)


class ColumnParallel(torch.autograd.Function):
    """``Y_i = X W_i^t + b_i`` for several weights of one input; one collective each for X, and for dX.

    Backward saves the sequence shard only and gathers it again, while dX is computed; dX is reduced while dW is.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: ColumnActivationSharding, weight: Tensor, *others: Tensor | None
    ) -> tuple[Tensor, ...]:
        # The first tensor has a name of its own. Without gradients, dynamo (torch 2.9 to 2.13,
        # AutogradFunctionVariable.call_apply) leaves ctx out where the arguments are as many as the parameters: with
        # ``*parameters`` alone that was the case for one weight and its bias. Pairs after a named one never are.
        parameters = (weight, *others)
        weights, biases = cast("tuple[Tensor, ...]", parameters[0::2]), parameters[1::2]
        ctx.comm = comm
        ctx.save_for_backward(x, *weights)
        outputs = _joint_products(comm.gather(comm.sequence_first(x), materialize=False), weights, biases)
        return tuple(comm.as_given(output) for output in outputs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm: ColumnActivationSharding = ctx.comm
        x, *weights = ctx.saved_tensors
        x, *behind = backend.optimization_barrier([x, *grads])  # the second gather is not the first one's copy
        needs_input, _, *needs_parameters = ctx.needs_input_grad
        output_grads = [comm.sequence_first(grad) for grad in behind]
        gathering = comm.gather(comm.sequence_first(x)) if any(needs_parameters[0::2]) else None
        reduction = input_grad_reduction(comm, output_grads, weights) if needs_input else None
        whole = x if gathering is None else gathering.wait()
        by_parameters = parameter_grads(whole, output_grads, needs_parameters, comm.replica_groups)
        input_grad = None if reduction is None else comm.as_given(reduction.wait().to(x.dtype))
        return input_grad, None, *by_parameters


def _joint_products(
    gathering: ChunkedAllGather, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Of weights that lie side by side the outputs do so too, from one matmul."""
    whole = packed_view(weights, 0)
    given = [bias for bias in biases if bias is not None]
    if whole is None or len(given) not in (0, len(weights)):
        return products(gathering, weights, biases)
    bias = torch.cat(given) if len(given) > 1 else biases[0]
    (output,) = products(gathering, [whole], [bias])
    return split_sizes(output, [weight.size(0) for weight in weights], dim=-1)


def input_grad_reduction(
    comm: ActivationSharding, grads: Sequence[Tensor], weights: Sequence[Tensor]
) -> ChunkedReduction:
    """Start to sum ``dY_i W_i`` over the ranks; those of one rank are accumulated inside the matmuls, or by one."""
    whole_grad, whole_weight = packed_view(grads, -1), packed_view(weights, 0)
    if whole_grad is not None and whole_weight is not None:
        grads, weights = [whole_grad], [whole_weight]

    def rows(start: int, stop: int) -> Tensor:
        parts = [grad[start:stop] for grad in grads]
        flat = _flat(parts[0]) @ weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            flat.addmm_(_flat(part), weight)
        return flat.view(*parts[0].shape[:-1], flat.size(-1))

    return comm.reduce(rows, (*grads[0].shape[:-1], weights[0].size(1)), grads[0].dtype)


def parameter_grads(
    x: Tensor, grads: Sequence[Tensor], needed: Sequence[bool], replica_groups: Sequence[ProcessGroup | None]
) -> list[Tensor | None]:
    """``dW_i = dY_i^t X`` and ``db_i``, summed over the ranks that hold replicas of weight i.

    Args:
        x: ``[S, ..., H]``.
        grads: dY_i, ``[S, ..., n_i]``.
        needed: for each i, whether dW_i and db_i are wanted; the others are ``None``.
        replica_groups: for each i.
    """
    results: list[Tensor | None] = []
    weight_grads = _weight_grads(_flat(x), grads, needed[0::2])
    for grad, weight_grad, needs_bias, group in zip(grads, weight_grads, needed[1::2], replica_groups, strict=True):
        bias_grad = column_sums(grad) if needs_bias else None
        results += [g if g is None else backend.all_reduce(g, group) for g in (weight_grad, bias_grad)]
    return results


def _weight_grads(x: Tensor, grads: Sequence[Tensor], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    whole = packed_view(grads, -1) if all(needed) else None
    if whole is not None:
        return split_sizes(_flat(whole).t() @ x, [grad.size(-1) for grad in grads])
    return [_flat(grad).t() @ x if needs else None for grad, needs in zip(grads, needed, strict=True)]


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))


class RowParallel(torch.autograd.Function):
    """``Y = reduce(sum_i X_i W_i^t)``: all-reduce / identity; over sequence shards reduce-scatter / all-gather of dY.

    Rows are sent while others are computed; backward computes dX from rows of dY as they arrive.
    """

    @staticmethod
    def forward(ctx: Any, comm: ActivationSharding, handle: SavedInputs | None, x: Tensor, *others: Tensor) -> Tensor:
        factors = (x, *others)  # x has a name of its own for the reason given in ColumnParallel.forward
        inputs, weights = factors[0::2], factors[1::2]
        ctx.comm = comm
        link_saved_inputs(ctx, handle, *factors)
        first = [comm.sequence_first(x) for x in inputs]

        def rows(start: int, stop: int) -> Tensor:
            parts = [x[start:stop] for x in first]
            output = F.linear(parts[0], weights[0])  # no view, which its user could not write to
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                _flat(output).addmm_(_flat(part), weight.t())
            return output

        shape, dtype = (*first[0].shape[:-1], weights[0].size(0)), inputs[0].dtype
        return comm.as_given(as_dtype(comm.reduce(rows, shape, dtype).wait(), dtype))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        comm: ActivationSharding = ctx.comm
        factors, wanted = saved_inputs(ctx)
        inputs, weights = factors[0::2], factors[1::2]
        gathering = comm.gather(comm.sequence_first(grad))
        input_grads = products(gathering, [weight.t() for weight in weights])
        whole = _flat(gathering.wait())
        results: list[Tensor | None] = []
        for x, input_grad, needs_weight in zip(inputs, input_grads, wanted[1::2], strict=True):
            weight_grad = whole.t() @ _flat(comm.sequence_first(x)) if needs_weight else None
            results += [comm.as_given(input_grad), weight_grad]
        return None, None, *results
