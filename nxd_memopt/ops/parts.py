"""Splits a tensor into parts, and finds tensors that are adjacent parts of one storage, for one matmul."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.autograd import first_derivative_only


def packed_view(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return the tensor whose consecutive chunks along ``dim`` are ``tensors``, or None.

    The result is a view. None means that the tensors are not adjacent in one storage in this way,
    or that the device's views do not share memory.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first
    # adjacency is a property of real storages, which a trace does not have
    if not backend.views_share_memory or torch.compiler.is_compiling():
        return None
    # This runs on the host for every packed projection of every layer and step, so the cheap
    # comparisons come first and the first tensor's properties are read once.
    dim %= first.dim()
    stride = first.stride()
    storage = first.untyped_storage()._cdata
    length = first.size(dim)
    offset = first.storage_offset() + length * stride[dim]
    for tensor in tensors[1:]:
        # each tensor must begin where the previous one ends along dim, in the same storage
        if tensor.storage_offset() != offset or tensor.dtype != first.dtype:
            return None
        if not _is_same_except(first, tensor, dim):
            return None
        if tensor.untyped_storage()._cdata != storage:
            return None
        offset += tensor.size(dim) * stride[dim]
        length += tensor.size(dim)
    return first.as_strided((*first.shape[:dim], length, *first.shape[dim + 1 :]), stride)


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return the tensors as one, without a copy if they are packed."""
    view = packed_view(tensors, dim)
    return torch.cat(list(tensors), dim) if view is None else view


def flat_rows(x: Tensor) -> Tensor:
    """Return ``[..., N]`` as ``[rows, N]``."""
    return x.reshape(-1, x.size(-1))


