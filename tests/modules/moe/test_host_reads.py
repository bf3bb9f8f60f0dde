"""What the host reads in forward and backward of a layer: at most a number of rows, and nothing in a recording.

The CPU records nothing, and has no kernels of experts: here it says that it does, and the kernels are their definition.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nxd_memopt.backends import backend
from nxd_memopt.memory.recompute import checkpoint
from nxd_memopt.modules.moe import RouterStatistics, empty_rows
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.ops.cuda import experts as kernels
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from tests.dist.pool import distributed
from tests.modules.moe.definitions import Weights
from tests.modules.moe.test_moe_layer import EXPERTS, HIDDEN, WIDTH, build, local, micro_batch, parameters
from tests.reference import relative_error

# Operators whose result, or the shape of it, waits for the device.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "item", "_unique2", "bincount"}
LOSSES = {"moe_aux_loss_coeff": 0.2, "moe_z_loss_coeff": 0.1, "moe_per_layer_logging": True}
# Options, and the reads of an eager forward.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "dropless": ({}, 0),
    "losses": (LOSSES, 0),
    "dropped choices": ({"moe_expert_capacity_factor": 0.8}, 1),
}
# Float64 sums of fewer than a hundred products, of which a recording has more rows: measured 2e-16.
TOLERANCE = 1e-14


class HostReads(TorchDispatchMode):
    """Counts operators after which the host has a value of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().split("::")[1].split(".")[0] in READS
        return func(*args, **(kwargs or {}))


def routed_by_definition(
    x: Tensor, weights: Tensor, choices: Tensor, offsets: Tensor, gate_up: Tensor, down: Tensor, hidden_act: str
) -> Tensor:
    """``ops.cuda.experts.routed_experts``: every expert computes all rows, of which it adds its own."""
    assert hidden_act == "silu"
    expert_of_row = torch.bucketize(torch.arange(choices.numel()), offsets, right=True)
    tokens = choices // weights.size(1)
    output = torch.zeros_like(x)
    for expert in range(gate_up.size(0)):
        gate, up = (x.index_select(0, tokens) @ gate_up[expert].t()).chunk(2, -1)
        outputs = (F.silu(gate) * up) @ down[expert].t() * weights.reshape(-1).index_select(0, choices).unsqueeze(1)
        output = output.index_add(0, tokens, outputs * (expert_of_row == expert).unsqueeze(1))
    return output


def results(moe: MoEConfig, *, sequence_parallel: bool, recompute: bool) -> tuple[int, list[Tensor]]:
    """Reads of forward and backward; output, statistics and gradients."""
    layer = build(moe, Weights.random(EXPERTS, HIDDEN, WIDTH), sequence_parallel=sequence_parallel)
    batch = micro_batch(parallel_state.get_data_parallel_rank())
    x, upstream = (local(each, sequence_parallel) for each in batch)
    x.requires_grad_()
    rows = empty_rows(EXPERTS, x.device)
    with HostReads() as reads:
        output, rows = checkpoint(layer, x, rows) if recompute else layer(x, rows)
        ((output * upstream).sum() + RouterStatistics(rows).loss(moe)).backward()
    grads = [parameter.grad for parameter in (x, *parameters(layer))]
    assert all(grad is not None for grad in grads)
    return reads.count, [output.detach(), rows.detach(), *grads]


@distributed(world_size=2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tensor", [1, 2])
def test_nothing_is_read_in_a_recording(tensor, name, recompute, world_size):
    parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=world_size // tensor)
    model_parallel_manual_seed(7)
    options, reads = CASES[name]
    moe = MoEConfig(EXPERTS, **options)
    if tensor == 1:
        reads = 1  # where this rank's rows end among those of all experts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "can_use_kernels", lambda *_: True)
        patch.setattr(kernels, "routed_experts", routed_by_definition)
        count, eager = results(moe, sequence_parallel=tensor > 1, recompute=recompute)
        assert count == reads * (1 + recompute)
        patch.setattr(type(backend), "is_recording", True)
        count, recorded = results(moe, sequence_parallel=tensor > 1, recompute=recompute)
    assert count == 0
    for found, expected in zip(recorded, eager, strict=True):
        assert relative_error(found, expected) < TOLERANCE


@distributed(world_size=1)
def test_a_recording_without_kernels_has_no_rest():
    """Torch's grouped matmuls leave the results of rows of no expert uninitialized."""
    parallel_state.initialize_model_parallel(1)
    model_parallel_manual_seed(7)
    moe = MoEConfig(EXPERTS, moe_expert_capacity_factor=0.8)
    _, eager = results(moe, sequence_parallel=False, recompute=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(backend), "is_recording", True)
        _, recorded = results(moe, sequence_parallel=False, recompute=False)
    assert all(torch.equal(found, expected) for found, expected in zip(recorded, eager, strict=True))
