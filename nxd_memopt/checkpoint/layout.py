"""Describes a rank's parameter, or its flat ZeRO-1 shard, as boxes of the full tensor.

A checkpoint that does not depend on T, D and ZeRO-1 stores boxes of full tensors: an offset and a
size in each dimension. All results follow from ``shard_ranges`` and ``full_shape`` of the
parameter; no device memory is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.data_shards import element_range, is_data_sharded
from nxd_memopt.parallel_layers.resharding import full_shape
from nxd_memopt.parallel_layers.utils import first_expert, is_expert_parallel, is_sharded, padded_size, shard_ranges

Shape = tuple[int, ...]
FlatBox = tuple[Shape, Shape]
"""Offset and size of a box.

The elements of a box from ``boxes_of_range`` are consecutive in row-major order.
"""


@dataclass(frozen=True)
class Part:
    """One box of a full tensor and its location in this rank's stored tensor.

    ``stored.flatten()[start : start + prod(view)].view(view)``, narrowed along ``dim`` from
    ``first`` to ``first + size[dim]``, is the box. If the box is contiguous in the stored tensor,
    ``view == size`` and ``dim`` is 0.

    Attributes:
        offset: offset of the box in the full tensor.
        size: size of the box, with the dimensions of the full tensor.
        start: first element of the view in the flat stored tensor.
        view: shape of the view.
        dim: dimension along which the view is narrowed.
        first: first index of the box along ``dim``.
        holders: tensor-parallel ranks that store the same box (KV replicas, unsharded
            parameters).
    """

    offset: Shape
    size: Shape
    start: int
    view: Shape
    dim: int
    first: int
    holders: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.size)

    @property
    def is_contiguous(self) -> bool:
        """Whether the box is contiguous in the stored tensor."""
        return self.view == self.size

    def of(self, stored: Tensor) -> Tensor:
        """Return the box as a view of ``stored``, which must be contiguous."""
        view = stored.view(-1)[self.start : self.start + math.prod(self.view)].view(self.view)
        if self.is_contiguous:
            return view
        return view.narrow(self.dim, self.first, self.size[self.dim])


def boxes_of_range(shape: Shape, start: int, stop: int) -> list[FlatBox]:
    """Return the boxes that cover the elements ``start`` to ``stop`` of a row-major tensor of
    ``shape``, in order.

    Let ``row`` be the number of elements of one index of dimension 0. The range consists of the
    end of a first row, a number of full rows, and the beginning of a last row. The two incomplete
    rows are ranges of a tensor with one dimension less. A range of a tensor with k dimensions
    gives at most 2k - 1 boxes: each end descends at most k - 1 dimensions and leaves one box in
    each of them, and one box of full rows is between the ends. A range within one row is passed
    on to the boxes of this row.

    Example: elements 1 to 8 of a [3, 3] tensor are [0, 1:3], [1:2, 0:3] and [2, 0:2].
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    # first and last: rows of the first and of the last element.
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return _within(first, shape, start - first * row, stop - first * row)
    # Three ranges: rest of a started first row, full rows, start of an incomplete last row. Each
    # may be empty; after the first one, ``first`` is the first full row.
    boxes: list[FlatBox] = []
    if start % row:
        boxes += _within(first, shape, start % row, row)
        first += 1
    full_rows = stop // row - first
    if full_rows > 0:
        boxes.append(((first, *[0] * (len(shape) - 1)), (full_rows, *shape[1:])))
    if stop % row:
        boxes += _within(last, shape, 0, stop % row)
    return boxes


def _within(index: int, shape: Shape, start: int, stop: int) -> list[FlatBox]:
    """Return the boxes of a range inside index ``index`` of dimension 0."""
    return [((index, *offset), (1, *size)) for offset, size in boxes_of_range(shape[1:], start, stop)]


