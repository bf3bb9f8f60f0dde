"""Records sums over the ranks of tensors that are not a tracked parameter's gradient, by storage."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class SummedStorage:
    """Ranges of one storage that were summed over the ranks, with the backward pass of each sum.

    Args:
        tensor: a tensor in the storage. Only a weak reference to the storage is kept. While it
            exists, torch does not reuse the storage's address, so the address can be a key.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        # (first element, one after the last, count) -> backward pass of the sum, -1 outside one
        self._passes: dict[tuple[int, int, int], int] = {}

    def is_freed(self) -> bool:
        """Return whether no tensor uses the storage any more."""
        return bool(self._storage.expired())

    def add(self, tensor: Tensor) -> None:
        """Record that ``tensor`` was summed now."""
        self._passes[(*_span(tensor), tensor.numel())] = torch._C._current_graph_task_id()

    def covers(self, grad: Tensor) -> bool | None:
        """Return whether ``grad`` was summed in this backward pass; None if that is unknown."""
        first, last = _span(grad)
        found: bool | None = False
        for (start, end, count), graph_task in self._passes.items():
            # A dense tensor that contains grad was summed during a backward pass, maybe this one.
            if start <= first and last <= end and count == end - start and graph_task >= 0:
                return True if graph_task == torch._C._current_graph_task_id() else None
            if first < end and start < last:
                found = None
        return found


def is_part_of(inner: Tensor, outer: Tensor) -> bool | None:
    """Return whether ``inner`` is within ``outer`` in one storage; None for a partial overlap."""
    start, end = _span(inner)
    outer_start, outer_end = _span(outer)
    # Only a dense outer tensor has every element between its first and its last one. A strided
    # view of the same range may skip elements of ``inner``.
    is_dense = outer.numel() == outer_end - outer_start
    if outer_start <= start and end <= outer_end and is_dense:
        return True
    if end <= outer_start or outer_end <= start:
        return False
    return None


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the tensor's range in its storage: first element, and one after the last."""
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start, start
    # Strides of torch tensors are not negative: the last element has the largest index
    # everywhere.
    last = start
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return start, last + 1
