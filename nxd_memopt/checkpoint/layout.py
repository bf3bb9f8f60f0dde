"""Describes which boxes of a full tensor a rank's parameter, or its flat ZeRO-1 shard, consists of.

A checkpoint that does not depend on T, D and ZeRO-1 stores boxes of full tensors: an offset and a size in each
dimension. Everything here follows from ``shard_ranges`` and ``full_shape`` of the parameter; nothing is read from a
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.checkpointing import full_shape
from nxd_memopt.parallel_layers.utils import is_sharded, padded_size, shard_ranges

Shape = tuple[int, ...]
FlatBox = tuple[Shape, Shape]
"""Offset and size of a box whose elements are consecutive in row-major order."""


@dataclass(frozen=True)
class Part:
    """One box of a full tensor and where its elements are in this rank's stored tensor.

    ``stored.flatten()[start : start + prod(view)].view(view)``, narrowed along ``dim`` from ``first`` to ``size[dim]``,
    is the box. ``dim`` is 0 with ``view == size`` where the box is contiguous in the stored tensor.

    Attributes:
        offset: of the box in the full tensor.
        size: of the box, as many dimensions as the full tensor.
        holders: tensor-parallel ranks that store the same box (KV replicas, parameters that are not sharded).
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
        return math.prod(self.size)

    @property
    def is_contiguous(self) -> bool:
        return self.view == self.size

    def of(self, stored: Tensor) -> Tensor:
        """Return the box as a view of ``stored``, which must be contiguous."""
        box = stored.view(-1)[self.start : self.start + math.prod(self.view)].view(self.view)
        return box if self.is_contiguous else box.narrow(self.dim, self.first, self.size[self.dim])


