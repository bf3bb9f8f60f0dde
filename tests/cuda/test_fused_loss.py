"""The Triton kernels behind the fused head and loss, against float64 logits, at odd shapes."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers.fused_loss.reference import reference_linear_cross_entropy
from nxd_memopt.parallel_layers.loss_functions import fused_linear_cross_entropy
from tests.parallel_layers.test_fused_loss import VARIANTS, grads_of, inputs

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]


@pytest.fixture(autouse=True)
def full_fp32_matmuls():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("logits_bytes", [0, 300_000, 10**8])
@pytest.mark.parametrize("terms", VARIANTS, ids=lambda terms: "-".join(terms) or "plain")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("shape", [(47, 6144, 123), (1100, 96, 123), (300, 96, 50257)], ids=str)
def test_equals_float64(shape, dtype, bound, reduction, terms, logits_bytes):
    """fp32 to its sums' order, which cuBLAS's workspace changes; the others to what rounding costs eager PyTorch."""
    tokens, hidden, vocab = shape
    x, weight, target = inputs(tokens, hidden, vocab)
    weight = weight.detach() * (96 / hidden) ** 0.5
    x, weight = (t.detach().to(backend.device, dtype).requires_grad_() for t in (x, weight))
    target = target.to(backend.device)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = reference_linear_cross_entropy(*exact, target, reduction=reduction, **terms)
    loss = fused_linear_cross_entropy(x, weight, target, reduction=reduction, logits_bytes=logits_bytes, **terms)
    assert relative(loss, expected) < bound
    scale = 1024.0 if dtype == torch.float16 and reduction == "mean" else 1.0  # its smallest number is 6e-8
    for found, wanted in zip(grads_of(loss * scale, x, weight), grads_of(expected * scale, *exact), strict=True):
        assert relative(found, wanted) < (bound if dtype != torch.float16 else 2e-2)


def test_a_gradient_other_than_one_scales():
    x, weight, target = inputs(47, 96, 123, torch.float32)
    x, weight = (t.detach().to(backend.device).requires_grad_() for t in (x, weight))
    once, twice = (
        torch.autograd.grad(fused_linear_cross_entropy(x, weight, target.to(backend.device)) * factor, (x, weight))
        for factor in (1.0, 2.0)
    )
    for a, b in zip(once, twice, strict=True):
        assert torch.equal(2 * a, b)


def test_a_label_outside_the_vocabulary_is_not_a_number():
    x = torch.randn(40, 16, device=backend.device, requires_grad=True)
    weight = torch.randn(30, 16, device=backend.device, requires_grad=True)
    loss = fused_linear_cross_entropy(x, weight, torch.full((40,), 30, device=backend.device))
    assert loss.isnan()