def parts_of(param: Tensor, *, rank: int = 0, size: int = 1) -> list[Part]:
    """Return the boxes of the full tensor that a tensor stored for ``param`` consists of, without
    padding.

    Args:
        param: this rank's parameter, with the sharding attributes of the layers. If it is sharded
            over data-parallel ranks (zero3), the stored tensor has this rank's rows of it, and the
            other arguments are ignored.
        rank: index of the stored chunk among ``size`` equal chunks of the flattened parameter,
            padded to a multiple of ``size``.
        size: number of ranks in the ZeRO-1 sharding group; 1 if the stored tensor has the
            parameter's shape.

    Raises:
        ValueError: see ``require_groups_of``.
    """
    # Two mappings in a row: flat ZeRO-1 range -> boxes of the local parameter [begin, end), and
    # each of these boxes -> one part per contiguous range of the full tensor (a fused weight has
    # several ranges).
    require_groups_of(param)
    shape = tuple(param.shape)
    elements = math.prod(shape)
    if is_data_sharded(param):
        begin, end = element_range(param)
    else:
        # ceil(n / D) elements per rank; the range of the last ranks is clipped to the n elements.
        length = padded_size(elements, size) // size
        begin = min(rank * length, elements)
        end = min((rank + 1) * length, elements)
    ranges = _dimension_ranges(param)
    dim = 0
    if is_sharded(param):
        dim = cast(Any, param).partition_dim % param.dim()
    parts: list[Part] = []
    position = 0
    for offset, box in boxes_of_range(shape, begin, end):
        for span in ranges:
            part = _intersect(offset, box, position, dim, span)
            if part is not None:
                parts.append(part)
        # Boxes follow one another in the stored tensor, in row-major order.
        position += math.prod(box)
    if not is_expert_parallel(param):
        return parts
    first = first_expert(param)
    return [replace(part, offset=(first + part.offset[0], *part.offset[1:])) for part in parts]


def require_groups_of(param: Tensor) -> None:
    """Raise ``ValueError`` if the parameter was built for other parallel sizes than the process groups have."""
    description: Any = param
    found: list[tuple[str, int, int]] = []
    if is_sharded(param):
        # ``num_partitions`` shards with ``replicas`` ranks each; KV heads may have several replicas.
        built_for = description.num_partitions * getattr(param, "replicas", 1)
        found.append(("tensor_model_parallel_size", built_for, parallel_state.get_tensor_model_parallel_size()))
    if is_expert_parallel(param):
        size = parallel_state.get_expert_model_parallel_size()
        found.append(("expert_model_parallel_size", description.num_expert_partitions, size))
    for name, built_for, size in found:
        if built_for != size:
            raise ValueError(
                f"a parameter of shape {list(param.shape)} was sharded for {name} {built_for}, the process groups have "
                f"{size}: initialize_model_parallel with the model's size"
            )


@dataclass(frozen=True)
class _Span:
    """A range along the sharded dimension.

    Attributes:
        local: first index in the local parameter.
        full: first index in the full tensor.
        count: number of indices.
        holders: tensor-parallel ranks that store these indices.
    """

    local: int
    full: int
    count: int
    holders: tuple[int, ...]


def _intersect(offset: Shape, box: Shape, position: int, dim: int, span: _Span) -> Part | None:
    """Return the part of a local box with indices in ``span`` along ``dim``, or None if it is
    empty.

    Args:
        offset: offset of the box in the local parameter.
        box: size of the box.
        position: index of its first element in the stored tensor.
        dim: the sharded dimension.
        span: range along ``dim``.
    """
    # A tensor without dimensions is one element, which has no index to compare.
    if not box:
        return Part((), (), position, (), 0, 0, span.holders)
    # Intersection of the box with the span along ``dim``, in local indices.
    low = max(offset[dim], span.local)
    high = min(offset[dim] + box[dim], span.local + span.count)
    if low >= high:
        return None
    # low - span.local is the distance from the start of the span; the span starts at
    # ``span.full`` in the full tensor.
    target = (*offset[:dim], span.full + low - span.local, *offset[dim + 1 :])
    size = (*box[:dim], high - low, *box[dim + 1 :])
    first = low - offset[dim]
    # All dimensions before ``dim`` have length 1: a range along ``dim`` is contiguous in memory.
    if math.prod(box[:dim]) == 1:
        start = position + first * math.prod(box[dim + 1 :])
        return Part(target, size, start, size, 0, 0, span.holders)
    return Part(target, size, position, box, dim, first, span.holders)