def _is_same_except(a: Tensor, b: Tensor, dim: int) -> bool:
    """Return whether two tensors have equal shapes except in ``dim``, and equal strides."""
    if a.dim() != b.dim():
        return False
    if a.shape[:dim] != b.shape[:dim] or a.shape[dim + 1 :] != b.shape[dim + 1 :]:
        return False
    if a.stride() == b.stride():
        return True
    # ``view`` may give a dimension of one element any stride, which no address depends on. The
    # stride of ``dim`` counts even then: the packed view has several elements in ``dim``.
    for i, (size, stride_a, stride_b) in enumerate(zip(a.shape, a.stride(), b.stride(), strict=True)):
        if stride_a != stride_b and (size > 1 or i == dim):
            return False
    return True


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _dense_length(in_memory_order: Sequence[Tensor]) -> int | None:
    """Return the number of elements of the dense tensor whose consecutive chunks are the tensors.

    None means that the tensors, in order of their offsets, overlap or leave holes.
    """
    # The distance of the first two tensors gives the dimension along which they are chunks: the one
    # in which the first tensor's extent is that distance.
    first, second = in_memory_order[:2]
    step = _start(second) - _start(first)
    for dim, (size, stride) in enumerate(zip(first.shape, first.stride(), strict=True)):
        if size * stride != step:
            continue
        view = packed_view(in_memory_order, dim)
        if view is not None and _is_dense(view):
            return view.numel()
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a contiguous range of memory, in any order of dimensions."""
    length = 1
    # From the smallest stride on, each dimension must step over exactly the elements of the
    # previous ones; dimensions of one element may have any stride.
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != length:
            return False
        length *= size
    return True


@dataclass(frozen=True)
class Layout:
    """Relative positions of tensors in one storage.

    Gradients with the layout of packed tensors have a packed view too.

    Args:
        span: elements of the dense tensor that the tensors fill as consecutive chunks; ``None`` if
            there is none.
        shapes: of the tensors.
        strides: of the tensors, in elements.
        offsets: of the tensors from the first one in memory, in elements.
    """

    span: int | None
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, *tensors: Tensor) -> Layout:
        """Return the layout of ``tensors``.

        ``span`` is ``None`` unless two or more tensors are, in some order, the consecutive chunks
        of a dense tensor.
        """
        # the order in memory may differ from the order of the arguments
        in_memory_order = sorted(tensors, key=_start)
        first = _start(in_memory_order[0])
        return cls(
            _dense_length(in_memory_order),
            tuple(tensor.shape for tensor in tensors),
            tuple(tensor.stride() for tensor in tensors),
            tuple(_start(tensor) - first for tensor in tensors),
        )

    def matches(self, *tensors: Tensor) -> bool:
        """Return whether ``tensors`` have this layout; strides of single elements do not matter."""
        other = Layout.of(*tensors)
        if (self.span, self.shapes, self.offsets) != (other.span, other.shapes, other.offsets):
            return False
        if self.strides == other.strides:
            return True
        # ``view`` may give a dimension of one element any stride, which no address depends on
        for shape, strides, other_strides in zip(self.shapes, self.strides, other.strides, strict=True):
            for size, stride, other_stride in zip(shape, strides, other_strides, strict=True):
                if stride != other_stride and size > 1:
                    return False
        return True

    def empty(self, like: Tensor) -> list[Tensor]:
        """Return uninitialised tensors in this layout, with the dtype and device of ``like``.

        Without a common span, each tensor has its own memory and keeps its own order of dimensions.
        """
        if self.span is None:
            views = zip(self.shapes, self.strides, strict=True)
            return [_dense(like, shape, strides) for shape, strides in views]
        # one allocation for all: packed_view() of the results is then a view of the buffer
        buffer = like.new_empty(self.span)
        views = zip(self.shapes, self.strides, self.offsets, strict=True)
        return [buffer.as_strided(shape, strides, offset) for shape, strides, offset in views]


def _dense(like: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """Return an empty tensor as from ``empty_like``, with its order of dimensions.

    Expanded dimensions (stride 0) get their own memory.
    """
    # The meta tensor only carries the order of dimensions and uses no memory. empty_like keeps that
    # order, and makes the strides dense.
    meta = torch.empty_strided(shape, strides, device="meta")
    return torch.empty_like(meta, dtype=like.dtype, device=like.device)


def split_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Return consecutive views of ``x`` along ``dim``, part i with ``sizes[i]`` elements.

    Replaces ``x.split(sizes, dim)``. With functionalization disabled
    (``XLA_DISABLE_FUNCTIONALIZATION=1``, the default of AWS's torch-neuronx), torch_xla 2.9 returns
    wrong data for a split with a list of sizes along any dimension but the first
    (pytorch/xla#8640). ``narrow`` is correct in both modes, and creates the same views on other
    devices.

    Args:
        x: tensor to split.
        sizes: lengths of the parts along ``dim``.
        dim: dimension to split.

    Raises:
        ValueError: the sizes do not add up to the length of ``dim``.
        RuntimeError: in backward, if second derivatives are requested.
    """
    if sum(sizes) != x.size(dim):
        raise ValueError(f"sizes {list(sizes)} add up to {sum(sizes)}, but dimension {dim} has {x.size(dim)} elements")
    if torch.is_grad_enabled() and x.requires_grad:
        return cast("tuple[Tensor, ...]", _SplitSizes.apply(x, tuple(sizes), dim))
    return _narrowed(x, sizes, dim)


def _narrowed(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    parts = []
    start = 0
    for size in sizes:
        parts.append(x.narrow(dim, start, size))
        start += size
    return tuple(parts)


class _SplitSizes(torch.autograd.Function):
    """Forward: views. Backward: concatenation of the gradients.

    Autograd's own backward of ``narrow`` pads each gradient with zeros to the size of ``x``, and
    adds the padded tensors. Gradients that are already adjacent in one buffer are not copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return _narrowed(x, sizes, dim)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # gradients that a kernel wrote next to each other need no copy
        grad_x = packed_view(grads, ctx.dim)
        if grad_x is None:
            grad_x = torch.cat(grads, dim=ctx.dim)
        return grad_x, None, None
