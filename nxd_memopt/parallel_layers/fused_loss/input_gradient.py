"""The gradient of the fused loss's input, which the chunks of tokens compute one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_memopt.backends import ChunkedReduction, backend
from nxd_memopt.parallel_layers.functional.linear import ActivationSharding


class InputGradient:
    """dX of ``x``; each chunk's part is reduced over the vocabulary shards while the next chunk is computed.

    Args:
        x: ``[rows, H]``.
        weight: ``[V/T, H]``.
        comm: communication over the vocabulary shards.
    """

    def __init__(self, x: Tensor, weight: Tensor, comm: ActivationSharding) -> None:
        self._x = x
        self._weight = weight
        self._comm = comm
        # Chunks write their rows into one tensor. Where a view has memory of its own they are joined at
        # the end, which needs dX twice.
        self._whole: Tensor | None = None
        if backend.views_share_memory:
            self._whole = x.new_empty(x.shape)
        self._parts: list[Tensor] = []
        # of the last chunk, with its first row and the row after its last one
        self._reduction: tuple[int, int, ChunkedReduction] | None = None

    def add(self, grad: Tensor, x: Tensor, start: int, stop: int) -> None:
        """Compute rows ``start`` to ``stop`` as ``grad^t W`` and start their reduction.

        Args:
            grad: gradient of the chunk's logits, ``[V/T, tokens]``.
            x: input of the chunk, ``[tokens, H]``.
            start: first local row of the chunk.
            stop: local row after the last one.
        """
        if self._whole is not None and backend.group_size(self._comm.group) == 1:
            torch.mm(grad.t(), self._weight, out=self._whole[start:stop])
            return
        # Only one reduction of a group may be in progress.
        self._end_reduction()
        partial = grad.t() @ self._weight
        # The reduction overlaps with this chunk's dW GEMM and with the next chunk.
        reduction = self._comm.reduce(lambda first, end: partial[first:end], x.shape, x.dtype)
        self._reduction = (start, stop, reduction)

    def _end_reduction(self) -> None:
        """Wait for the last chunk's reduction."""
        if self._reduction is None:
            return
        start, stop, reduction = self._reduction
        self._reduction = None
        if self._whole is None:
            self._parts.append(reduction.wait())
        else:
            self._whole[start:stop].copy_(reduction.wait())

    def result(self) -> Tensor:
        """Return dX, ``[rows, H]``."""
        self._end_reduction()
        if self._whole is not None:
            return self._whole
        if not self._parts:
            return torch.zeros_like(self._x)
        return torch.cat(self._parts).to(self._x.dtype)
