"""Finds tensors that are adjacent in one storage, so that one matmul may read or write all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_memopt.backends import backend


def packed_view(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """The tensor whose consecutive parts along ``dim`` are ``tensors``, without a copy; ``None`` if there is none."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if not backend.views_share_memory or torch.compiler.is_compiling():
        return None
    dim %= first.dim()
    stride, offset, length = first.stride(), first.storage_offset(), 0
    for tensor in tensors:
        alike = tensor.dtype == first.dtype and _same_but(first, tensor, dim) and _same_strides(first, tensor, dim)
        if not alike or tensor.storage_offset() != offset or not _one_storage(first, tensor):
            return None
        offset += tensor.size(dim) * stride[dim]
        length += tensor.size(dim)
    return first.as_strided((*first.shape[:dim], length, *first.shape[dim + 1 :]), stride)


def _same_strides(a: Tensor, b: Tensor, dim: int) -> bool:
    """Along ``dim``, and where there is more than one element: ``view`` gives other dimensions any stride."""
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
    """Elements of the tensor whose consecutive parts these are, if each has a place of its own, without holes."""
    first, second = by_place[:2]
    step = _start(second) - _start(first)
    for dim, (size, stride) in enumerate(zip(first.shape, first.stride(), strict=True)):
        whole = packed_view(by_place, dim) if size * stride == step else None
        if whole is not None and _is_dense(whole):
            return whole.numel()
    return None


def _is_dense(tensor: Tensor) -> bool:
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != length:
            return False
        length *= size
    return True


@dataclass(frozen=True)
class Layout:
    """Where tensors lie relative to each other in one memory: gradients laid out so are as joined as the tensors."""

    span: int | None
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, *tensors: Tensor) -> Layout:
        """``span`` is ``None`` unless the two or more are, in some order, the consecutive parts of a dense tensor."""
        by_place = sorted(tensors, key=_start)
        first = _start(by_place[0])
        return cls(
            _dense_length(by_place),
            tuple(tensor.shape for tensor in tensors),
            tuple(tensor.stride() for tensor in tensors),
            tuple(_start(tensor) - first for tensor in tensors),
        )

    def is_that_of(self, *tensors: Tensor) -> bool:
        """Whether these lie so too; strides of single elements do not matter."""
        other = Layout.of(*tensors)
        return (self.span, self.shapes, self.offsets) == (other.span, other.shapes, other.offsets) and all(
            one == another or n == 1
            for shape, strides, others in zip(self.shapes, self.strides, other.strides, strict=True)
            for n, one, another in zip(shape, strides, others, strict=True)
        )

    def empty(self, like: Tensor) -> list[Tensor]:
        """Uninitialised tensors in this layout; where it is not one memory's apart, each in its own order of memory."""
        if self.span is None:
            return [_dense(like, *each) for each in zip(self.shapes, self.strides, strict=True)]
        memory = like.new_empty(self.span)
        return [
            memory.as_strided(shape, stride, offset)
            for shape, stride, offset in zip(self.shapes, self.strides, self.offsets, strict=True)
        ]


def _dense(like: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """As ``empty_like`` makes it, which puts repeated (expanded) dimensions apart."""
    model = torch.empty_strided(shape, strides, device="meta")
    return torch.empty_like(model, dtype=like.dtype, device=like.device)
