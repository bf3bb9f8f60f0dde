"""Tests optimizer states in host memory on a GPU: equal to resident states bit by bit, over several steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer, OffloadedZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]
SHAPES = ((1000, 513), (77,), (3, 5, 7), (4096, 300), (1,))
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator(backend.device).manual_seed(5)
    shapes = {"generator": generator, "device": backend.device}
    return [nn.Parameter(torch.randn(shape, **shapes).to(dtype)) for shape in SHAPES]


def train(optimizer: NeuronZero1Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    for step in range(7):
        generator = torch.Generator(backend.device).manual_seed(step)
        for param in params:
            gradient = torch.randn(param.shape, generator=generator, device=backend.device)
            param.grad = gradient.to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()
    stored = optimizer.stored_parameters()
    states = [optimizer.base_optimizer.state[each.stored] for each in stored]
    tensors = [*params, *(each.stored for each in stored)]
    tensors += [state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")]
    return [tensor.detach().cpu().clone() for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("slots", [2, 1000])
def test_states_on_the_host_equal_resident_ones(dtype: torch.dtype, fraction: float, slots: int) -> None:
    parallel_state.initialize_model_parallel()
    chunk = 100_000
    resident, offloaded = parameters(dtype), parameters(dtype)
    expected = train(NeuronZero1Optimizer(resident, AdamW, optimizer_dtype=torch.float32, **OPTIONS), resident)
    optimizer = OffloadedZero1Optimizer(
        offloaded,
        optimizer_offload_fraction=fraction,
        staging_bytes=slots * 12 * chunk,
        chunk_elements=chunk,
        resident_elements=1,
        **OPTIONS,
    )
    torch.testing.assert_close(train(optimizer, offloaded), expected, rtol=0, atol=0)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_remainders_are_the_masters_of_resident_states(fraction: float) -> None:
    """But at ties that round down, about one of 131,072 updates, a master loses its last bit."""
    parallel_state.initialize_model_parallel()
    resident, offloaded = parameters(torch.bfloat16), parameters(torch.bfloat16)
    reference = NeuronZero1Optimizer(resident, AdamW, optimizer_dtype=torch.float32, **OPTIONS)
    train(reference, resident)
    chunk = 100_000
    optimizer = OffloadedZero1Optimizer(
        offloaded,
        optimizer_offload_fraction=fraction,
        staging_bytes=3 * 10 * chunk,
        chunk_elements=chunk,
        resident_elements=1,
        store_param_remainders=True,
        **OPTIONS,
    )
    train(optimizer, offloaded)
    expected, actual = reference.state_dict(), optimizer.state_dict()
    differing = 0
    for index, master in expected["sharded_master_weights"].items():
        found = actual["sharded_master_weights"][index].to(master.device)
        differing += int((found != master).sum())
        torch.testing.assert_close(found, master, rtol=1e-6, atol=1e-9)
        for name in ("exp_avg", "exp_avg_sq"):
            moment = expected["state"][index][name]
            torch.testing.assert_close(actual["state"][index][name].to(moment.device), moment, rtol=0, atol=0)
    assert differing < 500
    torch.testing.assert_close(
        [param.detach().float() for param in offloaded],
        [param.detach().float() for param in resident],
        rtol=1e-2,
        atol=0,
    )


def test_a_dropped_optimizer_leaves_the_device_usable() -> None:
    parallel_state.initialize_model_parallel()
    params = [nn.Parameter(torch.randn(4096, 16384, device=backend.device, dtype=torch.bfloat16)) for _ in range(4)]
    optimizer = OffloadedZero1Optimizer(params, staging_bytes=1 << 30, chunk_elements=1 << 22, **OPTIONS)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    # Chunks of the next step are on their way.
    del optimizer
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert torch.zeros(1, device=backend.device).item() == 0
