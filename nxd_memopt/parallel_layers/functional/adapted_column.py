"""Autograd function of column-parallel layers with low-rank adapters, which their matmuls add.

A layer computes ``Y = X W^t + scale * (X A^t) B^t`` with A ``[r, in]`` and B ``[out, r]``
(arXiv:2106.09685), where W is frozen. With ``P = X A^t``:

    dP = scale * dY B    dB = scale * dY^t P    dA = dP^t X    dX = dY W + dP A

The terms of rank r are added inside the large matmuls (``ops.low_rank``). Under tensor parallelism the r columns of
P and dP are gathered and reduced, not X.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import ChunkedAllGather, backend
from nxd_memopt.ops.autograd import as_dtype, cast_if_autocast_enabled, first_derivative_only, without_autocast
from nxd_memopt.ops.low_rank import LowRankTerm, scaled_product
from nxd_memopt.ops.norm import NormInput
from nxd_memopt.ops.parts import flat_rows, joined, packed_view, split_sizes
from nxd_memopt.parallel_layers.functional import fp8_linear
from nxd_memopt.parallel_layers.functional.linear import (
    ActivationSharding,
    ColumnActivationSharding,
    input_grad_reduction,
    packed_products,
    parameter_grads,
)


@dataclass(frozen=True)
class LowRankFactors:
    """The factors of ``scale * up down``, which is added to a layer's weight.

    Args:
        down: A, ``[r, in]``.
        up: B, ``[out, r]``.
        scale: factor of the product.
    """

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True)
class Updates:
    """Which of several column-parallel layers with one input have adapters.

    Args:
        num_layers: number of layers.
        layers: for each adapter the index of its layer.
        downs: for each adapter the index of its A; the parts of a fused layer have one A.
        scales: for each adapter the factor of its output.
        num_downs: number of different A.
    """

    num_layers: int
    layers: tuple[int, ...]
    downs: tuple[int, ...]
    scales: tuple[float, ...]
    num_downs: int

    @classmethod
    def of(cls, factors: Sequence[LowRankFactors | None]) -> tuple[Updates, list[Tensor]]:
        """Return the updates of layers with these adapters, and the different A."""
        present = [(i, each) for i, each in enumerate(factors) if each is not None]
        # One A of several layers is computed once, and its gradient is the sum over the layers.
        indices = {down: i for i, down in enumerate(dict.fromkeys(each.down for _, each in present))}
        scales = tuple(each.scale for _, each in present)
        of_downs = tuple(indices[each.down] for _, each in present)
        return cls(len(factors), tuple(i for i, _ in present), of_downs, scales, len(indices)), list(indices)

    def by_kind(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Split ``[W_1, b_1, W_2, ..., A_1, ..., B_1, ...]`` into weights with biases, A, and B."""
        first = 2 * self.num_layers
        second = first + self.num_downs
        return tensors[:first], tensors[first:second], tensors[second:]

    def columns(self, joint: Tensor, downs: Sequence[Tensor]) -> list[Tensor]:
        """Return the columns ``[..., r]`` of each adapter in ``joint``, ``[..., r_1 + ... + r_m]``."""
        parts = split_sizes(joint, _ranks(downs), dim=-1)
        return [parts[index] for index in self.downs]

    def terms(self, columns: Sequence[Tensor], ups: Sequence[Tensor]) -> list[LowRankTerm | None]:
        """Return the term of each layer's output, None without an adapter."""
        terms: list[LowRankTerm | None] = [None] * self.num_layers
        for i, scale, part, up in zip(self.layers, self.scales, columns, ups, strict=True):
            terms[i] = LowRankTerm(part, up.t(), scale)
        return terms


def adapted_column_parallel(
    input: Tensor,
    parameters: Sequence[tuple[Tensor, Tensor | None]],
    factors: Sequence[LowRankFactors | None],
    comm: ColumnActivationSharding,
) -> tuple[Tensor, ...]:
    """Return ``X W_i^t + b_i + scale_i * (X A_i^t) B_i^t`` for each layer; one matmul for all A.

    Args:
        input: ``[..., H]``; under sequence parallelism this rank's sequence shard.
        parameters: this rank's weights ``[n_i, H]`` and biases ``[n_i]`` (or None).
        factors: for each layer its adapter or None, A replicated and B sharded like W; at least one
            adapter.
        comm: sharding of the input.
    """
    if input.dim() == 1:
        outputs = adapted_column_parallel(input.unsqueeze(0), parameters, factors, comm)
        return tuple(output.squeeze(0) for output in outputs)
    weights = [weight for weight, _ in parameters]
    require_frozen(*weights, comm=comm)
    updates, downs = Updates.of(factors)
    tensors = [tensor for pair in parameters for tensor in pair]
    ups = [each.up for each in factors if each is not None]
    x, *tensors = cast_if_autocast_enabled(input, *tensors, *downs, *ups)
    # dA alone reads X if the weights are frozen, and what a norm keeps gives dA too. A cast has lost it.
    source = None
    if x is input and not any(weight.requires_grad for weight in weights):
        source = NormInput.of(input)
    with without_autocast(input):
        return cast("tuple[Tensor, ...]", AdaptedColumnParallel.apply(x, comm, updates, source, *tensors))


