"""Tests kernels on tensors of more than 2^31 elements: rows beyond it equal the same rows alone, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.activation import activation, gated_activation
from nxd_memopt.ops.norm import add_rms_norm, rms_norm
from nxd_memopt.ops.residual import add_residual
from nxd_memopt.ops.rope import apply_rope, rope_frequencies, rope_tables
from nxd_memopt.ops.sums import column_sums

HIDDEN = 4096
ROWS = 2**31 // HIDDEN + 1000
ENDS = (slice(0, 64), slice(ROWS - 64, ROWS))
BYTES = 40 << 30

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
    pytest.mark.skipif(
        backend.name == "cuda" and torch.cuda.mem_get_info()[0] < BYTES,
        reason="needs 40 GiB of free device memory",
    ),
]


def rows() -> Tensor:
    return torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16, device=backend.device)


def vector() -> Tensor:
    return torch.randn(HIDDEN, dtype=torch.bfloat16, device=backend.device)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda weight, x: rms_norm(x, weight, 1e-5), 1),
        (lambda weight, x, added: add_rms_norm(x, added, weight, 1e-5)[0], 2),
        (lambda bias, x, added: add_residual(x, added, bias), 2),
        (lambda _, gate, up: gated_activation(gate, up, "silu"), 2),
        (lambda _, gate, up: gated_activation(gate, up, "gelu_new"), 2),
        (lambda _, x: activation("gelu")(x), 1),
    ],
    ids=["rms_norm", "add_rms_norm", "add_residual", "swiglu", "geglu", "gelu"],
)
def test_first_and_last_rows_and_their_gradients(function: Callable[..., Tensor], count: int):
    function = partial(function, vector())
    inputs = [rows().requires_grad_() for _ in range(count)]
    found = function(*inputs)
    upstream = rows()
    grads = torch.autograd.grad(found, inputs, upstream)
    for end in ENDS:
        alone = [each.detach()[end].clone().requires_grad_() for each in inputs]
        expected = function(*alone)
        wanted = torch.autograd.grad(expected, alone, upstream[end])
        assert torch.equal(found[end], expected)
        for a, b in zip(grads, wanted, strict=True):
            assert torch.equal(a[end], b)


def test_column_sums():
    x = rows()
    wanted = sum(part.double().sum(0) for part in x.split(ROWS // 64))
    found = column_sums(x)
    assert (found.double() - wanted).norm() / wanted.norm() < 6e-3


def test_rope():
    head_dim = 128
    frequencies = rope_frequencies(head_dim, {"rope_theta": 5e5})
    positions = torch.arange(ROWS, device=backend.device).unsqueeze(0)

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        heads = x.view(-1, 1, HIDDEN // head_dim, head_dim).permute(1, 2, 0, 3)
        tables = rope_tables(frequencies, positions, torch.bfloat16)
        return apply_rope(heads, *tables).permute(2, 0, 1, 3).reshape(-1, HIDDEN)

    x, upstream = rows().requires_grad_(), rows()
    found = rotated(x, positions)
    grad = torch.autograd.grad(found, x, upstream)[0]
    for end in ENDS:
        alone = x.detach()[end].clone().requires_grad_()
        expected = rotated(alone, positions[:, end])
        assert torch.equal(found[end], expected)
        assert torch.equal(grad[end], torch.autograd.grad(expected, alone, upstream[end])[0])
