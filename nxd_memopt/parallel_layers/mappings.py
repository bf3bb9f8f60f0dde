"""Conjugate pairs of communication: each function's forward and backward collective are adjoint.

Tensor region: Megatron-LM (arXiv:1909.08053), figure 3. Sequence region: Korthikanti et al.
(arXiv:2205.05198), figure 5. Docstrings name the forward / backward operation. The group defaults
to the tensor-parallel group; a group of size 1 makes every mapping the identity. Inputs are not
modified, except by ``reduce_from_tensor_model_parallel_region`` outside autograd, as in
neuronx-distributed. Shapes: T ranks, ``s = S/T``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.backends.base import ContextPair
from nxd_memopt.config import require_divisible
from nxd_memopt.ops.autograd import ReusableContext, as_contiguous, as_dtype
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.summed_gradients import marking_sum


def resolve_group(process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Return ``process_group``, or the tensor-parallel group for ``None``."""
    if process_group is not None:
        return process_group
    return parallel_state.get_tensor_model_parallel_group()


# Collectives along any dimension


def split_along_dim(tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """Return this rank's chunk of ``tensor`` along ``dim``, contiguous.

    Raises:
        ValueError: the group size does not divide the dimension.
    """
    what = _name_of_dim(tensor, dim)
    size = backend.group_size(group)
    require_divisible(what, tensor.size(dim), "tensor_model_parallel_size", size)
    return as_contiguous(backend.shard(tensor, dim, group))


def gather_along_dim(tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """Return the chunks of all ranks, concatenated along ``dim`` in rank order."""
    if backend.group_size(group) == 1:
        return tensor
    # Collectives work along dim 0, where the ranks' chunks are contiguous in memory. For another
    # dimension the chunk is copied to be contiguous, and the result is a strided view.
    if dim == 0:
        return backend.all_gather(tensor, group)
    return backend.all_gather(tensor.movedim(dim, 0), group).movedim(0, dim)


def _name_of_dim(tensor: Tensor, dim: int) -> str:
    """Return what ``dim`` of an activation ``[..., H]`` stands for, for messages."""
    if tensor.dim() and dim % tensor.dim() < tensor.dim() - 1:
        return "sequence length"
    return "last dimension"


def require_equal_shards(length: int, size: int, *, what: str = "sequence length") -> None:
    """Raise ValueError if ``size`` ranks cannot have equal shards of a dimension of ``length``."""
    if length % size:
        pad_to = -(-length // size) * size  # rounded up to a multiple of size
        remedy = f"pad to {pad_to} or turn sequence_parallel_enabled off"
        require_divisible(what, length, "tensor_model_parallel_size", size, remedy)


def reduce_scatter_along_dim(tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """Return this rank's chunk along ``dim`` of the sum over all ranks.

    Raises:
        ValueError: the group size does not divide the dimension.
    """
    size = backend.group_size(group)
    if size == 1:
        return tensor
    require_equal_shards(tensor.size(dim), size, what=_name_of_dim(tensor, dim))
    if dim == 0:
        return backend.reduce_scatter(tensor, group)
    return backend.reduce_scatter(tensor.movedim(dim, 0), group).movedim(0, dim)


def _split_along_first_dim(tensor: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """Call ``split_along_dim`` for dimension 0; a name that NxD's GPT-NeoX example imports."""
    return split_along_dim(tensor, 0, resolve_group(process_group))


def _gather_along_first_dim(tensor: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """Call ``gather_along_dim`` for dimension 0; a name that NxD's GPT-NeoX example imports."""
    return gather_along_dim(tensor, 0, resolve_group(process_group))


@contextmanager
def _functional_mappings() -> Iterator[None]:
    """Disable in-place sums of ``reduce_from_tensor_model_parallel_region`` inside the block."""
    # Restores the previous value instead of False: regions may be nested.
    previous = parallel_state.set_functional_mappings(True)
    try:
        yield
    finally:
        parallel_state.set_functional_mappings(previous)


def functional_contexts() -> ContextPair:
    """Return contexts for a region's forward pass and its recomputation without in-place mappings.

    A recomputation would sum again a tensor that the forward pass has summed in place. Also, on XLA
    the forward pass of such a region runs without gradients, so all of its activations would be
    modified in place there, but none of them in the recomputation.
    """
    return ReusableContext(_functional_mappings), ReusableContext(_functional_mappings)


# Autograd functions


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return backend.all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        del ctx
        return backend.all_reduce(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return split_along_dim(tensor, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_along_dim(grad, ctx.dim, ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None, dim: int, reduce_grad: bool) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        ctx.reduce_grad = reduce_grad
        return gather_along_dim(tensor, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # Partial gradients are summed; equal gradients are only split, without communication.
        if ctx.reduce_grad:
            grad = reduce_scatter_along_dim(grad, ctx.dim, ctx.group)
        else:
            grad = split_along_dim(grad, ctx.dim, ctx.group)
        return grad, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None, dim: int, dtype: torch.dtype | None) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        # The reduction runs in ``dtype``; the result is cast back to the tensor's dtype.
        terms = tensor if dtype is None else tensor.to(dtype)
        return as_dtype(reduce_scatter_along_dim(terms, dim, group), tensor.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_along_dim(grad, ctx.dim, ctx.group), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return backend.all_to_all(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return backend.all_to_all(grad, ctx.group), None


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: ProcessGroup | None, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.group = group
        ctx.sent = sent
        ctx.received = received
        return backend.all_to_all_rows(tensor, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return backend.all_to_all_rows(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _apply(function: type[torch.autograd.Function], tensor: Tensor, group: ProcessGroup | None, *args: Any) -> Tensor:
    """Apply a mapping; in a group of one rank every mapping is the identity, without a graph node."""
    if backend.group_size(group) == 1:
        return tensor
    return cast(Tensor, function.apply(tensor, group, *args))


# Tensor region


def copy_to_tensor_model_parallel_region(input_: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """Identity / all-reduce. ``input_`` has any shape and is replicated, as is the result."""
    return _apply(_Copy, input_, resolve_group(process_group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """All-reduce / identity. Return the sum of partial sums; outside autograd, sum in place.

    A tensor takes part in autograd if it requires a gradient and gradients are enabled. Any other
    tensor is modified in place, so ``reduce_from_tensor_model_parallel_region(param.grad.data)``
    sums a gradient even if the result is dropped; optimizers then do not sum the gradient again.
    This includes activations under ``torch.no_grad()`` and activations computed from frozen
    parameters. A module that reads its input after this call should use
    ``functional_reduce_from_tensor_model_parallel_region``, as the layers of this library do.
    Regions under ``nxd_memopt.memory.checkpoint`` run twice and never modify their inputs.

    Args:
        input_: partial sum of any shape.
        process_group: process group; default the tensor-parallel group.

    Raises:
        ValueError: ``input_`` would be modified in place and has several elements at one address
            (``expand``), or is a gradient that was summed already, a part of one, or still to be accumulated.
    """
    group = resolve_group(process_group)
    # neuronx-distributed's function is in place, and scripts for it drop the result when they sum
    # gradients. Autograd would reject the write to a tensor that it has saved, and a group of one
    # rank has nothing to sum.
    is_recorded = torch.is_grad_enabled() and input_.requires_grad
    is_functional = is_recorded or parallel_state.has_functional_mappings()
    if is_functional or backend.group_size(group) == 1:
        return _apply(_Reduce, input_, group)
    return _reduce_in_place(input_, group)


def functional_reduce_from_tensor_model_parallel_region(
    input_: Tensor, process_group: ProcessGroup | None = None
) -> Tensor:
    """All-reduce / identity that never modifies ``input_``."""
    return _apply(_Reduce, input_, resolve_group(process_group))


def reduce_from_context_model_parallel_region(input_: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """All-reduce / identity over the context-parallel group by default; may sum in place.

    See ``reduce_from_tensor_model_parallel_region``.
    """
    group = process_group or parallel_state.get_context_model_parallel_group()
    # None is the group of one rank here; the function below would take the tensor-parallel group.
    if group is None:
        return input_
    return reduce_from_tensor_model_parallel_region(input_, group)


# A graph break for torch.compile: a traced in-place sum could not mark the gradient, which would be summed twice.
@_disable_dynamo
@torch.no_grad()
def _reduce_in_place(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in strides):
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} has several "
            "elements in one place and cannot become the sum: pass tensor.contiguous()"
        )
    over_tensor_ranks = group is not None and _is_tensor_parallel(group)
    with marking_sum(tensor, over_tensor_ranks=over_tensor_ranks):
        tensor.copy_(backend.all_reduce(tensor.detach(), group))
    return tensor


def _is_tensor_parallel(group: ProcessGroup) -> bool:
    """Return whether ``group`` has the ranks of the tensor-parallel group."""
    tensor_parallel = parallel_state.get_tensor_model_parallel_group()
    if group is tensor_parallel or tensor_parallel is None:
        return group is tensor_parallel
    return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(tensor_parallel)


def scatter_to_tensor_model_parallel_region(input_: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """Split / all-gather of the last dimension. ``[..., n] -> [..., n/T]``."""
    return _apply(_Split, input_, resolve_group(process_group), -1)


def gather_from_tensor_model_parallel_region(input_: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """All-gather / split of the last dimension. ``[..., n/T] -> [..., n]``."""
    return _apply(_Gather, input_, resolve_group(process_group), -1, False)


def gather_from_tensor_model_parallel_region_with_dim(
    input_: Tensor, gather_dim: int, process_group: ProcessGroup | None = None
) -> Tensor:
    """All-gather / split of ``gather_dim``. ``[..., n/T, ...] -> [..., n, ...]``."""
    return _apply(_Gather, input_, resolve_group(process_group), gather_dim, False)


def scatter_input_channels_to_tensor_model_parallel_region(
    input_: Tensor, process_group: ProcessGroup | None = None
) -> Tensor:
    """Split / all-gather of the channels. ``[N, C, H, W] -> [N, C/T, H, W]``."""
    return _apply(_Split, input_, resolve_group(process_group), 1)


# Sequence region


def scatter_to_sequence_parallel_region(
    input_: Tensor, sequence_dimension: int = 0, process_group: ProcessGroup | None = None
) -> Tensor:
    """Split / all-gather. ``[S, ...] -> [s, ...]`` along ``sequence_dimension``."""
    return _apply(_Split, input_, resolve_group(process_group), sequence_dimension)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """All-gather / reduce-scatter or split. ``[s, ...] -> [S, ...]`` along ``sequence_dimension``.

    Args:
        input_: this rank's sequence shard.
        sequence_dimension: dimension of the sequence.
        to_model_parallel: True if ranks continue with different work on the result; gradients are
            then partial sums and backward is a reduce-scatter. False if all ranks do the same work;
            gradients are then equal and backward is a split.
        process_group: process group; default the tensor-parallel group.
    """
    return _apply(_Gather, input_, resolve_group(process_group), sequence_dimension, to_model_parallel)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    process_group: ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Reduce-scatter / all-gather. Partial sums ``[S, ...] -> [s, ...]``.

    Args:
        input_: this rank's partial sum.
        sequence_dimension: dimension of the sequence.
        process_group: process group; default the tensor-parallel group.
        dtype: dtype of the reduction; default the dtype of ``input_``. The result and the
            all-gather of the gradient keep the dtype of ``input_``.
    """
    return _apply(_ReduceScatter, input_, resolve_group(process_group), sequence_dimension, dtype)


# Expert region


def all_to_all_in_expert_parallel_region(input_: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """All-to-all / all-to-all of equal chunks of dim 0; default the expert-parallel group."""
    group = process_group or parallel_state.get_expert_model_parallel_group()
    return _apply(_AllToAll, input_, group)


def all_to_all_rows_in_expert_parallel_region(
    tensor: Tensor, sent: Sequence[int], received: Sequence[int], process_group: ProcessGroup | None = None
) -> Tensor:
    """All-to-all / all-to-all of rows; default the expert-parallel group.

    Args:
        tensor: ``[sum(sent), ...]``, the rows for rank 0, then those for rank 1, and so on.
        sent: rows for each rank.
        received: rows from each rank.
        process_group: process group; default the expert-parallel group.

    Returns:
        ``[sum(received), ...]``, in rank order.
    """
    group = process_group or parallel_state.get_expert_model_parallel_group()
    return _apply(_AllToAllRows, tensor, group, tuple(sent), tuple(received))
