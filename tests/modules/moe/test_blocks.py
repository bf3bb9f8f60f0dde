"""Blocks of rows of one expert each: assignment and static bound by enumeration, linear layer by its definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from nxd_memopt.modules.moe.assignment import assign_blocks, most_blocks
from nxd_memopt.ops.block_linear import BlockLinear, block_linear
from tests.reference import tensors

# Experts, choices of a token, tokens, rows of a block
SIZES = [(3, 2, 3, 2), (3, 1, 4, 3), (2, 2, 4, 3), (4, 2, 2, 1), (3, 3, 3, 5), (4, 3, 2, 2)]


@pytest.mark.parametrize(("experts", "k", "tokens", "size"), SIZES)
def test_every_routing_fits_and_one_fills_the_bound(experts: int, k: int, tokens: int, size: int) -> None:
    choices = list(itertools.permutations(range(experts), k))
    bound = most_blocks(tokens, k, experts, size)
    most = 0
    for routing in itertools.product(choices, repeat=tokens):
        counts = [sum(expert in token for token in routing) for expert in range(experts)]
        most = max(most, sum(-(-count // size) for count in counts))
    assert most <= bound
    # The bound does not know that counts are of different tokens: it is one block above at most here.
    assert bound - most <= 1


@pytest.mark.parametrize(("first", "own"), [(0, 2), (2, 2), (0, 1), (3, 1), (0, 4)])
def test_rows_are_the_choices_of_own_experts_in_their_order(first: int, own: int) -> None:
    experts, size = 4, 3
    chosen = torch.rand(9, experts, generator=torch.Generator().manual_seed(4)).argsort(1)[:, :2]
    found = assign_blocks(chosen, torch.tensor(first), own, size)
    assert found.is_token is not None and found.block_experts is not None and found.counts is None
    assert found.choices.numel() == most_blocks(9, 2, own, size) * size
    rows: dict[int, list[int]] = {expert: [] for expert in range(own)}
    for row, (choice, is_token) in enumerate(zip(found.choices.tolist(), found.is_token.tolist(), strict=True)):
        if is_token:
            rows[int(found.block_experts[row // size])].append(choice)
    flat = chosen.flatten().tolist()
    for expert in range(own):
        assert rows[expert] == [i for i, each in enumerate(flat) if each == first + expert]


def test_linear_layer_of_blocks() -> None:
    """Equal to a matmul per block, also for an expert without a block and one with several."""
    rows, weight = tensors(10, 3, seed=1).requires_grad_(), tensors(4, 5, 3, seed=2).requires_grad_()
    numbers = torch.tensor([0, 0, 2, 3, 3])
    output = block_linear(rows, weight, numbers)
    wanted = torch.cat([rows[2 * i : 2 * i + 2] @ weight[e].t() for i, e in enumerate(numbers.tolist())])
    assert torch.allclose(output, wanted, rtol=1e-13)
    assert torch.autograd.gradcheck(lambda x, w: block_linear(x, w, numbers), (rows, weight))
    (grad,) = torch.autograd.grad(output.sum(), weight)
    assert grad[1].eq(0).all() and not grad[3].eq(0).any()


def test_gradients_of_16_bits_are_summed_over_blocks_in_fp32() -> None:
    """256 blocks of 1.0: a sum in bf16, which has 8 bits, would stay at 256 after 1.0 was added 256 times."""
    rows = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.ones(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    block_linear(rows, weight, torch.zeros(512, dtype=torch.int64)).sum().backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [512, 0]


def test_the_blocks_of_a_single_expert_are_one_matmul() -> None:
    rows, weight = tensors(10, 3, seed=1).requires_grad_(), tensors(1, 5, 3, seed=2).requires_grad_()
    numbers = torch.zeros(5, dtype=torch.int64)
    whole, blocks = block_linear(rows, weight, numbers), BlockLinear.apply(rows, weight, numbers)
    assert torch.allclose(whole, blocks, rtol=1e-13)
    for one, other in zip(*(torch.autograd.grad(y.sin().sum(), (rows, weight)) for y in (whole, blocks)), strict=True):
        assert torch.allclose(one, other, rtol=1e-13)
