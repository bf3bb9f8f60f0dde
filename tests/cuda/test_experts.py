"""The Triton kernels of experts on a GPU: output and every gradient against float64 on any routing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.modules.moe.assignment import Assignment, assign
from nxd_memopt.modules.moe.capacity import queue_positions
from nxd_memopt.modules.moe.dispatcher import Dispatcher
from nxd_memopt.modules.moe.experts import Experts
from nxd_memopt.ops.cuda import experts as kernels

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]

# Two roundings of the tensors' dtype in a row, of an activation and a sum: 8 and 11 bits.
BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
# tokens, H, E, F, k
SIZES = {
    "full tiles": (512, 128, 4, 256, 2),
    "odd": (203, 136, 5, 72, 3),
    "one choice": (77, 64, 3, 40, 1),
    "many experts": (300, 64, 96, 32, 8),
    # Both projections are wide enough for a copy of the rows, and tokens for three parts of a copy.
    "copied rows": (150, 600, 3, 8216, 2),
}


def random_choice(tokens: int, num_experts: int, top_k: int) -> Tensor:
    return torch.rand(tokens, num_experts, device=backend.device).topk(top_k).indices


def one_expert(tokens: int, num_experts: int, top_k: int) -> Tensor:
    return torch.full((tokens, top_k), num_experts - 2, device=backend.device)


def first_and_last(tokens: int, num_experts: int, top_k: int) -> Tensor:
    every_other = torch.arange(tokens * top_k, device=backend.device).view(tokens, top_k) % 2
    return every_other * (num_experts - 1)


def experts_of(num_experts: int, hidden: int, width: int, dtype: torch.dtype, act: str = "silu") -> Experts:
    def initialize(weight: Tensor) -> Tensor:
        return torch.nn.init.normal_(weight, std=hidden**-0.5)

    return Experts(
        num_experts,
        hidden,
        width,
        act,
        init_method=initialize,
        use_cpu_initialization=False,
        dtype=dtype,
        device=backend.device,
    )


def definition(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, takes: Tensor, act) -> Tensor:
    """Each token's sum over its choices, expert by expert; choices that are not taken add nothing."""
    output = torch.zeros_like(x)
    for expert in range(gate_up.size(0)):
        outputs = act(x @ gate_up[expert].t()) @ down[expert].t()
        output = output + outputs * (weights * (takes & (chosen == expert))).sum(1, keepdim=True)
    return output


def swiglu(projected: Tensor) -> Tensor:
    gate, up = projected.chunk(2, -1)
    return F.silu(gate) * up


def geglu(projected: Tensor) -> Tensor:
    gate, up = projected.chunk(2, -1)
    return F.gelu(gate) * up


def check(tokens, hidden, num_experts, width, chosen, dtype, *, capacity=None, act="silu"):
    experts = experts_of(num_experts, hidden, width, dtype, act)
    gate_up, down = experts.gate_up_proj, experts.down_proj
    top_k = chosen.size(1)
    x = torch.randn(tokens, hidden, device=backend.device, dtype=dtype).requires_grad_()
    weights = torch.rand(tokens, top_k, device=backend.device).requires_grad_()
    assert kernels.can_use_kernels(x, gate_up, down, act)
    positions = takes = None
    if capacity is not None:
        positions = queue_positions(weights, chosen, num_experts, "position", capacity)
        takes = positions < capacity
    found = Dispatcher(num_experts, "alltoall", capacity, False).run(x, weights, chosen, positions, experts)
    leaves = (x, weights, gate_up, down)
    upstream = torch.randn_like(found)
    grads = torch.autograd.grad(found, leaves, upstream)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    if takes is None:
        takes = torch.ones_like(chosen, dtype=torch.bool)
    expected = definition(*exact, chosen, takes, swiglu if act == "silu" else geglu)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for a, b, leaf in zip((found, *grads), (expected, *wanted), (x, *leaves), strict=True):
        assert a.shape == b.shape and a.dtype == leaf.dtype
        assert (a.double() - b).norm() / b.norm() < BOUNDS[dtype]
    # An expert without rows has a gradient of exactly zero.
    unused = torch.bincount(chosen[takes], minlength=num_experts) == 0
    assert not grads[2][unused].any() and not grads[3][unused].any()
    return found, grads


