"""AdamW's one-pass step against torch's in float64 and, for its states' format, torch's own."""

from __future__ import annotations

import copy

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.optimizer import AdamW

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]
SHAPES = [(16,), (3, 37), (), (70000, 3), (1024, 512), (65535,), (32,), (65536,), (65537,), (7,), (48, 3)]


def parameters(dtype):
    torch.manual_seed(0)
    return [torch.randn(shape, device=backend.device).to(dtype).requires_grad_() for shape in SHAPES]


def groups(params):
    return [{"params": params[:2]}, {"params": params[2:], "lr": 1e-3, "weight_decay": 0.3}]


def each_alone(params):
    return [{"params": [param]} for param in params]


def set_gradients(step, *models):
    torch.manual_seed(step)
    for tensors in zip(*models, strict=True):
        grad = torch.randn(tensors[0].shape, device=backend.device).to(tensors[0].dtype)
        for tensor in tensors:
            tensor.grad = grad.to(tensor.dtype)


@pytest.mark.parametrize("groups", [groups, each_alone])
def test_fp32_equals_float64(groups):
    ours, exact = parameters(torch.float32), [p.detach().double().requires_grad_() for p in parameters(torch.float32)]
    optimizers = AdamW(groups(ours), lr=1e-2), torch.optim.AdamW(groups(exact), lr=1e-2)
    for step in range(5):
        set_gradients(step, ours, exact)
        if step == 2:
            ours[1].grad = exact[1].grad = None
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-7)


def test_bf16_equals_torchs_fused_step_and_takes_its_states():
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    a, b = AdamW(groups(ours), lr=1e-2), torch.optim.AdamW(groups(theirs), lr=1e-2, fused=True)
    for step in range(4):
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
        if step == 1:
            a.load_state_dict(copy.deepcopy(b.state_dict()) | {"param_groups": a.state_dict()["param_groups"]})
            assert a.state_dict()["state"][0]["step"].device.type == "cpu"
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-7, atol=1e-3)  # an update may round to the neighbour


def test_tensors_that_are_not_contiguous_are_torchs():
    """Gradients that the closure makes, and moments of another layout from a checkpoint."""
    ours, theirs = ([torch.ones(2, 3, 4, 4, device=backend.device).requires_grad_()] for _ in range(2))
    optimizers = AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(3):
        grad = torch.randn(4, 4, 3, 2, device=backend.device).permute(3, 2, 0, 1)
        grad = grad if step < 2 else grad.contiguous()  # then the moments alone are not
        for (param,), optimizer in zip((ours, theirs), optimizers, strict=True):

            def closure(param=param, grad=grad):
                param.grad = grad

            param.grad = None
            optimizer.step(closure)
            if step == 1:
                for name in ("exp_avg", "exp_avg_sq"):
                    moment = optimizer.state[param][name]
                    optimizer.state[param][name] = moment.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(*ours, *theirs, rtol=2e-6, atol=2e-7)


def test_a_step_counts_as_a_write():
    (param,) = parameters(torch.float32)[:1]
    optimizer, x = AdamW([param], lr=0.1), torch.ones_like(param, requires_grad=True)
    y = (x * param).sum()
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
