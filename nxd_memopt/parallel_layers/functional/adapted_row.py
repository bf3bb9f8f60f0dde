"""Autograd functions of row-parallel layers with low-rank adapters, after a gated activation too.

``adapted_column`` has the formulas. Backward gathers dY and the r columns of dP. Under sequence parallelism dB is of
this rank's rows, and ``grads.allreduce_sequence_parallel_gradients`` sums it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.activation import gated_activation, gated_activation_gradient
from nxd_memopt.ops.autograd import (
    SavedInputs,
    as_dtype,
    cast_if_autocast_enabled,
    first_derivative_only,
    link_saved_inputs,
    require_first_backward,
    save_inputs_first,
    saved_inputs,
    without_autocast,
)
from nxd_memopt.ops.cross_entropy import add_matmul
from nxd_memopt.ops.low_rank import LowRankTerm, scaled_product
from nxd_memopt.ops.parts import flat_rows
from nxd_memopt.parallel_layers.functional import fp8_linear
from nxd_memopt.parallel_layers.functional.adapted_column import (
    LowRankFactors,
    products_with_terms,
    require_frozen,
)
from nxd_memopt.parallel_layers.functional.gated_mlp import row_tiles
from nxd_memopt.parallel_layers.functional.linear import ActivationSharding


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
    require_frozen(weight, comm=comm)
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
    """``Y = reduce(X W^t) + scale * P B^t`` with ``P = reduce(X A^t)``, computed before."""

    @staticmethod
    def forward(
        ctx: Any,
        comm: ActivationSharding,
        scale: float,
        handle: SavedInputs | None,
        *saved: Tensor,
    ) -> Tensor:
        ctx.comm, ctx.scale = comm, scale
        link_saved_inputs(ctx, handle, *saved)
        x, weight, _, up, reduced = saved
        output = _output(ctx, comm.sequence_first(x), weight, LowRankTerm(reduced, up.t(), scale))
        return comm.original_layout(output)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        comm: ActivationSharding = ctx.comm
        (x, weight, down, up, reduced), needs = saved_inputs(ctx)
        needs_input, needs_weight, needs_down, needs_up, _ = needs
        shard = comm.sequence_first(grad)
        rank_grad, up_grad = _gradients(shard, up, reduced, ctx.scale, comm, needs_up=needs_up)
        term = LowRankTerm(rank_grad, down)
        flat_input = flat_rows(comm.sequence_first(x))
        input_grad = weight_grad = down_grad = None
        if needs_input and comm.fp8 is not None:
            base = fp8_linear.frozen_row_input_grad(comm, shard, weight, ctx.weight_sizes)
            input_grad = comm.original_layout(term.added_to(base))
        elif needs_input or needs_weight:
            gathering = comm.gather(shard, materialize=needs_weight)
            (whole,) = products_with_terms(gathering, [weight.t()], [None], [term])
            input_grad = comm.original_layout(whole)
            if needs_weight:
                weight_grad = flat_rows(gathering.wait()).t() @ flat_input
        if needs_down:
            down_grad = flat_rows(rank_grad).t() @ flat_input
        return None, None, None, input_grad, weight_grad, down_grad, up_grad, None


def _output(ctx: Any, rows: Tensor, weight: Tensor, term: LowRankTerm) -> Tensor:
    """Return ``reduce(X W^t)`` of sequence-first rows and the adapter's term, ``[s, ..., H]``."""
    comm: ActivationSharding = ctx.comm
    # On several ranks the term has the rows that the reduction keeps; on one rank it can begin the sum.
    first = term if backend.group_size(comm.group) == 1 else None

    def partial_sums(start: int, stop: int) -> Tensor:
        part = rows[start:stop]
        return F.linear(part, weight) if first is None else first.rows(start, stop).plus_linear(part, weight)

    if comm.fp8 is None:
        reduction = comm.reduce(partial_sums, (*rows.shape[:-1], weight.size(0)), rows.dtype)
    else:
        reduction, ctx.weight_sizes = fp8_linear.row_reduction(comm, rows, weight, first)
    output = as_dtype(reduction.wait(), rows.dtype)
    return output if first is not None else term.added_to(output)


