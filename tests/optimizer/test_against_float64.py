"""Every AdamW on every place of its states against a float64 one, within a bound derived for each element."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer, OptimizerInBackward
from nxd_memopt.optimizer.offloaded_zero1 import OffloadedZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from tests.deferred_transfers import DeferredTransfers
from tests.reference_adamw import ROUNDING, Float64AdamW

SHAPES = ((7, 13), (5,), (11, 3), (1,), (64, 2), (), (129,))
UNUSED = 6  # never has a gradient, and decays
RATES = (0.05, 0.05, 0.0, 0.02, 1e-3, 0.1, 0.0, 0.03)
BETAS, EPS = (0.9, 0.95), 1e-8
CHUNK = 32


@pytest.fixture(autouse=True)
def one_rank() -> None:
    parallel_state.initialize_model_parallel()


def gradient(step: int, micro_batch: int, index: int, *, dtype: torch.dtype, scale: float) -> Tensor | None:
    """None for the parameter without gradients, and for another one in some steps."""
    if index == UNUSED or (index == 2 and step % 3 == 1):
        return None
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + index)
    return (torch.randn(SHAPES[index], generator=generator) * scale).to(dtype)


def in_backward(groups: Any, *, max_norm: float, **options: Any) -> OptimizerInBackward:
    assert math.isinf(max_norm)
    return OptimizerInBackward(AdamW(groups, **options))


def resident(groups: Any, *, max_norm: float, **options: Any) -> NeuronZero1Optimizer:
    clipping = {"grad_clipping": math.isfinite(max_norm), "max_norm": max_norm}
    return NeuronZero1Optimizer(groups, AdamW, use_grad_acc_hook=True, fused=True, **clipping, **options)


def offloaded(groups: Any, *, max_norm: float, fraction: float, **options: Any) -> NeuronZero1Optimizer:
    places = {"transfers": DeferredTransfers(), "chunk_elements": CHUNK, "staging_bytes": 3 * 12 * CHUNK}
    clipping = {"grad_clipping": math.isfinite(max_norm), "max_norm": max_norm, "use_grad_acc_hook": True}
    return OffloadedZero1Optimizer(
        groups, optimizer_offload_fraction=fraction, resident_elements=1, **places, **clipping, **options
    )


def states(optimizer: Any, params: list[nn.Parameter]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Fp32 weight and moments of each parameter."""
    if isinstance(optimizer, OptimizerInBackward):
        return [(param, optimizer.optimizer.state[param]) for param in params]
    stored = {id(each.param): each.stored for each in optimizer.stored_parameters()}
    return [(stored[id(param)], optimizer.base_optimizer.state[stored[id(param)]]) for param in params]


@pytest.mark.parametrize(("max_norm", "scale"), [(0.5, 1.0), (1e9, 1e-12), (math.inf, 1e6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fraction", [None, 0.25, 1.0])
def test_master_weights(fraction: float | None, dtype: torch.dtype, max_norm: float, scale: float) -> None:
    options: dict[str, Any] = {} if fraction is None else {"fraction": fraction}
    make = resident if fraction is None else offloaded
    check(make, dtype, max_norm=max_norm, scale=scale, micro_batches=3, **options)


def test_in_backward() -> None:
    check(in_backward, torch.float32, max_norm=math.inf, scale=1.0, micro_batches=1)


def check(make: Any, dtype: torch.dtype, *, max_norm: float, scale: float, micro_batches: int, **options: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    decays = [0.1 if param.dim() > 1 else 0.0 for param in params]
    groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = make(groups, max_norm=max_norm, betas=BETAS, eps=EPS, lr=1.0, **options)
    reference = Float64AdamW(params, weight_decay=decays, betas=BETAS, eps=EPS, max_norm=max_norm)
    trained = [index for index in range(len(params)) if make is not in_backward or index not in (2, UNUSED)]
    for step, lr in enumerate(RATES):
        for group in optimizer.param_groups:
            group["lr"] = lr
        sums: list[Any] = [None] * len(params)
        sizes: list[Any] = [0.0] * len(params)
        for micro_batch in range(micro_batches):
            for index, param in enumerate(params):
                grad = gradient(step, micro_batch, index, dtype=dtype, scale=scale)
                if grad is not None and index in trained:
                    (param * grad).sum().backward()
                    sums[index] = grad.double() + (0 if sums[index] is None else sums[index])
                    sizes[index] = grad.double().abs() + sizes[index]
        # Micro-batches are added in fp32, also the gradients of bf16 parameters.
        norm = reference.step(sums, lr, errors=[micro_batches * ROUNDING * size for size in sizes])
        optimizer.step()
        optimizer.zero_grad()
        if make is not in_backward:
            assert optimizer.grad_norm.item() == pytest.approx(norm, rel=16 * ROUNDING)  # as in Float64AdamW
    found = states(optimizer, params)
    for index in trained:
        master, moments = found[index]
        assert moments["step"] == len(RATES)
        values = {"mean": moments["exp_avg"], "square": moments["exp_avg_sq"]}
        reference.require(index, weight=master, **values, what=f"parameter {index}")
        assert torch.equal(params[index], master.to(dtype).view(params[index].shape))