def _dimension_ranges(param: Tensor) -> list[_Span]:
    """Return the ranges along the sharded dimension.

    The padding at the end of the full dimension is left out.
    """
    tensor_ranks = range(parallel_state.get_tensor_model_parallel_size())
    if not is_sharded(param):
        length = param.shape[0] if param.dim() else 0
        return [_Span(0, 0, length, tuple(tensor_ranks))]
    length = full_shape(param)[cast(Any, param).partition_dim % param.dim()]
    # Ranks with an identical range are replicas of it.
    ranges_by_rank = [set(shard_ranges(param, rank=rank)) for rank in tensor_ranks]
    spans: list[_Span] = []
    local = 0
    for start, stop in shard_ranges(param):
        # A range may reach into the padding after the full length (a vocabulary that T does not
        # divide), or be all padding: clip it.
        count = min(stop, length) - start
        if count > 0:
            holders = tuple(rank for rank in tensor_ranks if (start, stop) in ranges_by_rank[rank])
            spans.append(_Span(local, start, count, holders))
        local += stop - start
    return spans


def split_part(part: Part, max_elements: int) -> list[Part]:
    """Cut ``part`` along its first dimension longer than 1 into boxes of at most ``max_elements``
    elements.

    A box has at least one index, and may be larger than ``max_elements``. Each box gets its own
    checksum. A reader that needs a part of a box must read the full box.
    """
    if part.elements <= max_elements or not part.size:
        return [part]
    axis = next((i for i, n in enumerate(part.size) if n > 1), 0)  # 0 for a single element
    # A narrowed view is split only along a dimension before ``dim``, where each chunk of the view
    # is again a range of the flat tensor.
    if not part.is_contiguous and axis >= part.dim:
        return [part]
    # ``row`` elements of the box per index of ``axis``; ``stored_row`` elements of the stored
    # view, which is larger if the box is narrowed.
    row = part.elements // part.size[axis]
    step = max(1, max_elements // row)
    stored_row = math.prod(part.view[axis + 1 :])
    boxes = []
    for first in range(0, part.size[axis], step):
        count = min(step, part.size[axis] - first)
        offset = (*part.offset[:axis], part.offset[axis] + first, *part.offset[axis + 1 :])
        size = (*part.size[:axis], count, *part.size[axis + 1 :])
        view = (*part.view[:axis], count, *part.view[axis + 1 :])
        start = part.start + first * stored_row
        boxes.append(Part(offset, size, start, view, part.dim, part.first, part.holders))
    return boxes


def overlap(first: FlatBox, second: FlatBox) -> FlatBox | None:
    """Return the intersection of two boxes, or None if it is empty."""
    # Per dimension: [max of the starts, min of the ends); empty if one size is not positive.
    low = tuple(max(a, b) for a, b in zip(first[0], second[0], strict=True))
    high = tuple(min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True))
    size = tuple(b - a for a, b in zip(low, high, strict=True))
    if any(n <= 0 for n in size):
        return None
    return low, size


def within(box: FlatBox, outer: FlatBox) -> tuple[slice, ...]:
    """Return the index of ``box`` in a tensor that stores the box ``outer``."""
    return tuple(slice(a - b, a - b + n) for a, n, b in zip(*box, outer[0], strict=True))


def choose_data_rank(load_bytes: list[int], holders: Sequence[int], size_bytes: int, turn: int) -> int:
    """Return the data-parallel rank that writes a box stored by ``holders``, and add it to
    ``load_bytes``.

    Every holder must compute the same answer. Loads are only compared if all data-parallel ranks
    are holders, because only these boxes are counted by all ranks. Otherwise the holders take
    turns.
    """
    if len(holders) < len(load_bytes):
        return holders[turn % len(holders)]
    # The first of the least loaded ranks: ties are broken equally on all ranks.
    chosen = min(holders, key=load_bytes.__getitem__)
    load_bytes[chosen] += size_bytes
    return chosen