def _gradients(
    shard: Tensor, up: Tensor, reduced: Tensor, scale: float, comm: ActivationSharding, *, needs_up: bool
) -> tuple[Tensor, Tensor | None]:
    """Return dP of all rows, ``[S, ..., r]``, and dB of this rank's rows.

    Args:
        shard: dY, ``[s, ..., H]``.
        up: B, ``[H, r]``.
        reduced: P, ``[s, ..., r]``.
        scale: factor of the adapter's output.
        comm: group and sequence dimension.
        needs_up: whether dB is needed.
    """
    flat = flat_rows(shard)
    part = scaled_product(flat, up, scale).view(*shard.shape[:-1], up.size(1))
    # A copy, because the gather of dY may use the same buffer.
    rank_grad = comm.gather(part).wait(copy=True)
    up_grad = None
    if needs_up:
        up_grad = scaled_product(flat.t(), flat_rows(reduced), scale)
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
    require_frozen(weight, comm=comm)
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
        *saved: Tensor,
    ) -> Tensor:
        ctx.comm, ctx.hidden_act, ctx.scale = comm, hidden_act, scale
        link_saved_inputs(ctx, handle, *saved)
        _, _, weight, _, factor_b, reduced = saved
        return _output(ctx, activated, weight, LowRankTerm(reduced, factor_b.t(), scale))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first_backward(ctx)
        comm: ActivationSharding = ctx.comm
        (gate, up, weight, factor_a, factor_b, reduced), needs = saved_inputs(ctx)
        _, _, needs_weight, needs_a, needs_b, _ = needs
        # On XLA the barrier keeps the activation of forward from being reused, and thus stored.
        gate, up, grad = backend.optimization_barrier([gate, up, grad])
        rank_grad, grad_b = _gradients(grad, factor_b, reduced, ctx.scale, comm, needs_up=needs_b)
        # Of all tiles dA has r * F/T elements, little enough for a sum in fp32.
        wide = torch.promote_types(factor_a.dtype, torch.float32)
        weight_grad: Tensor | None = None
        grad_a: Tensor | None = None
        # For each tile: dZ = dY W + dP A, one kernel that recomputes Z and overwrites G and U, dA += dP^t Z.
        term = LowRankTerm(rank_grad, factor_a)
        for start, grads, activation_grad in _activation_gradients(ctx, grad, weight, gate, term):
            tile = slice(start, start + activation_grad.size(0))
            activated = gated_activation_gradient(gate[tile], up[tile], activation_grad, ctx.hidden_act)
            if needs_weight:
                weight_grad = add_matmul(weight_grad, grads.t(), activated, weight.dtype)
            if needs_a:
                grad_a = add_matmul(grad_a, rank_grad[tile].t(), activated, wide)
            # Otherwise this tile would still exist while the next one is computed.
            del activated, activation_grad
        # gate and up are overwritten: with new versions autograd rejects a use of the old values.
        torch.autograd.graph.increment_version((gate, up))
        if grad_a is not None:
            grad_a = grad_a.to(factor_a.dtype)
        return None, None, None, None, None, gate, up, weight_grad, grad_a, grad_b, None


def _activation_gradients(
    ctx: Any, grad: Tensor, weight: Tensor, gate: Tensor, term: LowRankTerm
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the first row, dY and ``dY W + dP A`` of tiles of all ranks' rows; in float8 all rows are one tile.

    In float8 dY is this rank's: W, which it is for, is frozen.
    """
    comm: ActivationSharding = ctx.comm
    if comm.fp8 is not None:
        yield 0, grad, term.added_to(fp8_linear.frozen_row_input_grad(comm, grad, weight, ctx.weight_sizes))
        return
    for start, grads in row_tiles(comm.gather(grad, materialize=False), gate, 4 * weight.size(1)):
        yield start, grads, term.rows(start, start + grads.size(0)).plus_linear(grads, weight.t())
