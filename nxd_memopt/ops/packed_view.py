"""Finds tensors that are adjacent in one storage, so that one matmul may read or write all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_memopt.backends import backend


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
    dim %= first.dim()
    stride, offset, length = first.stride(), first.storage_offset(), 0
    for tensor in tensors:
        # Each tensor must begin where the previous one ends along dim, in the same storage.
        alike = tensor.dtype == first.dtype and _same_but(first, tensor, dim) and _same_strides(first, tensor, dim)
        if not alike or tensor.storage_offset() != offset or not _one_storage(first, tensor):
            return None
        offset += tensor.size(dim) * stride[dim]
        length += tensor.size(dim)
    return first.as_strided((*first.shape[:dim], length, *first.shape[dim + 1 :]), stride)


def _same_strides(a: Tensor, b: Tensor, dim: int) -> bool:
    """Return whether two tensors have equal strides where strides matter.

    The strides of ``dim``, and of dimensions with more than one element, must be equal. ``view``
    gives dimensions of one element any stride.
    """
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.stride() == b.stride() or all(
        one == other or (n == 1 and i != dim) for i, (n, one, other) in enumerate(strides)
    )


def _same_but(a: Tensor, b: Tensor, dim: int) -> bool:
    return a.dim() == b.dim() and a.shape[:dim] == b.shape[:dim] and a.shape[dim + 1 :] == b.shape[dim + 1 :]


def _one_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _dense_length(by_place: Sequence[Tensor]) -> int | None:
    """Return the number of elements of the dense tensor whose consecutive chunks are the tensors.

    None means that the tensors, in order of their offsets, overlap or leave holes.
    """
    # The distance of the first two tensors gives the dimension along which they are chunks: the one
    # in which the first tensor's extent is that distance.
    first, second = by_place[:2]
    step = _start(second) - _start(first)
    for dim, (size, stride) in enumerate(zip(first.shape, first.stride(), strict=True)):
        view = packed_view(by_place, dim) if size * stride == step else None
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
        by_place = sorted(tensors, key=_start)
        first = _start(by_place[0])
        return cls(
            _dense_length(by_place),
            tuple(tensor.shape for tensor in tensors),
            tuple(tensor.stride() for tensor in tensors),
            tuple(_start(tensor) - first for tensor in tensors),
        )

    def is_that_of(self, *tensors: Tensor) -> bool:
        """Return whether ``tensors`` have this layout; strides of single elements do not matter."""
        other = Layout.of(*tensors)
        return (self.span, self.shapes, self.offsets) == (other.span, other.shapes, other.offsets) and all(
            one == another or n == 1
            for shape, strides, others in zip(self.shapes, self.strides, other.strides, strict=True)
            for n, one, another in zip(shape, strides, others, strict=True)
        )

    def empty(self, like: Tensor) -> list[Tensor]:
        """Return uninitialised tensors in this layout, with the dtype and device of ``like``.

        Without a common span, each tensor has its own memory and keeps its own order of dimensions.
        """
        if self.span is None:
            return [_dense(like, *each) for each in zip(self.shapes, self.strides, strict=True)]
        memory = like.new_empty(self.span)
        return [
            memory.as_strided(shape, stride, offset)
            for shape, stride, offset in zip(self.shapes, self.strides, self.offsets, strict=True)
        ]


def _dense(like: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """Return an empty tensor as from ``empty_like``, with its order of dimensions.

    Expanded dimensions (stride 0) get their own memory.
    """
    # the meta tensor only carries the order of dimensions; it uses no memory
    model = torch.empty_strided(shape, strides, device="meta")
    return torch.empty_like(model, dtype=like.dtype, device=like.device)
