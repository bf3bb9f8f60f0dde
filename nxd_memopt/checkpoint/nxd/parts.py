"""Merges and cuts tensor-parallel shards as neuronx-distributed's layers hold them, KV replicas
included.

The full tensors are in Hugging Face's order of heads. A shard of one layer is the concatenation
of the shards of its parts (``[gate, up]``, ``[q, k, v]``) along the sharded dimension. With T
ranks and m replicas of each KV shard there are n = T/m KV shards, and rank r stores

- in strided order (trn1): KV shard ``r mod n``; the ranks of KV shard j are
  ``j, j + n, j + 2n, ...``
- in consecutive order (trn2): KV shard ``r // m``; the ranks of KV shard j are
  ``jm, ..., jm + m - 1``.

The query heads of a KV shard are divided over its ranks in increasing order. In consecutive order
a rank's query heads are the contiguous slice r of T. In strided order they are slice
``(r mod n) * m + r // n``. The columns of the attention's output projection follow the query
heads.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nxd_memopt.config import require_divisible
from nxd_memopt.parallel_layers.rank_order import kv_shard_of_rank, position_of_rank
from nxd_memopt.parallel_layers.utils import bit_equal

KVOrder = Literal["strided", "consecutive"]
Kind = Literal["replicated", "column", "row", "query", "query_row", "kv"]


@dataclass(frozen=True)
class Layout:
    """Layout of the shards over the tensor-parallel ranks.

    Attributes:
        size: T.
        kv_replicas: m, the number of ranks that store the same KV shard.
        kv_order: order of the KV replicas over the ranks; irrelevant if m is 1 or T.
        query_key_value_stride: 1 or 3, for GPT-NeoX's fused projection; see
            docs/migrating_from_nxd.md.
        accept_drift: use rank 0's value of a replicated parameter that differs between ranks,
            with a warning.
    """

    size: int
    kv_replicas: int = 1
    kv_order: KVOrder = "consecutive"
    query_key_value_stride: int = 1
    accept_drift: bool = False

    def __post_init__(self) -> None:
        remedy = "use a tensor_model_parallel_size that the number of replicas divides"
        require_divisible("tensor_model_parallel_size", self.size, "kv_size_multiplier", self.kv_replicas, remedy)

    @property
    def rank_stride(self) -> int:
        """Distance between ranks that store consecutive query slices; see ``rank_order``."""
        if self.kv_order == "strided":
            return self.size // self.kv_replicas
        return 1

    def kv_shard(self, rank: int) -> int:
        """Return the index of the KV shard, of T/m, that ``rank`` stores."""
        return kv_shard_of_rank(rank, self.size, self.kv_replicas, self.rank_stride)

    def query_slice(self, rank: int) -> int:
        """Return the index of the contiguous slice of query heads, of T, that ``rank`` stores."""
        return position_of_rank(rank, self.size, self.rank_stride)

    def slice_index(self, kind: Kind, rank: int) -> tuple[int, int]:
        """Return the index of the slice of a part that ``rank`` stores, and the number of
        slices.
        """
        if kind == "kv":
            return self.kv_shard(rank), self.size // self.kv_replicas
        if kind in ("query", "query_row"):
            return self.query_slice(rank), self.size
        if kind == "replicated":
            return 0, 1
        return rank, self.size


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor inside a parameter of neuronx-distributed.

    Attributes:
        name: Hugging Face name.
        kind: kind of sharding; ``query_row`` are the columns that belong to query heads.
        shape: shape of the full tensor.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def dim(self) -> int:
        """The sharded dimension."""
        return 1 if self.kind in ("row", "query_row") else 0

    def local_length(self, layout: Layout) -> int:
        """Return the length of a shard along ``dim``.

        Raises:
            ValueError: the full length is not divisible by the number of shards.
        """
        _, shards = layout.slice_index(self.kind, 0)
        label = f"{self.name}'s dimension {self.dim}"
        return require_divisible(label, self.shape[self.dim], "its number of shards", shards, "use another size")


@dataclass(frozen=True)
class Rule:
    """One parameter of neuronx-distributed: its name and, in order, the Hugging Face tensors that
    it consists of.

    Attributes:
        name: name in neuronx-distributed's state dict.
        parts: the Hugging Face tensors, all sharded along the same dimension.
        stride: 3 if a shard takes one slice from each third of the tensor, else 1.
    """

    name: str
    parts: tuple[Part, ...]
    stride: int = 1

    @property
    def dim(self) -> int:
        """The sharded dimension."""
        return self.parts[0].dim

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of one rank's shard."""
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.local_length(layout) for part in self.parts)
        return tuple(shape)

    def cut(self, full: dict[str, Tensor], layout: Layout, rank: int) -> Tensor:
        """Return the shard of ``rank``, cut from the full Hugging Face tensors."""
        shards = []
        for part in self.parts:
            shards.append(_cut_part(full[part.name], part, layout, rank, self.stride))
        if len(shards) == 1:
            return shards[0]
        return torch.cat(shards, self.dim).contiguous()

    def merge(self, part: Part, shards: Sequence[Tensor], layout: Layout) -> Tensor:
        """Return the full tensor of ``part``, from the shards of ranks 0 to T-1.

        Raises:
            ValueError: replicas differ.
        """
        self.require_replicas(part, shards, layout)
        # Of the ranks with the same slice, the first one is copied. ``require_replicas`` has compared
        # them; with ``accept_drift`` they may differ.
        full = torch.empty(part.shape, dtype=shards[0].dtype)
        copied: set[int] = set()
        for rank, shard in enumerate(shards):
            index, _ = layout.slice_index(part.kind, rank)
            if index in copied:
                continue
            copied.add(index)
            local = self._local_part(shard, part, layout)
            for source, target in _matching_views(local, full, part, layout, rank, self.stride):
                target.copy_(source)
        return full

    def _local_part(self, shard: Tensor, part: Part, layout: Layout) -> Tensor:
        """Return the view of ``part`` in one rank's shard."""
        # The shard is the concatenation of its parts' shards: skip the parts before ``part``.
        previous = self.parts[: self.parts.index(part)]
        offset = sum(other.local_length(layout) for other in previous)
        return shard.narrow(self.dim, offset, part.local_length(layout))

    def require_replicas(self, part: Part, shards: Sequence[Tensor], layout: Layout) -> None:
        """Raise ``ValueError`` if ranks that should store the same slice store different values.

        The files then have another layout than ``layout``.
        """
        first: dict[int, int] = {}
        for rank, shard in enumerate(shards):
            # Compare each rank with the first rank that stores the same slice.
            index, _ = layout.slice_index(part.kind, rank)
            earlier = first.setdefault(index, rank)
            local = self._local_part(shard, part, layout)
            reference = self._local_part(shards[earlier], part, layout)
            if earlier != rank and not bit_equal(local, reference):
                if part.kind == "replicated" and layout.accept_drift:
                    warnings.warn(f"{self.name} differs between tensor-parallel ranks: rank 0's is taken", stacklevel=2)
                    return
                raise ValueError(
                    f"{self.name} differs between tensor-parallel ranks {earlier} and {rank}, which hold the same "
                    f"slice of {part.name}: pass files of one save, the other kv_order for KV heads, or "
                    "accept_drift=True for norms and biases (GPT-NeoX's script does not reduce these gradients)"
                )


