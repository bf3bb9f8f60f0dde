"""Faults of neuronx-distributed's MoE modules: which tests show that they are not here, and tests of the others."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxd_memopt.parallel_layers import grads, parallel_state
from tests.dist.pool import distributed
from tests.modules.moe import test_nxd_moe
from tests.modules.moe.test_nxd_moe import EXPERTS, HIDDEN, Case
from tests.reference import tensors

_LAYER = "tests.modules.moe.test_nxd_moe:test_layer"
# Fault in neuronx-distributed, and the test of our modules that has it in its way.
FAULTS = {
    "expert parallelism adds the outputs of different ranks' tokens": _LAYER,
    "expert parallelism fails with the constructor's defaults, and without a gate": _LAYER,
    "expert parallelism cannot take all tokens": _LAYER,
    "expert-parallel ranks start with equal experts": (
        "tests.modules.moe.test_nxd_moe:test_expert_parallel_ranks_start_with_the_experts_of_one_rank"
    ),
    "the router's gradient is a tensor-parallel rank's part under expert parallelism": (
        f"{__name__}:test_tensor_and_expert_parallel_layers"
    ),
    "a process without experts does not reduce its gradients over expert-parallel ranks": (
        f"{__name__}:test_a_process_without_experts_averages_over_all_ranks"
    ),
    "dropless experts compute every token": f"{__name__}:test_dropless_experts_compute_their_own_tokens",
    "a capacity factor of 0 or below fails without silu and a gate": (
        f"{__name__}:test_dropless_experts_compute_their_own_tokens"
    ),
    "jitter is written into the caller's tensor": ("tests.modules.moe.test_nxd_moe:test_jitter_leaves_the_input_alone"),
    "sinkhorn_tol is ignored": "tests.modules.moe.test_nxd_moe:test_sinkhorn_balances_in_training_only",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_its_test(fault: str) -> None:
    module, name = FAULTS[fault].split(":")
    assert callable(getattr(importlib.import_module(module), name))


@distributed(world_size=4)
def test_tensor_and_expert_parallel_layers() -> None:
    """T = 2 and EP = 2: outputs, and the gradients of tokens, router and experts, in float64."""
    body: Any = test_nxd_moe.test_layer
    for layout in ("plain", "sequence"):
        body.distributed_body("dropless", layout, 4)
        parallel_state.destroy_model_parallel()


@distributed(world_size=2)
def test_a_process_without_experts_averages_over_all_ranks() -> None:
    """As that of a pipeline stage whose layers are dense."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    dense = nn.Linear(3, 2)
    for param in dense.parameters():
        param.grad = torch.full_like(param, float(dist.get_rank()))
    grads.bucket_allreduce_gradients(dense)
    assert all(torch.equal(param.grad, torch.full_like(param, 0.5)) for param in dense.parameters())


@pytest.mark.parametrize("hidden_act", ["silu", "gelu"])
@pytest.mark.parametrize("glu", [True, False])
@pytest.mark.parametrize("factor", [None, 0.0, -1.0])
def test_dropless_experts_compute_their_own_tokens(
    factor: float | None, glu: bool, hidden_act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k rows for each token, not E; the values are those of ``test_layer``'s definition."""
    experts = Case(capacity_factor=factor, glu=glu, hidden_act=hidden_act).experts()
    rows: list[int] = []
    forward = experts.mlp_op.forward

    def counted(hidden: Tensor, counts: Tensor | None = None) -> Tensor:
        rows.append(hidden.size(0))
        return forward(hidden, counts)

    monkeypatch.setattr(experts.mlp_op, "forward", counted)
    x, router = tensors(12, HIDDEN, seed=1), tensors(EXPERTS, HIDDEN, seed=2)
    affinities = (x @ router.t()).softmax(1)
    output = experts(x, affinities, affinities.topk(2, dim=1).indices, 12)
    assert rows == [12 * 2] and output.abs().amax() > 0
