"""Boxes of full tensors: flat ranges decompose into few boxes, and every shard's boxes are its elements."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from nxd_memopt.checkpoint.layout import Part, boxes_of_range, parts_of, split_part
from nxd_memopt.checkpoint.sharded import index
from tests.reference import error_message

SHAPES = [(7,), (5, 3), (1, 7), (3, 1, 4), (2, 3, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_of_every_range_are_its_elements_in_order(shape):
    elements = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations(range(elements.numel() + 1), 2):
        boxes = boxes_of_range(shape, start, stop)
        found = [elements[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].flatten() for box in boxes]
        assert torch.cat(found).tolist() == list(range(start, stop)), (start, stop)
        assert len(boxes) <= 2 * len(shape) - 1, (start, stop, boxes)
    assert boxes_of_range(shape, 3, 3) == []


def test_a_scalar_is_one_box():
    assert boxes_of_range((), 0, 1) == [((), ())]
    (part,) = parts_of(torch.tensor(5.0))
    assert part.of(torch.tensor(5.0)).item() == 5.0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_flat_shards_cover_the_tensor_once_without_padding(shape, size):
    full = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    padded = torch.nn.functional.pad(full.flatten(), (0, -full.numel() % size), value=-1.0)
    again = torch.full(shape, torch.nan)
    count = 0
    for rank, stored in enumerate(padded.chunk(size) if size > 1 else [full]):
        for part in parts_of(full, rank=rank, size=size):
            again[tuple(slice(a, a + n) for a, n in zip(part.offset, part.size, strict=True))] = part.of(stored)
            count += part.elements
    assert torch.equal(again, full) and count == full.numel()


def whole(shape: tuple[int, ...]) -> Part:
    return Part((0,) * len(shape), shape, 0, shape, 0, 0, (0,))


@pytest.mark.parametrize("limit", [1, 2, 5, 7, 100])
@pytest.mark.parametrize("narrowed", [False, True])
def test_split_boxes_are_the_box(limit, narrowed):
    stored = torch.arange(1 * 6 * 5).view(1, 6, 5)
    part = Part((0, 2, 1), (1, 6, 3), 0, (1, 6, 5), 2, 1, (0,)) if narrowed else whole((1, 6, 5))
    full = torch.full((1, 10, 10), -1)
    expected = full.clone()
    target = tuple(slice(a, a + n) for a, n in zip(part.offset, part.size, strict=True))
    expected[target] = part.of(stored)
    row = part.elements // 6
    for piece in split_part(part, limit):
        assert piece.elements <= max(limit, row)
        full[tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.size, strict=True))] = piece.of(stored)
    assert torch.equal(full, expected)


def fragment(*boxes: tuple[list[int], list[int]]) -> dict[str, Any]:
    described = [{"offset": offset, "size": size} for offset, size in boxes]
    return {"tensors": {"w": {"shape": [4, 3], "dtype": "float32", "boxes": described}}}


def test_boxes_of_all_ranks_must_cover_a_tensor_exactly_once():
    merged = index.merge_tensors([fragment(([0, 0], [2, 3])), fragment(([2, 0], [2, 3]))])
    assert len(merged["w"]["boxes"]) == 2
    wrong = {
        "leave 6 of its 12 elements out": [fragment(([0, 0], [2, 3]))],
        "overlap": [fragment(([0, 0], [2, 3])), fragment(([1, 0], [2, 3]))],
        "lie outside of it": [fragment(([0, 0], [2, 3])), fragment(([3, 0], [2, 3]))],
    }
    for problem, ranks in wrong.items():
        assert f"the ranks' boxes of w [4, 3] {problem}" in error_message(
            lambda ranks=ranks: index.merge_tensors(ranks)
        )


@pytest.mark.parametrize(("field", "value"), [("shape", [3, 4]), ("dtype", "bfloat16")])
def test_ranks_that_disagree_on_a_tensor_are_refused(field, value):
    first, second = fragment(([0, 0], [2, 3])), fragment(([2, 0], [2, 3]))
    second["tensors"]["w"][field] = value
    message = error_message(lambda: index.merge_tensors([first, second]))
    assert "on rank 1" in message and "build the same model on all ranks" in message and str(value) in message
