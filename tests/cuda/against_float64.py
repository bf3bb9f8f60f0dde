"""How the Triton kernels are compared with float64."""

from __future__ import annotations

import torch

from nxd_memopt.backends import backend
from nxd_memopt.ops.cuda.support import can_use_triton

DTYPES = [(torch.float32, 2e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)]  # 24, 8 and 11 bits


def compare(function, tensors, bound):
    """Value and gradients of ``function`` in the tensors' dtype against float64."""
    assert can_use_triton(*tensors)
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    found, expected = function(*tensors), function(*exact)
    upstream = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, [t for t in exact if t.requires_grad], upstream.double())
    grads = torch.autograd.grad(found, [t for t in tensors if t.requires_grad], upstream)
    for a, b in zip((found, *grads), (expected, *wanted), strict=True):
        assert a.shape == b.shape and a.dtype == tensors[0].dtype
        assert (a.double() - b).norm() / b.norm() < bound


def random(*shape, dtype):
    return torch.randn(shape, device=backend.device, dtype=dtype)