@pytest.fixture
def poisoned_memory(monkeypatch):
    """NaN in all memory that is not initialized."""
    empty = torch.empty

    def poisoned(*args, **options):
        tensor = empty(*args, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-(2**30))

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("route", [random_choice, one_expert, first_and_last])
@pytest.mark.parametrize("shape", SIZES)
def test_output_and_gradients(shape, route, dtype, poisoned_memory):
    tokens, hidden, num_experts, width, top_k = SIZES[shape]
    check(tokens, hidden, num_experts, width, route(tokens, num_experts, top_k), dtype)


def test_geglu():
    check(130, 64, 4, 48, random_choice(130, 4, 2), torch.bfloat16, act="gelu")


@pytest.mark.parametrize("capacity", [1, 40])
def test_dropped_choices(capacity, poisoned_memory):
    check(203, 64, 4, 48, random_choice(203, 4, 2), torch.bfloat16, capacity=capacity)


def test_rows_of_no_expert_are_not_read(poisoned_memory):
    """The rows after the last expert's end: outputs are sums without them, gradients are finite."""
    experts = experts_of(4, 64, 48, torch.bfloat16)
    chosen = random_choice(100, 4, 2)
    x = torch.randn(100, 64, device=backend.device, dtype=torch.bfloat16).requires_grad_()
    weights = torch.rand(100, 2, device=backend.device).requires_grad_()
    everything = assign(chosen, None, 4, None)
    assert everything.offsets is not None
    offsets = everything.offsets.clamp(max=int(everything.offsets[2]))  # the last expert's are cut off
    arguments = (everything.choices, offsets, experts.gate_up_proj, experts.down_proj, "silu")
    found = kernels.routed_experts(x, weights, *arguments)
    leaves = (x, weights, experts.gate_up_proj, experts.down_proj)
    upstream = torch.randn_like(found)
    grads = torch.autograd.grad(found, leaves, upstream)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = definition(*exact, chosen, chosen != 3, swiglu)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for a, b in zip((found, *grads), (expected, *wanted), strict=True):
        assert (a.double() - b).norm() / b.norm() < BOUNDS[torch.bfloat16]


def test_the_host_reads_nothing():
    experts = experts_of(4, 64, 48, torch.bfloat16)
    x = torch.randn(100, 64, device=backend.device, dtype=torch.bfloat16).requires_grad_()
    weights = torch.rand(100, 2, device=backend.device).requires_grad_()
    chosen = random_choice(100, 4, 2)
    dispatcher = Dispatcher(4, "alltoall", None, False)
    dispatcher.run(x, weights, chosen, None, experts).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        dispatcher.run(x, weights, chosen, None, experts).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_has_one_backward():
    experts = experts_of(4, 64, 48, torch.bfloat16)
    x = torch.randn(10, 64, device=backend.device, dtype=torch.bfloat16).requires_grad_()
    weights = torch.rand(10, 2, device=backend.device).requires_grad_()
    output = Dispatcher(4, "alltoall", None, False).run(x, weights, random_choice(10, 4, 2), None, experts).sum()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="allows one backward"):
        output.backward()


def test_equal_on_every_run():
    """No sum depends on the order in which programs end."""
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        found, grads = check(300, 64, 6, 48, random_choice(300, 6, 3), torch.bfloat16)
        results.append((found, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_rank_without_rows():
    experts = experts_of(4, 64, 48, torch.bfloat16)
    x = torch.randn(10, 64, device=backend.device, dtype=torch.bfloat16).requires_grad_()
    weights = torch.rand(10, 2, device=backend.device).requires_grad_()
    nothing = torch.zeros(4, dtype=torch.int64, device=backend.device)
    output = experts.routed(x, weights, Assignment(nothing[:0], None, nothing))
    grads = torch.autograd.grad(output.sum(), (x, weights, experts.gate_up_proj, experts.down_proj))
    assert output.shape == x.shape and not any(tensor.any() for tensor in (output, *grads))
