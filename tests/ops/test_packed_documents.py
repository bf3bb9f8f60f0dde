"""Packed documents: each gives the loss and the gradients that it gives alone, without a mask tensor."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from nxd_memopt.ops.attention import attention_implementation, core_attention
from nxd_memopt.ops.packed import PackedDocuments
from tests.ops.test_attention import LargestTensor
from tests.reference import assert_float64_close, gradients, tensors
from tests.reference_models import VOCAB, gpt_neox_config, llama_config, parallel_model

LENGTHS = [[5, 1, 6], [12], [3, 9]]  # of the documents in each row of 12 tokens
BOUNDARIES = [0, 5, 6, 12, 24, 27, 36]


def documents(boundaries=BOUNDARIES, rows=3, length=12) -> PackedDocuments:
    return PackedDocuments.of(torch.tensor(boundaries), rows, length)


def test_ids_and_positions():
    packed = documents()
    assert packed.ids.tolist() == [[0] * 5 + [1] + [2] * 6, [3] * 12, [4] * 3 + [5] * 9]
    assert packed.positions().tolist() == [[p for n in row for p in range(n)] for row in LENGTHS]
    filled = documents([*BOUNDARIES, 36, 36])  # a tensor of fixed length
    assert torch.equal(filled.positions(), packed.positions()) and torch.equal(filled.mask(), packed.mask())


@pytest.mark.parametrize("implementation", ["math", "tiled", "sdpa"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3)])
def test_attention_of_each_document_alone(implementation, heads, groups):
    query, *others = (tensors(3, h, 12, 8, seed=i).requires_grad_() for i, h in enumerate((heads, groups, groups)))
    inputs = (query, *others)
    upstream = tensors(3, heads, 12, 8, seed=9)
    found = core_attention(*inputs, implementation=implementation, mask=documents())
    expected = torch.empty_like(found)
    for start, stop in pairwise(BOUNDARIES):
        row, own = start // 12, slice(start % 12, start % 12 + stop - start)
        alone = core_attention(*(x[row : row + 1, :, own] for x in inputs), implementation="math")
        expected[row : row + 1, :, own] = alone
    assert_float64_close(found, expected)
    for a, b in zip(gradients(found, upstream, inputs), gradients(expected, upstream, inputs), strict=True):
        assert_float64_close(a, b)


def test_tiles_smaller_than_documents():
    from nxd_memopt.ops.tiled_attention import tiled_attention

    ids = documents().ids
    inputs = tuple(tensors(3, 2, 12, 4, seed=i).requires_grad_() for i in range(3))
    expected = core_attention(*inputs, implementation="math", mask=documents())
    found = tiled_attention(*inputs, ids, tile=4)
    assert_float64_close(found, expected)
    upstream = tensors(3, 2, 12, 4, seed=9)
    for a, b in zip(gradients(found, upstream, inputs), gradients(expected, upstream, inputs), strict=True):
        assert_float64_close(a, b)


@pytest.mark.parametrize("options", [{"fused_linear_cross_entropy": False}, {"recompute_granularity": "full"}], ids=str)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_model_gives_each_documents_loss(config, options):
    torch.manual_seed(0)
    model = parallel_model(config(num_hidden_layers=2), **options).double()
    ids = torch.randint(0, VOCAB, (3, 12))
    packed = model(ids, labels=ids, cu_seqlens=torch.tensor(BOUNDARIES)).loss
    (found,) = torch.autograd.grad(packed, model.embedding_weight())
    total, count = 0.0, 0
    for start, stop in pairwise(BOUNDARIES):
        alone = ids.view(-1)[start:stop].unsqueeze(0)
        total = total + model(alone, labels=alone).loss * (stop - start - 1)
        count += stop - start - 1
    (expected,) = torch.autograd.grad(total / count, model.embedding_weight())
    torch.testing.assert_close(packed, total / count, rtol=1e-9, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 5, 36, 30, 36], "must not decrease"),
        ([0, 24, 30], "from 0 to the batch's 36 tokens, got 0 to 30"),
        ([0, 20, 36], "crosses the start of a row, token 12"),
        ([0.0, 36.0], "must be integers"),
    ],
    ids=str,
)
def test_boundaries_that_divide_no_rows(boundaries, message):
    with pytest.raises(ValueError, match=message):
        documents(boundaries)


def test_a_mask_beside_is_refused():
    model, ids = parallel_model(llama_config()), torch.zeros(1, 12, dtype=torch.int64)
    with pytest.raises(ValueError, match="cu_seqlens and attention_mask exclude each other"):
        model(ids, attention_mask=torch.ones_like(ids), cu_seqlens=torch.tensor([0, 12]))


@pytest.mark.parametrize("implementation", ["tiled", "sdpa"])
def test_no_sequence_squared_tensor_is_made(implementation):
    length = 2048
    name, _ = attention_implementation((1, 2, length, 8), 2, dtype=torch.float32, packed=True)
    assert name == "sdpa", "what a CPU takes unasked"
    inputs = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
    packed = documents([0, 1000, 1001, length], rows=1, length=length)
    with LargestTensor() as largest:
        core_attention(*inputs, implementation=implementation, mask=packed).sum().backward()
    assert largest.elements < length * length / 4
