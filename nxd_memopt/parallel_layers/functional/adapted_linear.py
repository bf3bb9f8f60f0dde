"""Autograd functions of linear layers with low-rank adapters, which are added inside matmuls that accumulate.

A layer computes ``Y = X W^t + scale * (X A^t) B^t`` with A ``[r, in]`` and B ``[out, r]``
(arXiv:2106.09685). An addition after the matmuls would read and write Y once more in forward, and
dX in backward. Here ``addmm`` adds ``P B^t`` to Y and ``dP A`` to dX, with ``P = X A^t``:

    dP = scale * dY B    dB = scale * dY^t P    dA = dP^t X    dX = dY W + dP A

Under tensor parallelism the r columns of P and dP are gathered and reduced, not X.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import ChunkedReduction, backend
from nxd_memopt.ops import fp8
from nxd_memopt.ops.activation import gated_activation, gated_activation_gradient
from nxd_memopt.ops.autograd import (
    SavedInputs,
    as_dtype,
    cast_if_autocast_enabled,
    first_derivative_only,
    link_saved_inputs,
    save_inputs_first,
    saved_inputs,
    without_autocast,
)
from nxd_memopt.ops.cross_entropy import add_matmul
from nxd_memopt.ops.parts import packed_view, split_sizes
from nxd_memopt.parallel_layers.functional import fp8_linear
from nxd_memopt.parallel_layers.functional.gated_mlp import require_first_backward, row_tiles
from nxd_memopt.parallel_layers.functional.linear import (
    ActivationSharding,
    ColumnActivationSharding,
    input_grad_reduction,
    packed_products,
    parameter_grads,
    products,
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
        downs: list[Tensor] = []
        indices: list[int] = []
        for _, each in present:
            index = next((j for j, down in enumerate(downs) if down is each.down), len(downs))
            if index == len(downs):
                downs.append(each.down)
            indices.append(index)
        scales = tuple(each.scale for _, each in present)
        updates = cls(len(factors), tuple(i for i, _ in present), tuple(indices), scales, len(downs))
        return updates, downs

    def by_kind(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Split ``[W_1, b_1, W_2, ..., A_1, ..., B_1, ...]`` into weights with biases, A, and B."""
        first = 2 * self.num_layers
        second = first + self.num_downs
        return tensors[:first], tensors[first:second], tensors[second:]

    def columns(self, joint: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Return the columns ``[rows, r]`` of each adapter in ``joint``, ``[..., r_1 + ... + r_m]``."""
        parts = split_sizes(_flat(joint), ranks, dim=-1)
        return [parts[index] for index in self.downs]


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
    _require_frozen(*(weight for weight, _ in parameters), comm=comm)
    updates, downs = Updates.of(factors)
    tensors = [tensor for pair in parameters for tensor in pair]
    ups = [each.up for each in factors if each is not None]
    x, *tensors = cast_if_autocast_enabled(input, *tensors, *downs, *ups)
    with without_autocast(input):
        return cast("tuple[Tensor, ...]", AdaptedColumnParallel.apply(x, comm, updates, *tensors))


def _require_frozen(*weights: Tensor, comm: ActivationSharding) -> None:
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
        ctx: Any, x: Tensor, comm: ColumnActivationSharding, updates: Updates, weight: Tensor, *remaining: Tensor | None
    ) -> tuple[Tensor, ...]:
        # ``weight`` is a named parameter for the reason in ColumnParallel.forward.
        parameters, downs, ups = updates.by_kind((weight, *remaining))
        weights, biases = parameters[0::2], parameters[1::2]
        shard = comm.sequence_first(x)
        reduced = F.linear(shard, _joint(downs))  # [s, ..., r_1 + ... + r_m]
        ctx.comm, ctx.updates = comm, updates
        ctx.save_for_backward(x, reduced, *weights, *downs, *ups)
        # A copy, because the gather of X may use the same buffer.
        gathered = comm.gather(reduced).wait(copy=True)
        if comm.fp8 is None:
            outputs = packed_products(comm.gather(shard, materialize=False), weights, biases)
        else:
            sizes = fp8.magnitudes(_flat(shard), comm.fp8, fp8_linear.gathering_group(comm))
            rows = fp8.as_rows(_flat(shard), sizes, fp8.FORWARD_DTYPE)
            outputs, ctx.weight_sizes = fp8_linear.column_outputs(comm, shard, rows, weights, biases)
        results = list(outputs)
        columns = updates.columns(gathered, _ranks(downs))
        for i, scale, part, up in zip(updates.layers, updates.scales, columns, ups, strict=True):
            results[i] = _accumulated(results[i], part, up.t(), scale)
        # Before the first adapter of a model X has no gradient. A layer without an adapter has none then.
        needs_input, _, _, *needs = ctx.needs_input_grad
        if not needs_input:
            frozen = (i for i in range(updates.num_layers) if i not in updates.layers and not any(needs[2 * i :][:2]))
            ctx.mark_non_differentiable(*(results[i] for i in frozen))
        return tuple(comm.original_layout(result) for result in results)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm: ColumnActivationSharding = ctx.comm
        updates: Updates = ctx.updates
        x, reduced, *saved = ctx.saved_tensors
        # On XLA the barrier has the purpose of the one in ColumnParallel.backward.
        x, reduced, *barriered = backend.optimization_barrier([x, reduced, *grads])
        weights = saved[: updates.num_layers]
        downs, ups = saved[updates.num_layers :][: updates.num_downs], saved[updates.num_layers + updates.num_downs :]
        needs_input, _, _, *needs = ctx.needs_input_grad
        needs_parameters, needs_down, needs_up = updates.by_kind(needs)
        output_grads = [comm.sequence_first(grad) for grad in barriered]
        # Order of launches: gather of P, dP, reduction of dP (overlaps with dB), reduction of dX
        # (overlaps with dA). A group has one reduction at a time.
        gathered = comm.gather(reduced).wait(copy=True)
        gathering = None
        if any(needs_parameters[0::2]):
            gathering = comm.gather(comm.sequence_first(x))
        partial = _rank_gradient(output_grads, ups, updates)
        reducing = comm.reduce(lambda start, stop: partial[start:stop], partial.shape, partial.dtype)
        columns = updates.columns(gathered, _ranks(downs))
        up_grads = _up_gradients(output_grads, columns, needs_up, updates, comm.replica_groups)
        rank_grad = as_dtype(reducing.wait(), x.dtype)
        reduction = None
        # The sum over the ranks of dP_t A is the adapter's part of dX: one more term of the local sum.
        if needs_input and comm.fp8 is None:
            factors = _packed_factors(output_grads, weights)
            reduction = input_grad_reduction(comm, [*factors[0], partial], [*factors[1], _joint(downs)])
        elif needs_input and comm.fp8 is not None:
            joined = fp8_linear.joined(output_grads, -1)
            sizes = fp8.magnitudes(_flat(joined), comm.fp8)
            rows = fp8.as_rows(_flat(joined), sizes, comm.fp8.gradient_dtype)
            reduction = fp8_linear.input_grad_reduction(
                comm, joined.shape, rows, weights, ctx.weight_sizes, x.dtype, (partial, _joint(downs))
            )
        down_grads: Sequence[Tensor | None] = [None] * updates.num_downs
        if any(needs_down):
            down_grads = split_sizes(_flat(rank_grad).t() @ _flat(comm.sequence_first(x)), _ranks(downs))
        full = x if gathering is None else gathering.wait()
        grads_of_parameters = parameter_grads(full, output_grads, needs_parameters, comm.replica_groups)
        input_grad = None
        if reduction is not None:
            input_grad = comm.original_layout(reduction.wait().to(x.dtype))
        return input_grad, None, None, *grads_of_parameters, *down_grads, *up_grads


def _packed_factors(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the factors of ``sum_i dY_i W_i``, one pair if both are packed."""
    packed_grad = packed_view(grads, -1)
    packed_weight = packed_view(weights, 0)
    if packed_grad is None or packed_weight is None:
        return grads, weights
    return [packed_grad], [packed_weight]


def _rank_gradient(grads: Sequence[Tensor], ups: Sequence[Tensor], updates: Updates) -> Tensor:
    """Return this rank's part of dP, ``[S, ..., r_1 + ... + r_m]``; layers with one A add up."""
    parts: dict[int, Tensor] = {}
    for i, index, scale, up in zip(updates.layers, updates.downs, updates.scales, ups, strict=True):
        grad = _flat(grads[i])
        if index in parts:
            parts[index] = parts[index].addmm_(grad, up, alpha=scale)
        else:
            parts[index] = _scaled_product(grad, up, scale)
    joint = _joint([parts[index] for index in range(updates.num_downs)], dim=-1)
    return joint.view(*grads[0].shape[:-1], joint.size(-1))


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
            grad = backend.all_reduce(_scaled_product(_flat(grads[i]).t(), part, scale), replica_groups[i])
        results.append(grad)
    return results


def adapted_row_parallel(input: Tensor, weight: Tensor, factors: LowRankFactors, comm: ActivationSharding) -> Tensor:
    """Return ``reduce(X W^t) + scale * reduce(X A^t) B^t``, without a bias.

    Args:
        input: ``[..., n/T]``; T divides the sequence length if it is to be scattered.
        weight: ``[H, n/T]``.
        factors: A sharded like W, B replicated.
        comm: group, sequence dimension and dtype of the reduction.
    """
    if input.dim() == 1:
        return adapted_row_parallel(input.unsqueeze(0), weight, factors, comm).squeeze(0)
    _require_frozen(weight, comm=comm)
    x, weight, down, up = cast("list[Tensor]", cast_if_autocast_enabled(input, weight, factors.down, factors.up))
    with without_autocast(x):
        # Saved before the Function runs, as in ``layers.row_parallel``: a recompute that ends here
        # computes the r columns but not the output.
        reduced = _reduced_columns(comm.sequence_first(x), down, comm)
        handle, saved = save_inputs_first(x, weight, down, up, reduced)
        return cast(Tensor, AdaptedRowParallel.apply(comm, factors.scale, handle, *saved))


@torch.no_grad()
def _reduced_columns(rows: Tensor, down: Tensor, comm: ActivationSharding) -> Tensor:
    """Return ``reduce(X A^t)`` of sequence-first rows, ``[s, ..., r]``, without a gradient."""
    shape = (*rows.shape[:-1], down.size(0))
    reduction = comm.reduce(lambda start, stop: F.linear(rows[start:stop], down), shape, rows.dtype)
    return as_dtype(reduction.wait(), rows.dtype)


class AdaptedRowParallel(torch.autograd.Function):
    """``Y = reduce(X W^t) + scale * P B^t`` with ``P = reduce(X A^t)``, computed before.

    Backward gathers dY and the r columns of dP. Under sequence parallelism dB is of this rank's
    rows, and ``grads.allreduce_sequence_parallel_gradients`` sums it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        comm: ActivationSharding,
        scale: float,
        handle: SavedInputs | None,
        x: Tensor,
        weight: Tensor,
        down: Tensor,
        up: Tensor,
        reduced: Tensor,
    ) -> Tensor:
        ctx.comm, ctx.scale = comm, scale
        link_saved_inputs(ctx, handle, x, weight, down, up, reduced)
        rows = comm.sequence_first(x)
        output = as_dtype(_row_reduction(ctx, rows, weight).wait(), x.dtype)
        return comm.original_layout(_accumulated(output, _flat(reduced), up.t(), scale))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        comm: ActivationSharding = ctx.comm
        (x, weight, down, up, reduced), needs = saved_inputs(ctx)
        needs_input, needs_weight, needs_down, needs_up, _ = needs
        shard = comm.sequence_first(grad)
        rank_grad, up_grad = _row_gradients(shard, up, reduced, ctx.scale, comm, needs_up=needs_up)
        flat_input = _flat(comm.sequence_first(x))
        input_grad = weight_grad = down_grad = None
        if needs_input and comm.fp8 is not None:
            base = _fp8_input_grad(ctx, shard, weight)
            input_grad = comm.original_layout(_accumulated(base, rank_grad, down))
        elif needs_input or needs_weight:
            gathering = comm.gather(shard, materialize=needs_weight)
            (base,) = products(gathering, [weight.t()])
            input_grad = comm.original_layout(_accumulated(base, rank_grad, down))
            if needs_weight:
                weight_grad = _flat(gathering.wait()).t() @ flat_input
        if needs_down:
            down_grad = rank_grad.t() @ flat_input
        return None, None, None, input_grad, weight_grad, down_grad, up_grad, None


def _row_reduction(ctx: Any, rows: Tensor, weight: Tensor) -> ChunkedReduction:
    """Start reducing ``X W^t`` of sequence-first rows, in float8 if the layer rounds."""
    comm: ActivationSharding = ctx.comm
    if comm.fp8 is None:
        shape = (*rows.shape[:-1], weight.size(0))
        return comm.reduce(lambda start, stop: F.linear(rows[start:stop], weight), shape, rows.dtype)
    ctx.weight_sizes = fp8_linear.weight_sizes_of(comm, weight)
    operands = (
        fp8.as_rows(_flat(rows), fp8.magnitudes(_flat(rows), comm.fp8), fp8.FORWARD_DTYPE),
        fp8_linear.weight_rows(comm, weight, ctx.weight_sizes),
    )
    return fp8_linear.reduced_products(comm, rows.shape, [operands], rows.dtype, fast=True)


def _fp8_input_grad(ctx: Any, shard: Tensor, weight: Tensor) -> Tensor:
    """Return ``dY W`` of all ranks' rows, ``[S, ..., n]``."""
    gradient = fp8_linear.RowGradient(ctx.comm, shard, needs_columns=False)
    (result,) = gradient.products([fp8_linear.weight_columns(ctx.comm, weight, ctx.weight_sizes)], shard.dtype)
    return result


def _row_gradients(
    shard: Tensor, up: Tensor, reduced: Tensor, scale: float, comm: ActivationSharding, *, needs_up: bool
) -> tuple[Tensor, Tensor | None]:
    """Return dP of all rows, ``[rows, r]``, and dB of this rank's rows.

    Args:
        shard: dY, ``[s, ..., H]``.
        up: B, ``[H, r]``.
        reduced: P, ``[s, ..., r]``.
        scale: factor of the adapter's output.
        comm: group and sequence dimension.
        needs_up: whether dB is needed.
    """
    flat = _flat(shard)
    part = _scaled_product(flat, up, scale).view(*shard.shape[:-1], up.size(1))
    # A copy, because the gather of dY may use the same buffer.
    rank_grad = _flat(comm.gather(part).wait(copy=True))
    up_grad = None
    if needs_up:
        up_grad = _scaled_product(flat.t(), _flat(reduced), scale)
    return rank_grad, up_grad


def adapted_gated_mlp(
    gate: Tensor, up: Tensor, weight: Tensor, factors: LowRankFactors, comm: ActivationSharding, hidden_act: str
) -> Tensor:
    """Return ``adapted_row_parallel`` of ``act(gate) * up`` on rows; saves gate and up, which backward overwrites.

    Args:
        gate: ``[rows, n/T]``, sequence first.
        up: ``[rows, n/T]``.
        weight: ``[H, n/T]``.
        factors: A sharded like the weight, B replicated.
        comm: group, sequence dimension and dtype of the reduction.
        hidden_act: one of ``ops.activation.ACTIVATIONS``.
    """
    tensors = cast_if_autocast_enabled(gate, up, weight, factors.down, factors.up)
    gate, up, weight, down, factor_b = cast("list[Tensor]", tensors)
    _require_frozen(weight, comm=comm)
    with without_autocast(gate):
        # Both matmuls read the activation. It is computed once, and is free when this returns.
        with torch.no_grad():
            activated = gated_activation(gate, up, hidden_act)
        reduced = _reduced_columns(activated, down, comm)
        handle, saved = save_inputs_first(gate, up, weight, down, factor_b, reduced)
        options = (comm, hidden_act, factors.scale, activated, handle)
        return cast(Tensor, AdaptedGatedRowParallel.apply(*options, *saved))


class AdaptedGatedRowParallel(torch.autograd.Function):
    """``GatedRowParallel`` with an adapter: ``Y = reduce(Z W^t) + scale * P B^t``, ``Z = act(G) * U``.

    Saves G, U and ``P = reduce(Z A^t)``, which is computed before. Backward recomputes Z tile by tile
    for dA, and overwrites G and U with their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        comm: ActivationSharding,
        hidden_act: str,
        scale: float,
        activated: Tensor,
        handle: SavedInputs | None,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        factor_a: Tensor,
        factor_b: Tensor,
        reduced: Tensor,
    ) -> Tensor:
        ctx.comm, ctx.hidden_act, ctx.scale = comm, hidden_act, scale
        link_saved_inputs(ctx, handle, gate, up, weight, factor_a, factor_b, reduced)
        reduction = _row_reduction(ctx, activated, weight)
        return _accumulated(as_dtype(reduction.wait(), gate.dtype), reduced, factor_b.t(), scale)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first_backward(ctx)
        comm: ActivationSharding = ctx.comm
        (gate, up, weight, factor_a, factor_b, reduced), needs = saved_inputs(ctx)
        _, _, needs_weight, needs_a, needs_b, _ = needs
        # On XLA the barrier keeps the activation of forward from being reused, and thus stored.
        gate, up, grad = backend.optimization_barrier([gate, up, grad])
        rank_grad, grad_b = _row_gradients(grad, factor_b, reduced, ctx.scale, comm, needs_up=needs_b)
        # Of all tiles dA has r * F/T elements, little enough for a sum in fp32.
        wide = torch.promote_types(factor_a.dtype, torch.float32)
        weight_grad: Tensor | None = None
        grad_a: Tensor | None = None
        # For each tile: dZ = dY W + dP A, one kernel that recomputes Z and overwrites G and U, dA += dP^t Z.
        for start, grads, base in _activation_gradients(ctx, grad, weight, gate):
            tile = slice(start, start + base.size(0))
            activation_grad = _accumulated(base, rank_grad[tile], factor_a)
            activated = gated_activation_gradient(gate[tile], up[tile], activation_grad, ctx.hidden_act)
            if needs_weight:
                weight_grad = add_matmul(weight_grad, grads.t(), activated, weight.dtype)
            if needs_a:
                grad_a = add_matmul(grad_a, rank_grad[tile].t(), activated, wide)
            # Otherwise this tile would still exist while the next one is computed.
            del activated, activation_grad, base
        # gate and up are overwritten: with new versions autograd rejects a use of the old values.
        torch.autograd.graph.increment_version((gate, up))
        if grad_a is not None:
            grad_a = grad_a.to(factor_a.dtype)
        return None, None, None, None, None, gate, up, weight_grad, grad_a, grad_b, None


def _activation_gradients(ctx: Any, grad: Tensor, weight: Tensor, gate: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the first row, dY and ``dY W`` of tiles of all ranks' rows; in float8 all rows are one tile.

    In float8 dY is this rank's: W, which it is for, is frozen.
    """
    comm: ActivationSharding = ctx.comm
    if comm.fp8 is not None:
        yield 0, grad, _fp8_input_grad(ctx, grad, weight)
        return
    for start, grads in row_tiles(comm.gather(grad, materialize=False), gate, 4 * weight.size(1)):
        yield start, grads, grads @ weight


def _accumulated(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """Return ``total + scale * a b``, in the memory of ``total`` where views share memory.

    Args:
        total: ``[..., n]``.
        a: ``[rows, r]``.
        b: ``[r, n]``.
        scale: factor of the product.
    """
    if backend.views_share_memory:
        # ``view`` raises where ``reshape`` would add to a copy.
        total.view(-1, total.size(-1)).addmm_(a, b, alpha=scale)
        return total
    return torch.addmm(_flat(total), a, b, alpha=scale).view(total.shape)


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``scale * a b``; the factor costs no pass of its own."""
    # With beta=0 the first argument is not read: it has no values.
    return torch.addmm(b.new_empty(1, 1), a, b, beta=0, alpha=scale)


def _joint(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the tensors as one; a copy of several factors has r * H elements each."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors), dim)


def _ranks(downs: Sequence[Tensor]) -> list[int]:
    return [down.size(0) for down in downs]


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))