def require_frozen(*weights: Tensor, comm: ActivationSharding) -> None:
    """Raise ``ValueError`` if a layer with an adapter rounds to float8 and trains its weight too."""
    if comm.fp8 is not None and any(weight.requires_grad for weight in weights):
        raise ValueError("a layer with an adapter and float8 operands needs a frozen weight: leave fp8 out")


class AdaptedColumnParallel(torch.autograd.Function):
    """``Y_i = X W_i^t + b_i + scale_i * P_i B_i^t`` with ``[P_1, ..., P_m] = X [A_1; ...; A_m]^t``.

    Under sequence parallelism A is applied to the sequence shard and P is gathered; dP is
    reduce-scattered, and each rank computes dA of its shard. Otherwise dP is all-reduced.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: ColumnActivationSharding,
        updates: Updates,
        source: NormInput | None,
        weight: Tensor,
        *remaining: Tensor | None,
    ) -> tuple[Tensor, ...]:
        # ``weight`` is a named parameter for the reason in ColumnParallel.forward.
        parameters, downs, ups = updates.by_kind((weight, *remaining))
        weights, biases = parameters[0::2], parameters[1::2]
        shard = comm.sequence_first(x)
        reduced = F.linear(shard, joined(downs, 0))  # [s, ..., r_1 + ... + r_m]
        ctx.comm, ctx.updates = comm, updates
        kept = [x] if source is None else list(source)
        ctx.save_for_backward(reduced, *weights, *downs, *ups, *kept)
        # A copy, because the gather of X may use the same buffer.
        gathered = comm.gather(reduced).wait(copy=True)
        terms = updates.terms(updates.columns(gathered, downs), ups)
        if comm.fp8 is None:
            results = products_with_terms(comm.gather(shard, materialize=False), weights, biases, terms)
        else:
            outputs, ctx.weight_sizes = fp8_linear.column_outputs(comm, shard, weights, biases)
            results = _with_terms(outputs, terms)
        # Before the first adapter of a model X has no gradient. A layer without an adapter has none then.
        needs_input, _, _, _, *needs = ctx.needs_input_grad
        if not needs_input:
            frozen = (i for i in range(updates.num_layers) if terms[i] is None and not any(needs[2 * i :][:2]))
            ctx.mark_non_differentiable(*(results[i] for i in frozen))
        return tuple(comm.original_layout(result) for result in results)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm: ColumnActivationSharding = ctx.comm
        updates: Updates = ctx.updates
        reduced, *saved = ctx.saved_tensors
        weights, saved = saved[: updates.num_layers], saved[updates.num_layers :]
        downs, saved = saved[: updates.num_downs], saved[updates.num_downs :]
        ups, kept = saved[: len(updates.layers)], saved[len(updates.layers) :]
        # On XLA the barrier has the purpose of the one in ColumnParallel.backward.
        reduced, *barriered = backend.optimization_barrier([reduced, *kept, *grads])
        kept, barriered = barriered[: len(kept)], barriered[len(kept) :]
        needs_input, _, _, _, *needs = ctx.needs_input_grad
        needs_parameters, needs_down, needs_up = updates.by_kind(needs)
        output_grads = [comm.sequence_first(grad) for grad in barriered]
        # Order of launches: gather of P, dP, reduction of dP (overlaps with dB), reduction of dX
        # (overlaps with dA). A group has one reduction at a time.
        gathered = comm.gather(reduced).wait(copy=True)
        gathering = None
        if any(needs_parameters[0::2]):
            gathering = comm.gather(comm.sequence_first(kept[0]))
        partial = _rank_gradient(output_grads, ups, updates)
        reducing = comm.reduce(lambda start, stop: partial[start:stop], partial.shape, partial.dtype)
        columns = updates.columns(flat_rows(gathered), downs)
        up_grads = _up_gradients(output_grads, columns, needs_up, updates, comm.replica_groups)
        rank_grad = as_dtype(reducing.wait(), reduced.dtype)
        reduction = None
        # The sum over the ranks of dP_t A is the adapter's part of dX: one more term of the local sum.
        term = LowRankTerm(partial, joined(downs, 0))
        if needs_input and comm.fp8 is None:
            # The term is first, for the reason in ``LowRankTerm.plus_linear``.
            wide_grads, wide_weights = _packed_factors(output_grads, weights)
            reduction = input_grad_reduction(comm, [term.a, *wide_grads], [term.b, *wide_weights])
        elif needs_input:
            reduction = fp8_linear.frozen_input_grad_reduction(comm, output_grads, weights, ctx.weight_sizes, term)
        down_grads: Sequence[Tensor | None] = [None] * updates.num_downs
        if any(needs_down):
            kept_rows = [each if each.dim() == 1 else flat_rows(comm.sequence_first(each)) for each in kept]
            down_grads = split_sizes(_down_gradient(flat_rows(rank_grad), kept_rows), _ranks(downs))
        # Without a gather no weight gradient is computed: the argument only has to be a tensor.
        full = output_grads[0] if gathering is None else gathering.wait()
        grads_of_parameters = parameter_grads(full, output_grads, needs_parameters, comm.replica_groups)
        input_grad = None
        if reduction is not None:
            input_grad = comm.original_layout(reduction.wait().to(reduced.dtype))
        return input_grad, None, None, None, *grads_of_parameters, *down_grads, *up_grads


def products_with_terms(
    gathering: ChunkedAllGather,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    terms: Sequence[LowRankTerm | None],
) -> list[Tensor]:
    """Return ``linear.packed_products`` with ``terms``, of which at least one is not None, added to the outputs."""
    if not backend.views_share_memory:
        return _with_terms(packed_products(gathering, weights, biases), terms)
    like = next(term.a for term in terms if term is not None)
    packed = packed_view(weights, 0)
    matrices = weights if packed is None else [packed]
    totals = [like.new_empty((*like.shape[:-1], matrix.size(0))) for matrix in matrices]
    parts = totals
    if packed is not None:
        parts = list(split_sizes(totals[0], [weight.size(0) for weight in weights], dim=-1))
    # Biases and terms are written first, for the reason in ``LowRankTerm.plus_linear``.
    for part, bias, term in zip(parts, biases, terms, strict=True):
        if term is not None:
            term.write(part, bias)
        elif bias is not None:
            part.copy_(bias)
        else:
            part.zero_()
    for start, rows in gathering.chunks(2 * sum(matrix.size(0) for matrix in matrices)):
        for total, matrix in zip(totals, matrices, strict=True):
            flat_rows(total[start : start + rows.size(0)]).addmm_(flat_rows(rows), matrix.t())
    return parts


def _with_terms(outputs: Sequence[Tensor], terms: Sequence[LowRankTerm | None]) -> list[Tensor]:
    return [y if term is None else term.added_to(y) for y, term in zip(outputs, terms, strict=True)]


def _packed_factors(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the factors of ``sum_i dY_i W_i``, one pair if both are packed."""
    packed_grad, packed_weight = packed_view(grads, -1), packed_view(weights, 0)
    if packed_grad is None or packed_weight is None:
        return grads, weights
    return [packed_grad], [packed_weight]


