"""Layers and functions with neuronx-distributed's arguments, next to plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from nxd_memopt.parallel_layers import parallel_state
from tests.alias_modules import import_without_alias
from tests.dist.pool import distributed

LinearWithAsyncCommunication = import_without_alias("layers").LinearWithAsyncCommunication
RMSNorm = import_without_alias("modules").RMSNorm


def test_rms_norm_has_the_other_librarys_defaults():
    x = torch.full((2, 8), 1e-3)
    found = RMSNorm((8,), elementwise_affine=True)(x)
    torch.testing.assert_close(found, x * (1e-6 + 1e-5) ** -0.5)
    for options in ({"normalized_shape": (4, 8)}, {"normalized_shape": 8, "elementwise_affine": False}):
        with pytest.raises(ValueError, match=r"normalized_shape|elementwise_affine"):
            RMSNorm(**options)


@distributed(world_size=2)
@pytest.mark.parametrize("gathers", [False, True])
def test_a_linear_function_without_a_group_has_the_tensor_parallel_one(gathers):
    parallel_state.initialize_model_parallel(2)
    rank = parallel_state.get_tensor_model_parallel_rank()
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 6), (8, 6)))
    x.requires_grad_()
    (expected,) = torch.autograd.grad(F.linear(x, weight).square().sum(), x)
    own = x.detach().chunk(2)[rank] if gathers else x.detach()
    own.requires_grad_()
    output = LinearWithAsyncCommunication.apply(
        own, weight.chunk(2)[rank], None, not gathers, gathers, 0, True, None, torch.float64
    )
    torch.testing.assert_close(output, F.linear(x, weight).chunk(2, -1)[rank])
    output.square().sum().backward()
    torch.testing.assert_close(own.grad, expected.chunk(2)[rank] if gathers else expected)
