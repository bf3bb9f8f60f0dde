"""Splits of tensors: equal to torch's, with one concatenation in backward, and refused elsewhere by a static check."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.ops.parts import split_sizes
from scripts.check_splits import refused_lines


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_parts_and_gradients_equal_those_of_split(dim):
    x = torch.randn(7, 7, 7, dtype=torch.float64, requires_grad=True)
    parts, expected = split_sizes(x, [2, 0, 5], dim), x.split([2, 0, 5], dim)
    assert all(torch.equal(part, other) for part, other in zip(parts, expected, strict=True))
    assert all(part.data_ptr() == other.data_ptr() for part, other in zip(parts[::2], expected[::2], strict=True))
    upstream = [torch.randn_like(part) for part in parts]
    (found,), (wanted,) = (torch.autograd.grad(each, x, upstream) for each in (parts, expected))
    assert torch.equal(found, wanted)


def test_a_part_without_gradient_counts_as_zero():
    x = torch.randn(4, 6, requires_grad=True)
    split_sizes(x, [1, 2, 3], -1)[1].sum().backward()
    assert x.grad is not None and x.grad.sum(0).tolist() == [0, 4, 4, 0, 0, 0]


def test_sizes_must_add_up():
    with pytest.raises(ValueError, match=r"\[1, 2\] add up to 3, but dimension -1 has 6"):
        split_sizes(torch.zeros(4, 6), [1, 2], -1)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x.split([1, 2], dim=1)", [1]),
        ("\nx.split(split_size=sizes)", [2]),
        ("x.split_with_sizes(sizes, 1)", [1]),
        ("from torch.functional import split as cut", [1]),
        ("torch.ops.aten.split.Tensor(x, 2)\naten.split_with_sizes.default(x, sizes)", [1, 2]),
        ("x.split(',', [1])", [1]),
        ("cut = torch.split\ngetattr(x, 'split')(sizes)\nmap(torch.Tensor.split, tensors)", [1, 2, 3]),
        ("from re import split\ntext.split(',', 1)\ntext.split(maxsplit=1)\nmap(str.split, lines)", []),
        ("text.split()\ntext.split(',')\ntext.split(sep=',')\nre.split(pattern, text)\nshlex.split(flags)", []),
    ],
)
def test_the_static_check_refuses_splits_of_tensors(source, lines):
    assert list(refused_lines(source)) == lines