def _matching_views(
    local: Tensor, full: Tensor, part: Part, layout: Layout, rank: int, stride: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of views of ``local`` and ``full`` that contain the same elements."""
    index, shards = layout.slice_index(part.kind, rank)
    if part.kind == "replicated":
        yield local, full
        return
    # Along ``dim`` the full tensor is [stride, shards, length]: with stride 3 the local shard,
    # [stride, length], has one range in each third; with stride 1 it is one contiguous range.
    length = local.size(part.dim) // stride
    for block in range(stride):
        start = block * length * shards + index * length
        yield local.narrow(part.dim, block * length, length), full.narrow(part.dim, start, length)


def _cut_part(full: Tensor, part: Part, layout: Layout, rank: int, stride: int) -> Tensor:
    """Return the shard of one part."""
    shape = list(part.shape)
    shape[part.dim] = part.local_length(layout)
    local = torch.empty(shape, dtype=full.dtype)
    for target, source in _matching_views(local, full, part, layout, rank, stride):
        target.copy_(source)
    return local


def detect_kv_order(rule: Rule, part: Part, shards: Sequence[Tensor], replicas: int) -> set[KVOrder]:
    """Return the orders of KV replicas for which all replicas are equal."""
    # The files do not record the order. In the wrong order ``require_replicas`` compares ranks
    # with different KV heads, which differ unless the heads happen to be equal.
    fitting: set[KVOrder] = set()
    orders: tuple[KVOrder, ...] = ("strided", "consecutive")
    for order in orders:
        try:
            rule.require_replicas(part, shards, Layout(len(shards), replicas, order))
        except ValueError:
            continue
        fitting.add(order)
    return fitting