def _down_gradient(rank_grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
    """Return ``dA = dP^t X``; ``kept`` is X, or what a norm computed X from."""
    if len(kept) == 1:
        return rank_grad.t() @ kept[0]
    return NormInput(*kept).transposed_product(rank_grad)


def _rank_gradient(grads: Sequence[Tensor], ups: Sequence[Tensor], updates: Updates) -> Tensor:
    """Return this rank's part of dP, ``[S, ..., r_1 + ... + r_m]``; layers with one A add up."""
    parts: dict[int, Tensor] = {}
    for i, index, scale, up in zip(updates.layers, updates.downs, updates.scales, ups, strict=True):
        grad = flat_rows(grads[i])
        if index in parts:
            parts[index] = parts[index].addmm_(grad, up, alpha=scale)
        else:
            parts[index] = scaled_product(grad, up, scale)
    columns = joined([parts[index] for index in range(updates.num_downs)], -1)
    return columns.view(*grads[0].shape[:-1], columns.size(-1))


def _up_gradients(
    grads: Sequence[Tensor],
    columns: Sequence[Tensor],
    needed: Sequence[bool],
    updates: Updates,
    replica_groups: Sequence[ProcessGroup | None],
) -> list[Tensor | None]:
    """Return dB of each adapter, summed over the ranks that hold replicas of its layer."""
    results: list[Tensor | None] = []
    for i, scale, part, needs_up in zip(updates.layers, updates.scales, columns, needed, strict=True):
        grad = None
        if needs_up:
            grad = backend.all_reduce(scaled_product(flat_rows(grads[i]).t(), part, scale), replica_groups[i])
        results.append(grad)
    return results


def _ranks(downs: Sequence[Tensor]) -> list[int]:
    return [down.size(0) for down in downs]
