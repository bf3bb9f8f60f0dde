"""The library is right with torch_xla's functionalization on and off: losses, gradients, ZeRO-1, fused projections."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.backends import BACKEND_REASON, backend
from nxd_memopt.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_memopt.ops.parts import split_sizes
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.selftest.golden import recorded_losses, train
from tests.dist.pool import SEED, distributed
from tests.reference import tensors
from tests.reference_models import DENSE, batch, gpt_neox_config, parallel_model
from tests.xla.functionalization import MODES, VARIABLE, functionalization
from tests.xla.test_backend import run_python

BOUND = 1e-5  # fp32 sums in another order

IMPORT_LATE = f"""
import warnings, torch_xla
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import nxd_memopt.backends
    import os
print([str(w.message) for w in caught if "functionalization" in str(w.message)], os.environ[{VARIABLE!r}])
"""


def test_it_is_on_unless_the_user_chose_and_a_late_import_is_warned_about(monkeypatch):
    assert f"{VARIABLE}={os.environ[VARIABLE]}" in BACKEND_REASON
    monkeypatch.delenv(VARIABLE)
    *_, line = run_python(IMPORT_LATE).stdout.splitlines()
    assert line.count("torch_xla was imported before nxd_memopt") == 1 and line.endswith("] 0")
    *_, line = run_python(IMPORT_LATE, **{VARIABLE: "1"}).stdout.splitlines()
    assert line == "[] 1"


@distributed(1)
@MODES
def test_parts_of_any_dimension(enabled):
    x = torch.randn(4, 6, 8)
    with functionalization(enabled=enabled):
        for dim in (0, 1, 2, -1):
            sizes = [1, x.size(dim) - 3, 2]
            leaf = x.to(backend.device).requires_grad_()
            parts = split_sizes(leaf, sizes, dim)
            torch.autograd.backward([part.square() for part in parts], [torch.ones_like(part) for part in parts])
            assert all(torch.equal(a.cpu(), b) for a, b in zip(parts, x.split(sizes, dim), strict=True))
            assert torch.equal(leaf.grad.cpu(), 2 * x)


@distributed(2, slow=[1], timeout_s=400)
@pytest.mark.parametrize("name", DENSE)
def test_golden_losses_without_it(name):
    with functionalization(enabled=False):
        parallel_state.initialize_model_parallel(dist.get_world_size())
        losses = train(name, sequence_parallel=dist.get_world_size() > 1)
    assert losses == pytest.approx(recorded_losses(name), abs=BOUND)


@distributed(2, timeout_s=400)
@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_zero1_step_without_learning_rate_changes_no_parameter(dtype, enabled):
    with functionalization(enabled=enabled):
        parallel_state.initialize_model_parallel(1)
        torch.manual_seed(SEED)
        model = parallel_model(gpt_neox_config()).to(dtype).to(backend.device)
        before = [param.detach().cpu().clone() for param in model.parameters()]
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.0, weight_decay=0.0)
        for _ in range(2):
            model(**{key: tensor.to(backend.device) for key, tensor in batch().items()}).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            backend.mark_step()
        after = [param.detach().cpu() for param in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@distributed(2)
@MODES
@pytest.mark.parametrize("multiplier", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fused_projection_equals_separate_ones(multiplier, enabled):
    def run(*, fuse_qkv: bool) -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        layer = GQAQKVColumnParallelLinear(
            5, [24, 8], gather_output=False, kv_size_multiplier=multiplier, fuse_qkv=fuse_qkv
        ).to(backend.device)
        x = tensors(4, 3, 5, seed=1).float().to(backend.device).requires_grad_()
        outputs = layer(x)
        sum(output.square().sum() for output in outputs).backward()
        return [tensor.detach().cpu() for tensor in (*outputs, x.grad)]

    with functionalization(enabled=enabled):
        parallel_state.initialize_model_parallel(2)
        for fused, separate in zip(run(fuse_qkv=True), run(fuse_qkv=False), strict=True):
            torch.testing.assert_close(fused, separate, rtol=1e-5, atol=1e-6)  # fp32 sums in another order
