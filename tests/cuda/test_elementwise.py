"""The Triton kernels of norms, activations and sums against float64, at odd shapes and layouts."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.modules.attention import split_heads
from nxd_memopt.ops.activation import activation, gated_activation, gated_activation_gradient
from nxd_memopt.ops.norm import add_rms_norm, affine_branches, affine_branches_gradient, head_norm, rms_norm
from nxd_memopt.ops.parts import packed_view
from nxd_memopt.ops.residual import add_residual
from nxd_memopt.ops.sums import column_sums
from tests.cuda.against_float64 import DTYPES, compare, random
from tests.reference_models import llama_config, parallel_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("shape", [(47, 6144), (4, 31, 123), (1, 1, 8), (3000, 4096), (3, 32768)], ids=str)
def test_rms_norm(shape, dtype, bound):
    weight = (1 + 0.1 * random(shape[-1], dtype=dtype)).requires_grad_()
    compare(lambda x, w: rms_norm(x, w, 1e-5), (random(*shape, dtype=dtype).requires_grad_(), weight), bound)
    apart = random(shape[-1], *shape[:-1], dtype=dtype).movedim(0, -1).requires_grad_()  # not contiguous
    compare(lambda x, w: rms_norm(x, w, 1e-5), (apart, weight), bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("shape", [(47, 6144), (4, 31, 123), (3, 32768)], ids=str)
def test_add_rms_norm(shape, dtype, bound):
    weight = (1 + 0.1 * random(shape[-1], dtype=dtype)).requires_grad_()
    x, added = (random(*shape, dtype=dtype).requires_grad_() for _ in range(2))
    for used in ((0,), (1,), (0, 1)):  # the norm alone, the sum alone, both
        both = lambda x, a, w, used=used: torch.stack([add_rms_norm(x, a, w, 1e-5)[i] for i in used])  # noqa: E731
        compare(both, (x, added, weight) if 0 in used else (x, added, weight.detach()), bound)
        one = lambda x, w, used=used: torch.stack([add_rms_norm(x, None, w, 1e-5)[i] for i in used])  # noqa: E731
        compare(one, (x, weight) if 0 in used else (x, weight.detach()), bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("sequence_first", [False, True], ids=["batch first", "sequence first"])
@pytest.mark.parametrize(("heads", "tokens", "width"), [(5, 1033, 128), (3, 1, 40), (1, 77, 64), (2, 9, 8192)])
def test_head_norm(heads, tokens, width, sequence_first, dtype, bound):
    """Heads in the middle of a projection's columns, and gradients in both orders of heads and tokens."""
    weight = (1 + 0.1 * random(width, dtype=dtype)).requires_grad_()
    columns = random(2, tokens, (heads + 2) * width, dtype=dtype).requires_grad_()

    def normed(columns, weight):
        return head_norm(split_heads(columns[..., width:-width], width, sequence_first=sequence_first), weight, 1e-5)

    compare(normed, (columns, weight), bound)
    compare(lambda *tensors: normed(*tensors).contiguous(), (columns, weight), bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new"])
@pytest.mark.parametrize("shape", [(47, 123), (3, 5, 4099)], ids=str)
def test_gated_activation(shape, name, dtype, bound):
    gate, up = (random(*shape, dtype=dtype).requires_grad_() for _ in range(2))
    compare(lambda a, b: gated_activation(a, b, name), (gate, up), bound)
    both = random(*shape[:-1], 2 * shape[-1], dtype=dtype)
    halves = [half.requires_grad_() for half in both.detach().chunk(2, dim=-1)]  # as one projection leaves them
    compare(lambda a, b: gated_activation(a, b, name), halves, bound)
    assert packed_view(torch.autograd.grad(gated_activation(*halves, name).sum(), halves), -1) is not None
    apart = [half.transpose(0, -2) for half in both.detach().chunk(2, dim=-1)]  # rows at two distances
    compare(lambda a, b: gated_activation(a, b, name), [half.requires_grad_() for half in apart], bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new"])
def test_gated_gradient_in_place(name, dtype, bound):
    both, upstream = random(47, 2 * 1100, dtype=dtype), random(47, 1100, dtype=dtype)
    exact = [half.double() for half in both.chunk(2, dim=-1)]
    wanted = gated_activation_gradient(*exact, upstream.double(), name)
    gate, up = both.chunk(2, dim=-1)
    found = gated_activation_gradient(gate, up, upstream.clone(), name)
    for a, b in zip((found, gate, up), (wanted, *exact), strict=True):
        assert (a.double() - b).norm() / b.norm() < bound


def test_the_models_mlp_keeps_no_activation():
    config = llama_config(hidden_size=64, intermediate_size=96)
    mlp = parallel_model(config).to(backend.device, torch.bfloat16).decoder_layers()[0].mlp
    assert packed_view([mlp.gate_proj.weight, mlp.up_proj.weight], 0) is not None
    x = random(5, 7, 64, dtype=torch.bfloat16).requires_grad_()
    names = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: names.append(t.shape) or t, lambda t: t):
        found = mlp(x)
    assert names.count(torch.Size([35, 96])) == 2, "gate and up, not their product"
    parameters = [x, *mlp.parameters()]
    grads = torch.autograd.grad(found, parameters, torch.ones_like(found))
    exact = [p.detach().double().requires_grad_() for p in parameters]
    by_name = dict(zip((name for name, _ in mlp.named_parameters()), exact[1:], strict=True))
    gate, up, down = (by_name[f"{name}_proj.weight"] for name in ("gate", "up", "down"))
    expected = (torch.nn.functional.silu(exact[0] @ gate.t()) * (exact[0] @ up.t())) @ down.t()
    wanted = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    for a, b in zip((found, *grads), (expected, *wanted), strict=True):
        assert (a.double() - b).norm() / b.norm() < 2e-2  # two bf16 roundings between matmuls


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("shape", [(47, 6144), (4, 31, 123), (1, 1, 7)], ids=str)
def test_add_residual(shape, dtype, bound):
    x, added, bias = (random(*size, dtype=dtype).requires_grad_() for size in (shape, shape, shape[-1:]))
    compare(add_residual, (x, added, bias), bound)
    row = [0] * (len(shape) - 1)
    compare(add_residual, (x[*row], added[*row], bias), bound)
    apart = random(shape[-1], *shape[:-1], dtype=dtype).movedim(0, -1).requires_grad_()  # not contiguous
    strided = random(2 * shape[-1], dtype=dtype)[::2].requires_grad_()
    for tensors in ((x, apart, bias.detach()), (apart, added, bias), (x, added, strided)):
        compare(add_residual, tensors, bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("shape", [(47, 6144), (3, 4099, 123), (1, 1, 7), (8192, 520), (7,)], ids=str)
def test_column_sums(shape, dtype, bound):
    both = random(*shape[:-1], 2 * shape[-1], dtype=dtype)
    for x in (*both.chunk(2, dim=-1), both[..., ::2], random(shape[-1], *shape[:-1], dtype=dtype).movedim(0, -1)):
        found, wanted = column_sums(x), x.double().reshape(-1, x.size(-1)).sum(0)
        assert found.shape == shape[-1:] and found.dtype == dtype
        assert (found.double() - wanted).norm() / wanted.norm() < bound


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("shape", [(47, 6144), (4, 31, 123), (1, 1, 7)], ids=str)
def test_gelu(name, shape, dtype, bound):
    compare(activation(name), (random(*shape, dtype=dtype).requires_grad_(),), bound)
    apart = random(shape[-1], *shape[:-1], dtype=dtype).movedim(0, -1).requires_grad_()  # not contiguous
    compare(activation(name), (apart,), bound)


@pytest.mark.parametrize(("name", "bound"), [("gelu", 5e-3), ("gelu_pytorch_tanh", 5e-5)])
def test_gelus_left_tail_keeps_its_digits(name, bound):
    """Where fp32's ``1 + erf(x)`` has none left. The polynomial's relative error grows there, as exp's does."""
    x = torch.linspace(-12, -2, 100_001, device=backend.device).requires_grad_()
    exact = x.detach().double().requires_grad_()
    if name == "gelu":
        expected = 0.5 * exact * torch.special.erfc(-exact * 0.5**0.5)
    else:
        expected = exact * torch.sigmoid((8 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3))
    found = activation(name)(x)
    slopes = [torch.autograd.grad(y.sum(), z)[0] for y, z in ((found, x), (expected, exact))]
    for a, b in ((found, expected), slopes):
        kept = b.abs() > 1e-35  # smaller ones are fp32's denormal numbers
        assert ((a.double() - b).abs() <= bound * b.abs())[kept].all()


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh"])
def test_activations_of_special_values(name):
    values = [float("inf"), 3e38, 0.0, -3e38, float("nan")]
    found = activation(name)(torch.tensor(values, device=backend.device))
    assert found[:4].tolist() == [float("inf"), torch.tensor(3e38).item(), 0.0, 0.0] and found[4].isnan()


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("shape", [(47, 6144), (5, 3, 123), (1, 1, 7), (8192, 520)], ids=str)
def test_affine_branches(shape, dtype, bound):
    x, *upstream = (random(*shape, dtype=dtype) for _ in range(3))
    gains, shifts = ([random(shape[-1], dtype=dtype) for _ in range(2)] for _ in range(2))
    found = affine_branches(x, gains, shifts)
    by_x, by_affine = affine_branches_gradient(x, upstream, gains)
    exact = [t.double().requires_grad_() for t in (x, *gains, *shifts)]
    expected = affine_branches(exact[0], exact[1:3], exact[3:])
    wanted = torch.autograd.grad(expected, exact, [u.double() for u in upstream])
    pairs = [*zip(found, expected, strict=True), (by_x, wanted[0])]
    pairs += [(by_affine[i, kind], wanted[1 + 2 * kind + i]) for i in range(2) for kind in range(2)]
    for a, b in pairs:
        assert (a.double() - b).norm() / b.norm() < bound
    assert by_x.dtype == dtype and by_affine.dtype == torch.float32
