"""Conjugate pairs of communication: each function's forward and backward collective are adjoint.

Tensor region: Megatron-LM (arXiv:1909.08053), figure 3. Sequence region: Korthikanti et al. (arXiv:2205.05198), fig. 5.
The group defaults to the tensor-parallel group; a group of size 1 makes every mapping the identity. Inputs are never
written to, except by ``reduce_from_tensor_model_parallel_region`` outside autograd, as in neuronx-distributed. Shapes:
T ranks, ``s = S/T``.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def resolve_group(process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Return ``process_group``, or the tensor-parallel group for ``None``."""
    if process_group is not None:
        return process_group
    return parallel_state.get_tensor_model_parallel_group()


# Collectives along any dimension


def split_along_dim(tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """This rank's chunk of ``tensor`` along ``dim``."""
    what = "sequence length" if tensor.dim() and dim % tensor.dim() < tensor.dim() - 1 else "last dimension"
    require_divisible(what, tensor.size(dim), "tensor_model_parallel_size", backend.group_size(group))
    return as_contiguous(backend.shard(tensor, dim, group))


def gather_along_dim(tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """All ranks' chunks, concatenated along ``dim`` in rank order."""
    if backend.group_size(group) == 1:
        return tensor
    return backend.all_gather(tensor.movedim(dim, 0), group).movedim(0, dim)


def reduce_scatter_along_dim(tensor: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """This rank's chunk along ``dim`` of the sum over all ranks."""
    size = backend.group_size(group)
    if size == 1:
        return tensor
    what = "sequence length" if dim % tensor.dim() < tensor.dim() - 1 else "last dimension"
    length = tensor.size(dim)
    pad_to = -(-length // size) * size
    remedy = f"pad to {pad_to} or turn sequence_parallel_enabled off"
    require_divisible(what, length, "tensor_model_parallel_size", size, remedy)
    return backend.reduce_scatter(tensor.movedim(dim, 0), group).movedim(0, dim)


def _split_along_first_dim(tensor: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """NxD's name, which its GPT-NeoX example imports, for ``split_along_dim`` of dimension 0."""
    return split_along_dim(tensor, 0, resolve_group(process_group))


def _gather_along_first_dim(tensor: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """NxD's name, which its GPT-NeoX example imports, for ``gather_along_dim`` of dimension 0."""
    return gather_along_dim(tensor, 0, resolve_group(process_group))


@contextmanager
def _functional_mappings() -> Iterator[None]:
    ledger = parallel_state.gradient_ledger
    before, ledger.functional_mappings = ledger.functional_mappings, True
    try:
        yield
    finally:
        ledger.functional_mappings = before


def functional_contexts() -> ContextPair:
    """Contexts for a region's forward pass and its recomputation, in which mappings write to no input.

    The second pass would sum again what the first one wrote to. And where the forward pass of a region runs without
    gradients, on XLA, all of its activations would be written to, but none of them in the recomputation.
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
        ctx.dim, ctx.group = dim, group
        return split_along_dim(tensor, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_along_dim(grad, ctx.dim, ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None, dim: int, reduce_grad: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.reduce_grad = dim, group, reduce_grad
        return gather_along_dim(tensor, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        shard = reduce_scatter_along_dim if ctx.reduce_grad else split_along_dim
        return shard(grad, ctx.dim, ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None, dim: int, dtype: torch.dtype | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        wide = tensor if dtype is None else tensor.to(dtype)
        return as_dtype(reduce_scatter_along_dim(wide, dim, group), tensor.dtype)

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


def _apply(function: type[torch.autograd.Function], tensor: Tensor, group: ProcessGroup | None, *args: Any) -> Tensor:
    return tensor if backend.group_size(group) == 1 else cast(Tensor, function.apply(tensor, group, *args))


# Tensor region


def copy_to_tensor_model_parallel_region(tensor: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """Identity / all-reduce. Any shape; replicated in, replicated out."""
    return _apply(_Copy, tensor, resolve_group(process_group))


def reduce_from_tensor_model_parallel_region(tensor: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """All-reduce / identity. Partial sums in, their sum out; outside autograd ``tensor`` itself becomes the sum.

    A tensor takes part in autograd if it requires a gradient while gradients are enabled. Otherwise it is written to,
    so that ``reduce_from_tensor_model_parallel_region(param.grad.data)`` sums a gradient whatever is done with the
    result; optimizers then do not sum it again. That includes activations under ``torch.no_grad()`` and those computed
    from frozen parameters: a module that reads its input after this call uses
    ``functional_reduce_from_tensor_model_parallel_region``, as the layers here do. Regions under
    ``nxd_memopt.memory.checkpoint`` run twice and keep their inputs in any case.

    Raises:
        ValueError: ``tensor`` would be written to and has several elements in one place (``expand``), is a gradient
            that was summed already, or a part of one.
    """
    group = resolve_group(process_group)
    is_recorded = torch.is_grad_enabled() and tensor.requires_grad
    if is_recorded or parallel_state.gradient_ledger.functional_mappings or backend.group_size(group) == 1:
        return _apply(_Reduce, tensor, group)
    return _reduce_in_place(tensor, group)


def functional_reduce_from_tensor_model_parallel_region(
    tensor: Tensor, process_group: ProcessGroup | None = None
) -> Tensor:
    """``reduce_from_tensor_model_parallel_region`` that never writes to ``tensor``."""
    return _apply(_Reduce, tensor, resolve_group(process_group))


def reduce_from_context_model_parallel_region(tensor: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """``reduce_from_tensor_model_parallel_region`` over the context-parallel group by default."""
    group = process_group or parallel_state.get_context_model_parallel_group()
    return tensor if group is None else reduce_from_tensor_model_parallel_region(tensor, group)


# torch.compile leaves its graph here: what a traced write sums could not be recorded, and would be summed twice
@_disable_dynamo
@torch.no_grad()
def _reduce_in_place(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} has several elements in one "
            "place and cannot become the sum: pass tensor.contiguous()"
        )
    over_tensor_ranks = group is not None and _is_tensor_parallel(group)
    with parallel_state.gradient_ledger.writing_sum(tensor, over_tensor_ranks=over_tensor_ranks):
        tensor.copy_(backend.all_reduce(tensor.detach(), group))
    return tensor


def _is_tensor_parallel(group: ProcessGroup) -> bool:
    tensor_parallel = parallel_state.get_tensor_model_parallel_group()
    if group is tensor_parallel or tensor_parallel is None:
        return group is tensor_parallel
    return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(tensor_parallel)


def scatter_to_tensor_model_parallel_region(tensor: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """Split / all-gather of the last dimension. ``[..., n] -> [..., n/T]``."""
    return _apply(_Split, tensor, resolve_group(process_group), -1)


def gather_from_tensor_model_parallel_region(tensor: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """All-gather / split of the last dimension. ``[..., n/T] -> [..., n]``."""
    return _apply(_Gather, tensor, resolve_group(process_group), -1, False)


def gather_from_tensor_model_parallel_region_with_dim(
    tensor: Tensor, gather_dim: int, process_group: ProcessGroup | None = None
) -> Tensor:
    """All-gather / split of ``gather_dim``. ``[..., n/T, ...] -> [..., n, ...]``."""
    return _apply(_Gather, tensor, resolve_group(process_group), gather_dim, False)


def scatter_input_channels_to_tensor_model_parallel_region(
    tensor: Tensor, process_group: ProcessGroup | None = None
) -> Tensor:
    """Split / all-gather of the channels. ``[N, C, H, W] -> [N, C/T, H, W]``."""
    return _apply(_Split, tensor, resolve_group(process_group), 1)


# Sequence region


def scatter_to_sequence_parallel_region(
    tensor: Tensor, sequence_dimension: int = 0, process_group: ProcessGroup | None = None
) -> Tensor:
    """Split / all-gather. ``[S, ...] -> [s, ...]`` along ``sequence_dimension``."""
    return _apply(_Split, tensor, resolve_group(process_group), sequence_dimension)


def gather_from_sequence_parallel_region(
    tensor: Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """All-gather / reduce-scatter, or / split. ``[s, ...] -> [S, ...]`` along ``sequence_dimension``.

    Args:
        to_model_parallel: True when each rank goes on with other work on the result, so that the gradients are partial
            sums (reduce-scatter); False when all ranks do the same with it, so that the gradients are equal (split).
    """
    return _apply(_Gather, tensor, resolve_group(process_group), sequence_dimension, to_model_parallel)


def reduce_scatter_to_sequence_parallel_region(
    tensor: Tensor,
    sequence_dimension: int = 0,
    process_group: ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Reduce-scatter / all-gather. Partial sums ``[S, ...] -> [s, ...]``.

    Args:
        dtype: dtype of the reduction; the result, and the gradient's gather, keep the tensor's own.
    """
    return _apply(_ReduceScatter, tensor, resolve_group(process_group), sequence_dimension, dtype)


# Expert region


def all_to_all_in_expert_parallel_region(tensor: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """All-to-all / all-to-all of equal chunks of dim 0, over the expert-parallel group by default."""
    group = process_group or parallel_state.get_expert_model_parallel_group()
    return _apply(_AllToAll, tensor, group)


# Layout


def transpose_batch_and_sequence(tensor: Tensor) -> Tensor:
    """``[B, S, ...] <-> [S, B, ...]``, contiguous; the change of layout around sequence parallelism."""
    return tensor.transpose(0, 1).contiguous()