def boxes_of_range(shape: Shape, start: int, stop: int) -> list[FlatBox]:
    """Return the boxes that the elements ``start`` to ``stop`` of a row-major tensor of ``shape`` consist of, in order.

    Let ``row`` be the elements of one index of dimension 0. The range is the rest of a row that has begun, full rows,
    and the beginning of a last row; the two incomplete rows are ranges of a tensor with one dimension less. A range of
    a tensor with k dimensions gives at most 2k - 1 boxes: both ends descend at most k - 1 dimensions and leave one box
    in each, and one box of full rows lies between them. The boxes of a range within one row are those of that row.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return _within(first, shape, start - first * row, stop - first * row)
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
    """Boxes of a range inside index ``index`` of dimension 0."""
    return [((index, *offset), (1, *size)) for offset, size in boxes_of_range(shape[1:], start, stop)]


def parts_of(param: Tensor, *, rank: int = 0, size: int = 1) -> list[Part]:
    """Return the boxes of the full tensor that a tensor stored for ``param`` consists of; padding belongs to none.

    Args:
        param: this rank's parameter, described as the layers do.
        rank: which of ``size`` equal parts of the flattened parameter is stored, padded to a multiple of ``size``.
        size: ranks of the ZeRO-1 sharding group; 1 when the stored tensor has the parameter's shape.

    Raises:
        ValueError: the parameter was built for another tensor-parallel size than the process groups have.
    """
    shape = tuple(param.shape)
    elements = math.prod(shape)
    length = padded_size(elements, size) // size
    begin, end = min(rank * length, elements), min((rank + 1) * length, elements)
    ranges = _dimension_ranges(param)
    dim = cast(Any, param).partition_dim % param.dim() if is_sharded(param) else 0
    parts: list[Part] = []
    position = 0
    for offset, box in boxes_of_range(shape, begin, end):
        for local, full, count, holders in ranges if shape else [(0, 0, 0, ranges[0][3])]:
            part = _cut(offset, box, position, dim, (local, full, count), holders)
            if part is not None:
                parts.append(part)
        position += math.prod(box)
    return parts


def _cut(
    offset: Shape, box: Shape, position: int, dim: int, span: tuple[int, int, int], holders: tuple[int, ...]
) -> Part | None:
    """Return the part of a local box whose indices along ``dim`` are in ``span``; ``None`` when there are none.

    Args:
        offset: of the box in the local parameter.
        box: its size.
        position: of its first element in the stored tensor.
        dim: the sharded dimension.
        span: first local index, first index in the full tensor, and count.
        holders: tensor-parallel ranks that store these indices.
    """
    if not box:
        return Part((), (), position, (), 0, 0, holders)
    local, full, count = span
    low, high = max(offset[dim], local), min(offset[dim] + box[dim], local + count)
    if low >= high:
        return None
    target = (*offset[:dim], full + low - local, *offset[dim + 1 :])
    size = (*box[:dim], high - low, *box[dim + 1 :])
    first = low - offset[dim]
    if math.prod(box[:dim]) == 1:  # the box's leading dimension: what is cut out of it stays contiguous
        return Part(target, size, position + first * math.prod(box[dim + 1 :]), size, 0, 0, holders)
    return Part(target, size, position, box, dim, first, holders)


def _dimension_ranges(param: Tensor) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """Local index, index in the full tensor, count and holders of each range along the sharded dimension.

    Padding, which lies at the end of the full dimension, is left out.
    """
    tensor_ranks = range(parallel_state.get_tensor_model_parallel_size())
    if not is_sharded(param):
        return [(0, 0, param.shape[0] if param.dim() else 0, tuple(tensor_ranks))]
    description: Any = param
    built_for = description.num_partitions * getattr(param, "replicas", 1)
    if built_for != len(tensor_ranks):
        raise ValueError(
            f"a parameter of shape {list(param.shape)} was sharded for tensor_model_parallel_size {built_for}, the "
            f"process groups have {len(tensor_ranks)}: initialize_model_parallel with the model's size"
        )
    length = full_shape(param)[description.partition_dim % param.dim()]
    of_ranks = [set(shard_ranges(param, rank=rank)) for rank in tensor_ranks]
    ranges, local = [], 0
    for start, stop in shard_ranges(param):
        holders = tuple(rank for rank in tensor_ranks if (start, stop) in of_ranks[rank])
        ranges.append((local, start, min(stop, length) - start, holders))
        local += stop - start
    return [entry for entry in ranges if entry[2] > 0]


def split_part(part: Part, max_elements: int) -> list[Part]:
    """Cut ``part`` along its first dimension into boxes of at most ``max_elements``, but of one index at least.

    Each box has a checksum of its own, and a reader that needs a part of a box must read all of it.
    """
    if part.elements <= max_elements or not part.size:
        return [part]
    axis = next((i for i, n in enumerate(part.size) if n > 1), 0)
    if not part.is_contiguous and axis >= part.dim:
        return [part]
    row = part.elements // part.size[axis]
    step = max(1, max_elements // row)
    stored_row = math.prod(part.view[axis + 1 :])
    pieces = []
    for first in range(0, part.size[axis], step):
        count = min(step, part.size[axis] - first)
        offset = (*part.offset[:axis], part.offset[axis] + first, *part.offset[axis + 1 :])
        size = (*part.size[:axis], count, *part.size[axis + 1 :])
        view = (*part.view[:axis], count, *part.view[axis + 1 :])
        start = part.start + first * stored_row
        pieces.append(Part(offset, size, start, view, part.dim, part.first, part.holders))
    return pieces


def overlap(first: FlatBox, second: FlatBox) -> FlatBox | None:
    """Return the box that two boxes share, or ``None``."""
    low = tuple(max(a, b) for a, b in zip(first[0], second[0], strict=True))
    high = tuple(min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True))
    size = tuple(b - a for a, b in zip(low, high, strict=True))
    return (low, size) if all(n > 0 for n in size) else None


def within(box: FlatBox, outer: FlatBox) -> tuple[slice, ...]:
    """Return the index of ``box`` in a tensor that holds ``outer``."""
    return tuple(slice(a - b, a - b + n) for a, n, b in zip(*box, outer[0], strict=True))


def choose_data_rank(load_bytes: list[int], holders: Sequence[int], size_bytes: int, turn: int) -> int:
    """Return which data-parallel rank writes a box that ``holders`` store, and count it in ``load_bytes``.

    Every holder must come to the same answer: loads are compared only where all data-parallel ranks are holders, and
    have therefore counted the same boxes; otherwise the holders take turns.
    """
    if len(holders) < len(load_bytes):
        return holders[turn % len(holders)]
    chosen = min(holders, key=load_bytes.__getitem__)
    load_bytes[chosen] += size_bytes
    return chosen
