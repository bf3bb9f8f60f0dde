"""The graph of an update: the same for every step and learning rate, with the results of torch's AdamW in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla.debug.metrics as metrics
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.optimizer import AdamW_FP32OptimParams, NeuronZero1Optimizer

BETAS = (0.9, 0.95)
# sqrt(1 - beta2 ** step) is 1 in fp32 from step 325 on, 1 - beta1 ** step from step 158 on, and a learning rate of 0
# makes a decay of 1: torch_xla writes numbers that are 0 or 1 into the graph.
STEPS = ((1, 0.1), (2, 0.2), (3, 0.05), (400, 0.1), (401, 0.0), (20_000, 0.1))


def trained(optimizer: Any, states: Any, params: list[nn.Parameter]) -> list[int]:
    """Run the updates of ``STEPS``; return what each has compiled."""
    compiled = []
    for step, lr in STEPS:
        for group in optimizer.param_groups:
            group["lr"] = lr
        for state in states.values():
            if "step" in state:
                state["step"] = state["step"] * 0 + step - 1  # a number, or torch's tensor on the host
        for number, param in enumerate(params):
            grad = torch.linspace(-1, 1, param.numel(), dtype=torch.float64).view(param.shape) * (number + 1)
            param.grad = (grad * lr + 0.3).to(param)
        backend.mark_step()
        before = (metrics.metric_data("CompileTime") or [0])[0]
        optimizer.step()
        backend.mark_step()
        compiled.append((metrics.metric_data("CompileTime") or [0])[0] - before)
    return compiled


def parameters(device: torch.device | str, dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype, device=device) * 0.5) for shape in ((3, 5), (7,))]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW_FP32OptimParams])
def test_no_step_and_no_learning_rate_compiles_another_graph(kind):
    params = parameters(backend.device, torch.float32)
    optimizer = NeuronZero1Optimizer(params, kind, lr=0.1, betas=BETAS, weight_decay=0.1, grad_clipping=False)
    _, second, *later = trained(optimizer, optimizer.base_optimizer.state, params)
    assert second <= 1 and later == [0] * len(later)  # the first makes the states
    if kind is torch.optim.AdamW:
        wanted = parameters("cpu", torch.float64)
        reference = torch.optim.AdamW(wanted, lr=0.1, betas=BETAS, weight_decay=0.1)
        trained(reference, reference.state, wanted)
        for param, want in zip(params, wanted, strict=True):
            torch.testing.assert_close(param.detach().cpu().double(), want.detach(), rtol=1e-5, atol=1e-6)  # fp32
