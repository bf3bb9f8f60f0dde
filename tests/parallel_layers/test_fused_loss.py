"""Tests the fused head and loss in one process: float64 references, chunks, errors."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.parallel_layers.fused_loss.reference import reference_linear_cross_entropy
from nxd_memopt.parallel_layers.loss_functions import fused_linear_cross_entropy
from nxd_memopt.planner.techniques.loss_chunks import chunk_ranges
from tests.reference import assert_says, error_message

VARIANTS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss_weight": 0.01},
    {"softcap": 5.0},
    {"label_smoothing": 0.1, "z_loss_weight": 0.01, "softcap": 5.0},
]
SHARED_ROOM = [0, 40_000, 10**8]  # bytes: from chunks of 64 tokens to one chunk


def inputs(tokens: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab, hidden, dtype=dtype) * 0.3).requires_grad_()
    target = torch.randint(0, vocab, (tokens,))
    target[1::5] = -100
    return x, weight, target


def grads_of(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, tensors, torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape).to(loss)))


@pytest.mark.parametrize("logits_bytes", SHARED_ROOM)
@pytest.mark.parametrize("terms", VARIANTS, ids=lambda terms: "-".join(terms) or "plain")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(300, 16, 700), (130, 31, 57), (1, 16, 123)], ids=str)
def test_equals_the_whole_logits(shape, reduction, terms, logits_bytes):
    x, weight, target = inputs(*shape)
    loss = fused_linear_cross_entropy(x, weight, target, reduction=reduction, logits_bytes=logits_bytes, **terms)
    expected = reference_linear_cross_entropy(x, weight, target, reduction=reduction, **terms)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(grads_of(loss, x, weight), grads_of(expected, x, weight), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)  # float64 sums in another order


@pytest.mark.parametrize("logits_bytes", SHARED_ROOM)
def test_wider_sums_lose_no_bits(logits_bytes):
    """dW in bf16 is rounded once: its error is that of the product of rounded factors."""
    x, weight, target = inputs(300, 33, 700, torch.bfloat16)
    exact = inputs_in_double(x, weight)
    expected = grads_of(reference_linear_cross_entropy(*exact, target), *exact)[1]

    def error(room: int, accumulate_dtype: torch.dtype | None = None) -> float:
        loss = fused_linear_cross_entropy(x, weight, target, logits_bytes=room, accumulate_dtype=accumulate_dtype)
        return float((grads_of(loss, x, weight)[1].double() - expected).norm() / expected.norm())

    assert error(logits_bytes, torch.float32) <= error(10**8) * 1.01  # as one chunk, which is rounded once
    assert logits_bytes > 0 or error(logits_bytes) > error(logits_bytes, torch.float32) * 1.01


def inputs_in_double(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().double().requires_grad_() for tensor in tensors)


@pytest.mark.parametrize("logits_bytes", [0, 10**8])
@pytest.mark.parametrize("frozen", [(True, False), (False, True), (True, True)])
def test_only_wanted_gradients_are_made(frozen, logits_bytes):
    x, weight, target = inputs(130, 16, 123)
    expected = grads_of(reference_linear_cross_entropy(x, weight, target), x, weight)
    x, weight = (tensor.detach().requires_grad_(not no) for tensor, no in zip((x, weight), frozen, strict=True))
    loss = fused_linear_cross_entropy(x, weight, target, logits_bytes=logits_bytes)
    assert loss.requires_grad == (not all(frozen))
    if loss.requires_grad:
        (loss * torch.linspace(0.5, 1.5, 1)[0]).backward()
    for tensor, wanted in zip((x, weight), expected, strict=True):
        assert (tensor.grad is None) == (not tensor.requires_grad)
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad, wanted, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [0, 50])
def test_nothing_to_learn_from_is_zero(tokens, reduction):
    x = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    target = torch.full((tokens,), -100)
    loss = fused_linear_cross_entropy(x, weight, target, reduction=reduction, logits_bytes=0)
    loss.sum().backward()
    assert loss.sum() == 0 and x.grad is not None and weight.grad is not None
    assert not x.grad.any() and not weight.grad.any()


def test_inputs_of_any_layout():
    x, weight, target = inputs(60, 16, 123)
    apart = x.detach().view(3, 20, 16).transpose(0, 1).requires_grad_()  # [20, 3, H], not contiguous
    wide = torch.cat([weight.detach(), weight.detach()], dim=1)[:, :16].requires_grad_()
    labels = target.view(3, 20).t()
    loss = fused_linear_cross_entropy(apart, wide, labels, logits_bytes=0)
    torch.testing.assert_close(loss, reference_linear_cross_entropy(x, weight, target))
    found = grads_of(loss, apart)[0].transpose(0, 1).reshape(60, 16)
    torch.testing.assert_close(found, grads_of(reference_linear_cross_entropy(x, weight, target), x)[0])


def test_a_head_tied_to_the_embedding_gets_both_gradients():
    table = torch.randn(40, 8, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 40, (30,))

    def total(loss):
        return torch.autograd.grad(loss(F.embedding(ids, table), table, ids), table)[0]

    torch.testing.assert_close(total(fused_linear_cross_entropy), total(reference_linear_cross_entropy))


def test_rows_beyond_the_vocabulary_take_no_part():
    x, weight, target = inputs(90, 16, 100)
    padded = F.pad(weight.detach(), (0, 0, 0, 28), value=7.0).requires_grad_()
    loss = fused_linear_cross_entropy(x, padded, target, vocab_size=100, logits_bytes=0)
    expected = reference_linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(loss, expected)
    grad = grads_of(loss, padded)[0]
    torch.testing.assert_close(grad[:100], grads_of(expected, weight)[0])
    assert not grad[100:].any()


def test_a_second_backward_is_refused():
    x, weight, target = inputs(30, 16, 100)
    loss = fused_linear_cross_entropy(x, weight, target)
    loss.backward(retain_graph=True)
    assert_says(error_message(loss.backward, RuntimeError), "compute the loss again")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reduction": "average"}, ("reduction 'average'", "mean")),
        ({"label_smoothing": 1.5}, ("label_smoothing", "[0, 1]", "1.5")),
        ({"vocab_size": 101}, ("vocab_size", "(0, 100]", "101")),
        ({"accumulate_dtype": torch.bfloat16}, ("bfloat16 is narrower than the weight's torch.float64",)),
        ({"target": torch.zeros(29, dtype=torch.long)}, ("[30, 16]", "[29]", "each token")),
        ({"target": torch.zeros(30)}, ("integer labels", "float32")),
        ({"target": torch.full((30,), 100)}, ("label 100", "[0, 100)", "tokenizer")),
    ],
)
def test_errors_say_what_to_do(changes, words):
    x, weight, target = inputs(30, 16, 100)
    arguments = {"hidden": x, "weight": weight, "target": target, **changes}
    assert_says(error_message(lambda: fused_linear_cross_entropy(**arguments), ValueError), *words)


def test_autocast_computes_in_its_dtype():
    x, weight, target = (t.float() if t.is_floating_point() else t for t in inputs(30, 16, 100))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused_linear_cross_entropy(x, weight, target)
    assert loss.dtype == torch.float32
    expected = fused_linear_cross_entropy(x.bfloat16(), weight.bfloat16(), target)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)


def test_chunks_cover_all_rows_and_fit_their_memory():
    for rows, gathered, vocab, exchanged, logits_bytes in itertools.product(
        (0, 1, 63, 64, 300, 5_000), (1, 2, 4, 3), (1, 123, 5_025), (0, 96), (0, 10**4, 10**7)
    ):
        ranges = chunk_ranges(
            rows, gathered=gathered, vocab=vocab, exchanged=exchanged, logits_bytes=logits_bytes, element_bytes=2
        )
        assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
        for start, stop in ranges:
            tokens = (stop - start) * gathered
            assert tokens <= 64 or tokens * (vocab + exchanged) * 2 <= logits_bytes
            assert stop == rows or tokens % 64 == 0 or gathered == 3  # 64 is not divisible by 3 ranks


def test_the_reference_is_cross_entropy_of_the_logits():
    x, weight, target = inputs(50, 16, 123)
    for smoothing in (0.0, 0.1):
        expected = F.cross_entropy(x @ weight.t(), target, label_smoothing=smoothing)
        torch.testing.assert_close(reference_linear_cross_entropy(x, weight, target, smoothing), expected)
    logits = 3.0 * torch.tanh(x @ weight.t() / 3.0)
    expected = F.cross_entropy(logits, target, reduction="sum")
    expected = expected + 0.1 * (logits.logsumexp(-1).square() * (target != -100)).sum()
    found = reference_linear_cross_entropy(x, weight, target, reduction="sum", softcap=3.0, z_loss_weight=0.1)
    torch.testing.assert_close(found, expected)
