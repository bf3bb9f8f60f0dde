"""Autograd functions of column- and row-parallel linear layers, whose matmuls overlap with their collectives.

T is the tensor-parallel size, ``s = S/T``. Tensors are sequence-first inside these functions for
every ``sequence_dimension``, because a chunk of a gather or of a reduction is a range of the
sequence. Sources: arXiv:1909.08053, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import ChunkedAllGather, ChunkedReduction, backend
from nxd_memopt.ops.autograd import SavedInputs, as_dtype, first_derivative_only, link_saved_inputs, saved_inputs
from nxd_memopt.ops.fp8 import Fp8Recipe
from nxd_memopt.ops.parts import flat_rows, packed_view, split_sizes
from nxd_memopt.ops.sums import column_sums


@dataclass(frozen=True)
class ActivationSharding:
    """Process group and dimension over which a layer's activations are sharded.

    Args:
        group: process group.
        sequence_dimension: dimension of a shard that is the sequence, or None for replicated
            activations.
        reduce_dtype: dtype of reductions, or None for the dtype of the tensors.
        hides_launch_latency: see ``Collectives.start_all_gather``.
        fp8: how the operands of matmuls are rounded to float8, or None.
        weight_scale: scale of weights that are stored in float8, or None.
    """

    group: ProcessGroup | None
    sequence_dimension: int | None
    reduce_dtype: torch.dtype | None
    fp8: Fp8Recipe | None = field(default=None, kw_only=True)
    weight_scale: Tensor | None = field(default=None, kw_only=True)
    hides_launch_latency: bool = field(default=False, kw_only=True)

    def sequence_first(self, x: Tensor) -> Tensor:
        """Return a view of ``x`` with the sequence as dimension 0."""
        # None (replicated) and 0 need no view. A view of 1 makes chunks of rows strided, which
        # costs a copy where a GEMM or a collective needs them contiguous.
        if not self.sequence_dimension:
            return x
        return x.movedim(self.sequence_dimension, 0)

    def original_layout(self, x: Tensor) -> Tensor:
        """Return ``x`` with the sequence moved back; the inverse of ``sequence_first``."""
        if not self.sequence_dimension:
            return x
        return x.movedim(0, self.sequence_dimension)

    def gather(self, shard: Tensor, *, materialize: bool = True) -> ChunkedAllGather:
        """Start the all-gather ``[s, ...] -> [S, ...]``; a no-op without sequence parallelism.

        Args:
            shard: ``[s, ...]``, this rank's rows.
            materialize: also make one tensor of all rows available with ``wait()``, not just the
                chunks.
        """
        # A group of None has one rank: the "gathered" tensor is the input itself, without a copy.
        group = None if self.sequence_dimension is None else self.group
        return backend.start_all_gather(
            shard, group, materialize=materialize, hides_launch_latency=self.hides_launch_latency
        )

    def reduce(self, rows: Callable[[int, int], Tensor], shape: Sequence[int], dtype: torch.dtype) -> ChunkedReduction:
        """Start the sum of ``[S, ...]`` over the ranks, computing the rows chunk by chunk.

        Each chunk is sent while the next one is computed. GEMMs launched after this call overlap
        with the last chunk. The result is this rank's sequence shard, or the full sum for
        replicated activations.

        Args:
            rows: ``rows(start, stop)`` returns this rank's partial sum of a range of rows.
            shape: shape of the full partial sum, ``[S, ...]``.
            dtype: dtype of the tensors that ``rows`` returns.
        """
        # Under sequence parallelism a reduce-scatter. Replicated activations need an all-reduce,
        # which moves twice the bytes: a reduce-scatter followed by an all-gather.
        wide = self.reduce_dtype or dtype
        reduction = backend.start_reduction(
            shape,
            wide,
            self.group,
            scattered=self.sequence_dimension is not None,
            hides_launch_latency=self.hides_launch_latency,
        )
        try:
            for start, stop in reduction.chunks:
                reduction.put(start, as_dtype(rows(start, stop), wide))
        except BaseException:  # e.g. out of memory, after which a script may try the next batch
            reduction.abandon()
            raise
        return reduction


@dataclass(frozen=True)
class ColumnActivationSharding(ActivationSharding):
    """Sharding of one input of several column-parallel weights, and of the input's gradient.

    Args:
        replica_groups: for each weight the group of ranks that hold the same shard, or None.
    """

    replica_groups: tuple[ProcessGroup | None, ...]


def products(
    gathering: ChunkedAllGather,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    inputs_of: Callable[[Tensor], Sequence[Tensor]] | None = None,
) -> list[Tensor]:
    """Compute ``X_i W_i^t + b_i`` while X is gathered, chunk by chunk.

    Args:
        gathering: all-gather of X, ``[S, ..., H]``.
        weights: ``[n_i, H]``.
        biases: ``[n_i]`` or None for each weight; default no biases.
        inputs_of: returns the X_i of a chunk of X; default X for each weight.

    Returns:
        A tensor ``[S, ..., n_i]`` for each weight.
    """
    biases = biases or [None] * len(weights)
    results: list[Tensor] = []
    # 2 * sum(n_i) FLOPs for each element of X tell the gather how long a chunk keeps the GEMMs
    # busy.
    for start, rows in gathering.chunks(2 * sum(weight.size(0) for weight in weights)):
        if inputs_of is None:
            inputs = [rows] * len(weights)
        else:
            inputs = inputs_of(rows)
        # All rows arrived at once: no output buffer to fill in parts.
        if rows.size(0) == gathering.length:
            return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]
        # The outputs are allocated once, and each chunk's GEMM writes its rows of them: a
        # concatenation at the end would need twice the memory and another pass over it.
        shape = (gathering.length, *rows.shape[1:-1])
        results = results or [rows.new_empty((*shape, weight.size(0))) for weight in weights]
        for result, x, weight, bias in zip(results, inputs, weights, biases, strict=True):
            _linear_into(flat_rows(result[start : start + rows.size(0)]), x, weight, bias)
    return results


def _linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(flat_rows(x), weight.t(), out=out)
    else:
        torch.addmm(bias, flat_rows(x), weight.t(), out=out)


class ColumnParallel(torch.autograd.Function):
    """``Y_i = X W_i^t + b_i`` for several weights; one all-gather of X, one reduction of dX.

    Only the sequence shard of X is saved, and nothing if all weights are frozen. Backward gathers X
    again while it computes dX, and reduces dX while it computes dW.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: ColumnActivationSharding, weight: Tensor, *remaining: Tensor | None
    ) -> tuple[Tensor, ...]:
        # ``weight`` is a named parameter because dynamo (torch 2.9 to 2.13,
        # AutogradFunctionVariable.call_apply) drops ctx in no-grad mode if the number of
        # arguments equals the number of parameters. With ``*parameters`` alone that happens for
        # one weight and its bias; with a named first tensor it cannot happen.
        parameters = (weight, *remaining)
        weights = cast("tuple[Tensor, ...]", parameters[0::2])
        biases = parameters[1::2]
        ctx.comm = comm
        # dW alone reads X.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2::2]) else None, *weights)
        gathering = comm.gather(comm.sequence_first(x), materialize=False)
        outputs = packed_products(gathering, weights, biases)
        return tuple(comm.original_layout(output) for output in outputs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm: ColumnActivationSharding = ctx.comm
        x, *weights = ctx.saved_tensors
        # On XLA the barrier keeps common-subexpression elimination from reusing forward's
        # gathered X, which would keep the full X alive between forward and backward.
        barriered = grads
        if x is not None:
            x, *barriered = backend.optimization_barrier([x, *grads])
        needs_input, _, *needs_parameters = ctx.needs_input_grad
        output_grads = [comm.sequence_first(grad) for grad in barriered]
        # Order of launches: all-gather X, dX GEMM (overlaps with the gather), reduction of dX, dW
        # GEMM (overlaps with the reduction).
        gathering = None
        if x is not None:
            gathering = comm.gather(comm.sequence_first(x))
        reduction = None
        if needs_input:
            reduction = input_grad_reduction(comm, output_grads, weights)
        # Without a gather no weight gradient is computed: the argument only has to be a tensor.
        full = output_grads[0] if gathering is None else gathering.wait()
        grads_of_parameters = parameter_grads(full, output_grads, needs_parameters, comm.replica_groups)
        input_grad = None
        if reduction is not None:
            input_grad = comm.original_layout(reduction.wait().to(grads[0].dtype))
        return input_grad, None, *grads_of_parameters


def packed_products(
    gathering: ChunkedAllGather, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Return ``products``; with packed weights one GEMM computes all of them, as column views."""
    packed = packed_view(weights, 0)
    # One GEMM needs one bias of sum(n_i) elements: all layers have a bias or none has.
    present = [bias for bias in biases if bias is not None]
    if packed is None or len(present) not in (0, len(weights)):
        return products(gathering, weights, biases)
    # Biases are not packed. The copy has sum(n_i) elements, little compared to the GEMM's output.
    bias = torch.cat(present) if len(present) > 1 else biases[0]
    (output,) = products(gathering, [packed], [bias])
    return split_sizes(output, [weight.size(0) for weight in weights], dim=-1)


def input_grad_reduction(
    comm: ActivationSharding, grads: Sequence[Tensor], weights: Sequence[Tensor]
) -> ChunkedReduction:
    """Start reducing ``dX = sum_i dY_i W_i`` over the ranks.

    The local terms are accumulated with addmm, or computed by one GEMM if both the gradients and
    the weights are packed.
    """
    # Packed: [dY_1, ..., dY_k] @ [W_1; ...; W_k] is the sum over i, accumulated inside the GEMM.
    packed_grad = packed_view(grads, -1)
    packed_weight = packed_view(weights, 0)
    if packed_grad is not None and packed_weight is not None:
        grads = [packed_grad]
        weights = [packed_weight]

    def rows(start: int, stop: int) -> Tensor:
        # One output buffer for all terms: addmm reads and writes it again for each further term.
        parts = [grad[start:stop] for grad in grads]
        flat = flat_rows(parts[0]) @ weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            flat.addmm_(flat_rows(part), weight)
        return flat.view(*parts[0].shape[:-1], flat.size(-1))

    return comm.reduce(rows, (*grads[0].shape[:-1], weights[0].size(1)), grads[0].dtype)


def parameter_grads(
    x: Tensor, grads: Sequence[Tensor], needed: Sequence[bool], replica_groups: Sequence[ProcessGroup | None]
) -> list[Tensor | None]:
    """Compute ``dW_i = dY_i^t X`` and ``db_i``, summed over the ranks that hold replicas of W_i.

    Args:
        x: ``[S, ..., H]``.
        grads: dY_i, ``[S, ..., n_i]``.
        needed: for each i two flags, whether dW_i and db_i are needed.
        replica_groups: for each i the ranks that hold W_i, or None.

    Returns:
        ``[dW_1, db_1, dW_2, db_2, ...]``, with None for gradients that are not needed.
    """
    weight_grads = _weight_grads(flat_rows(x), grads, needed[0::2])
    return summed_over_replicas(weight_grads, grads, needed[1::2], replica_groups)


def summed_over_replicas(
    weight_grads: Sequence[Tensor | None],
    grads: Sequence[Tensor],
    needs_biases: Sequence[bool],
    replica_groups: Sequence[ProcessGroup | None],
) -> list[Tensor | None]:
    """Return ``parameter_grads`` of this rank's ``weight_grads``, None where not needed."""
    results: list[Tensor | None] = []
    for weight_grad, grad, needs_bias, group in zip(weight_grads, grads, needs_biases, replica_groups, strict=True):
        bias_grad = column_sums(grad) if needs_bias else None
        # Each rank with a replica of W_i has the part of dY_i that comes from its own query
        # heads, so the gradients are partial sums. A group of None has one rank: the sum is a
        # no-op.
        for local in (weight_grad, bias_grad):
            results.append(None if local is None else backend.all_reduce(local, group))
    return results


def _weight_grads(x: Tensor, grads: Sequence[Tensor], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    # Packed gradients [S, ..., sum n_i] give all dW_i in one GEMM.
    packed = packed_view(grads, -1) if all(needed) else None
    if packed is not None:
        return split_sizes(flat_rows(packed).t() @ x, [grad.size(-1) for grad in grads])
    pairs = zip(grads, needed, strict=True)
    return [flat_rows(grad).t() @ x if needs_weight else None for grad, needs_weight in pairs]


class RowParallel(torch.autograd.Function):
    """``Y = reduce(sum_i X_i W_i^t)`` for inputs and weights sharded over the input features.

    Forward / backward communication: all-reduce / none; with sequence parallelism reduce-scatter of
    Y / all-gather of dY. Chunks of Y are sent while the next ones are computed; backward computes
    dX from chunks of dY as they arrive.
    """

    @staticmethod
    def forward(
        ctx: Any, comm: ActivationSharding, handle: SavedInputs | None, x: Tensor, *remaining: Tensor
    ) -> Tensor:
        # x is a named parameter for the reason in ColumnParallel.forward.
        factors = (x, *remaining)
        inputs, weights = factors[0::2], factors[1::2]
        ctx.comm = comm
        link_saved_inputs(ctx, handle, *factors)
        sequence_first = [comm.sequence_first(x) for x in inputs]

        def rows(start: int, stop: int) -> Tensor:
            parts = [x[start:stop] for x in sequence_first]
            # F.linear, because the output must not be a view: autograd forbids in-place changes
            # of a view that a Function returns.
            output = F.linear(parts[0], weights[0])
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                flat_rows(output).addmm_(flat_rows(part), weight.t())
            return output

        # [S, ..., H]: the shape of the full partial sum, of which reduce keeps [s, ..., H] under
        # sequence parallelism. The result is cast back if the reduction ran in a wider dtype.
        shape = (*sequence_first[0].shape[:-1], weights[0].size(0))
        dtype = inputs[0].dtype
        return comm.original_layout(as_dtype(comm.reduce(rows, shape, dtype).wait(), dtype))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        comm: ActivationSharding = ctx.comm
        factors, needs_grad = saved_inputs(ctx)
        inputs = factors[0::2]
        weights = factors[1::2]
        gathering = comm.gather(comm.sequence_first(grad), materialize=any(needs_grad[1::2]))
        # dX_i = dY W_i for each chunk of dY; dW_i = dY^t X_i needs all rows of dY.
        input_grads = products(gathering, [weight.t() for weight in weights])
        results: list[Tensor | None] = []
        for x, input_grad, needs_weight in zip(inputs, input_grads, needs_grad[1::2], strict=True):
            weight_grad = None
            if needs_weight:
                weight_grad = flat_rows(gathering.wait()).t() @ flat_rows(comm.sequence_first(x))
            results += [comm.original_layout(input_grad), weight_grad]
        return None, None, *results
