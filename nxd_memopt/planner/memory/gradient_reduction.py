"""Memory in which the gradients of data-parallel ranks are reduced during backward, by ZeRO stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.sizes.rank_model import RankModel
from nxd_memopt.planner.sizes.states import StateLayout, elements
from nxd_memopt.planner.techniques.buckets import BUCKET_BYTES, OVERLAPPED_BUCKETS, packed
from nxd_memopt.planner.techniques.recomputation import Recomputation


@dataclass(frozen=True)
class ReductionBytes:
    """Bytes of buckets and of gradients that are not reduced yet, besides the gradients that stay.

    Args:
        head: when the head's gradient is reduced, before the backward of any layer.
        last_layer: in the backward of the last layer, which is the first one.
        layer: in the backward of any other layer.
        unit_layer: of a unit of several layers, the gradients of one, which wait for the others.
        in_embedding: in the backward of the embedding.
        after_embedding: when the last gradients are reduced; no activation is left.
    """

    head: int = 0
    last_layer: int = 0
    layer: int = 0
    unit_layer: int = 0
    in_embedding: int = 0
    after_embedding: int = 0


@dataclass(frozen=True)
class BackwardReduction:
    """What data-parallel ranks reduce and gather while the backward of a layer runs.

    Args:
        model: the rank's share of the model.
        layout: weights, gradients and states.
        recomputation: the units of layers that stage 3 gathers and reduces together.
        last_unit: the unit of the last layer, whose backward is the first one.
        buckets: bytes of buckets.
    """

    model: RankModel
    layout: StateLayout
    recomputation: Recomputation
    last_unit: range
    buckets: ReductionBytes

    @classmethod
    def of(cls, model: RankModel, memory: MemoryConfig, layout: StateLayout, *, accumulates: bool) -> BackwardReduction:
        """Return the reduction of a backward pass; arguments as ``reduction_bytes``."""
        depth = model.sizes.num_layers
        recomputation = Recomputation.of(memory, depth)
        unit = recomputation.unit(depth - 1)
        buckets = reduction_bytes(model, layout, unit_layers=len(unit), accumulates=accumulates)
        return cls(model, layout, recomputation, unit, buckets)

    @property
    def reduces_units(self) -> bool:
        """Whether the gradients of a unit are reduced together, when all of them exist (stage 3)."""
        return self.layout.sharding == "zero3" and self.layout.shards > 1

    def bucket_bytes(self, index: int, gradients: int) -> int:
        """Return the bytes of buckets, and of the gradients of a unit that are not reduced yet.

        Args:
            index: the layer whose backward runs.
            gradients: bytes of its gradients, in the dtype of the weights.
        """
        buckets = self.buckets.layer
        if index in self.last_unit:
            buckets = self.buckets.last_layer
        if not self.reduces_units:
            return buckets
        layers_after = self.recomputation.unit(index)[-1] - index
        return buckets + self.buckets.unit_layer * layers_after + gradients

    def gathered_bytes(self, index: int) -> int:
        """Return the bytes of the weights that stage 3 has gathered in the backward of layer ``index``.

        The unit before it is gathered at the same time.
        """
        if not self.reduces_units:
            return 0
        unit = self.recomputation.unit(index)
        if self.layout.keeps_gathered:
            return gathered_bytes(self.model, self.layout, unit[-1] + 1)
        layers = len(unit)
        if unit[0]:
            layers += len(self.recomputation.unit(unit[0] - 1))
        return gathered_bytes(self.model, self.layout, layers)

    def is_bucket_boundary(self, index: int) -> bool:
        """Return whether the layer before or after layer ``index`` has other buckets or gathered weights."""
        is_after_last = index == self.last_unit[0] - 1 and self.buckets.layer > self.buckets.last_layer
        return is_after_last or (index == 1 and self.reduces_units)


def gathered_bytes(model: RankModel, layout: StateLayout, num_layers: int) -> int:
    """Return the bytes of the weights of ``num_layers`` layers, embedding, final norm and head.

    Stage 3 has the last three from the first operation of forward to the last of backward.
    """
    return model.gathered_elements(num_layers) * layout.element_bytes


# A search asks for the same shapes with every memory technique.
@lru_cache(maxsize=512)
def reduction_bytes(
    model: RankModel, layout: StateLayout, *, unit_layers: int = 1, accumulates: bool = False
) -> ReductionBytes:
    """Return the bytes of buckets at the moments of a backward pass.

    Args:
        model: the rank's share of the model.
        layout: weights, gradients and states.
        unit_layers: decoder layers that stage 3 gathers and reduces together, the layers of a recompute chunk.
        accumulates: the rank's parts of the gradients exist already, and a bucket's gradients are added to them.
    """
    # The gradients of adapters are too small to count.
    if layout.data_parallel_size == 1 or model.sizes.adapters is not None:
        return ReductionBytes()
    if layout.sharding == "zero2":
        return _of_scattered_buckets(model, layout, accumulates=accumulates)
    if layout.sharding == "zero3":
        return _of_units(model, layout, unit_layers, accumulates=accumulates)
    if layout.sharding == "none" and layout.overlaps_reduction:
        return _of_overlapped_buckets(model, layout)
    return ReductionBytes()


def _of_scattered_buckets(model: RankModel, layout: StateLayout, *, accumulates: bool) -> ReductionBytes:
    """Return the bytes of stage 2: a bucket is copied to the dtype of the reduction, and its gradients are freed.

    A bucket is copied when the first gradient of the next one exists. The one before it is on its way. The rank's
    part of the result is the gradient that stays.
    """
    own = layout.element_bytes
    reduced = _reduced_element_bytes(layout, accumulates=accumulates)
    # Vectors have buckets of their own, which come last and are small.
    layer = _buckets([shape for shape in model.layer_shapes if len(shape) > 1], layout)
    head = elements(model.head)
    embedding = elements(model.embedding)
    # Of three buckets after each other the first one is being reduced, the second one exists in both dtypes while it is
    # copied, and the third one is filled. The last buckets of a layer are followed by the first ones of the next layer.
    triples = zip(layer, layer[1:] + layer[:1], (layer * 3)[2 : 2 + len(layer)], strict=True)
    in_layer = max(reduced * (before + copied) + own * (copied + after) for before, copied, after in triples)
    in_last_layer = in_layer
    if head:
        in_last_layer = max(in_layer, reduced * (head + layer[0]) + own * sum((layer * 2)[:2]))
    return ReductionBytes(
        head=(reduced + own) * head,
        last_layer=in_last_layer,
        layer=in_layer,
        in_embedding=reduced * sum((layer * 2)[-2:]) + own * (layer[-1] + embedding),
        after_embedding=reduced * (layer[-1] + embedding) + own * embedding,
    )


def _of_overlapped_buckets(model: RankModel, layout: StateLayout) -> ReductionBytes:
    """Return the bytes of a reduction without sharding: a flat copy of each bucket, and its sum over the ranks."""
    number = OVERLAPPED_BUCKETS
    layer = _buckets(model.layer_shapes, layout)
    head = elements(model.head)
    # A layer of few buckets has several layers in progress at a time, so its buckets repeat until OVERLAPPED_BUCKETS
    # of them can follow each other from any start. Each has a flat copy and the sum over the ranks.
    several = layer * (1 + number // len(layer))
    copies = 2 * layout.gradient_element_bytes
    in_layer = copies * max(sum(several[i : i + number]) for i in range(len(layer)))
    # The head's bucket is the first one of backward.
    in_last_layer = in_layer
    if head:
        in_last_layer = max(in_layer, copies * (head + sum(several[: number - 1])))
    return ReductionBytes(
        head=copies * head,
        last_layer=in_last_layer,
        layer=in_layer,
        in_embedding=in_layer,
        after_embedding=copies * (sum(several[1 - number :]) + elements(model.embedding)),
    )


def _of_units(model: RankModel, layout: StateLayout, unit_layers: int, *, accumulates: bool) -> ReductionBytes:
    """Return the bytes of stage 3 (FSDP2), which reduces the gradients of a unit together, after its backward.

    The copy in the dtype of the reduction stays until the next unit's. Embedding, final norm and head are a unit, whose
    gradients wait for the embedding's.
    """
    own = layout.element_bytes
    copied = _reduced_element_bytes(layout, accumulates=False)
    reduced = _reduced_element_bytes(layout, accumulates=accumulates)
    layer = elements(model.layer_shapes)
    others = elements(model.other_shapes)
    head = own * elements(model.head)
    unit = min(unit_layers, model.sizes.num_layers) * layer
    only_one = unit_layers >= model.sizes.num_layers
    # While gradients are copied, they exist in their own dtype and in the dtype of the reduction. The rank's part of
    # the result, 1 / D of the copies, counts with the gradients that stay and does not exist yet: it is subtracted.
    in_copy = (own + copied) * others
    if not accumulates:
        in_copy -= copied * others // layout.data_parallel_size
    return ReductionBytes(
        head=head,
        last_layer=head + copied * unit * int(only_one),
        layer=head + copied * unit,
        unit_layer=own * layer,
        in_embedding=own * others + copied * unit,
        after_embedding=max(in_copy, reduced * others + head),
    )


def _reduced_element_bytes(layout: StateLayout, *, accumulates: bool) -> int:
    """Return the bytes of an element of a bucket in the dtype of the reduction, with the rank's part of its result."""
    size = layout.reduced_element_bytes
    # Without gradients before it, the part is one of the gradients that stay.
    if accumulates:
        size += -(-size // layout.data_parallel_size)
    return size


def _buckets(shapes: Sequence[Sequence[int]], layout: StateLayout) -> list[int]:
    """Return the elements of the buckets of a layer's parameters, in the order of backward."""
    counts = [math.prod(shape) for shape in reversed(shapes)]
    return packed(counts, BUCKET_BYTES // layout.element_bytes)
