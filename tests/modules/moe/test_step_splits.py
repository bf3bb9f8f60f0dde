"""Outputs, losses and gradients of a step in float64 are those of one micro-batch on one rank, if defined so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nxd_memopt.modules.moe import MoELayer, RouterStatistics, empty_rows
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers import parallel_state
from tests.dist.pool import distributed
from tests.modules.moe.definitions import Options, Weights, losses, moe_forward
from tests.modules.moe.test_moe_layer import (
    EXPERTS,
    HIDDEN,
    LENGTH,
    TOLERANCE,
    WIDTH,
    build,
    reduced_gradients,
    sharded,
    sum_over,
)
from tests.reference import relative_error, tensors

ROWS = 8
CASES: dict[str, tuple[dict[str, Any], Options]] = {
    "dropless": ({}, Options()),
    "blocks": ({"moe_expert_block_size": 4}, Options()),
    "sequence loss": (
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.7},
        Options(loss="seq", coeff=0.7),
    ),
    "global loss": (
        {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.7},
        Options(loss="global", coeff=0.7),
    ),
    "z-loss": ({"moe_z_loss_coeff": 0.3}, Options(z_coeff=0.3)),
}


def full_step(options: Options) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Outputs [S, B, H], loss of the router and gradients of the weights, of all rows in one micro-batch."""
    leaves = Weights.random(EXPERTS, HIDDEN, WIDTH).leaves()
    x, upstream = tensors(LENGTH, ROWS, HIDDEN, seed=1), tensors(LENGTH, ROWS, HIDDEN, seed=2)
    result = moe_forward(x, leaves, options)
    auxiliary = losses([result.logits], options)
    ((result.outputs * upstream).sum() / ROWS + auxiliary).backward()
    grads = tuple(each.grad for each in (leaves.router, leaves.gate, leaves.up, leaves.down))
    return result.outputs.detach(), auxiliary.detach(), grads


def means_of_the_step(layer: MoELayer, parts: tuple[Tensor, ...]) -> Tensor:
    """f_e over all micro-batches of all ranks, and the tokens of one."""
    with torch.no_grad():
        counts = sum(
            RouterStatistics(layer(part, empty_rows(EXPERTS, part.device))[1]).tokens_per_expert[0] for part in parts
        )
    assert isinstance(counts, Tensor)
    fractions = sum_over(counts, parallel_state.get_data_parallel_group()) / (LENGTH * ROWS)
    return torch.cat([fractions, fractions.new_tensor([len(parts[0]) * LENGTH])])


def check(name: str, expert: int, accumulation: int, dispatcher: str) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, expert_model_parallel_size=expert)
    moe_options, options = CASES[name]
    moe = MoEConfig(EXPERTS, **{**moe_options, "moe_token_dispatcher_type": dispatcher})
    layer = build(moe, Weights.random(EXPERTS, HIDDEN, WIDTH), sequence_parallel=False)
    size, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    inputs = [tensors(LENGTH, ROWS, HIDDEN, seed=seed).transpose(0, 1).chunk(size)[rank] for seed in (1, 2)]
    parts, upstreams = (each.contiguous().chunk(accumulation) for each in inputs)
    if options.loss == "global":
        layer.step_means = means_of_the_step(layer, parts)
    outputs = []
    total = torch.zeros((), dtype=torch.float64)
    for part, upstream in zip(parts, upstreams, strict=True):
        output, rows = layer(part, empty_rows(EXPERTS, part.device))
        router_loss = RouterStatistics(rows).loss(moe)
        (((output * upstream).sum() / len(part) + router_loss) / accumulation).backward()
        outputs.append(output.detach())
        total += router_loss.detach() / accumulation
    want_outputs, want_loss, want_grads = full_step(options)
    assert relative_error(torch.cat(outputs), want_outputs.transpose(0, 1).chunk(size)[rank]) < TOLERANCE
    total = sum_over(total, parallel_state.get_data_parallel_group()) / size
    assert torch.allclose(total, want_loss, rtol=TOLERANCE, atol=TOLERANCE)
    found = reduced_gradients(layer, sequence_parallel=False)
    for what, mine, want in zip(("router", "gate and up", "down"), found, sharded(want_grads), strict=True):
        assert relative_error(mine, want) < TOLERANCE, f"gradient of {what}"


# EP, accumulation, dispatcher
SPLITS = {
    1: [(1, 2, "allgather"), (1, 8, "allgather")],
    2: [(1, 1, "allgather"), (2, 2, "allgather"), (2, 4, "alltoall")],
    4: [(1, 2, "allgather"), (2, 2, "alltoall"), (4, 1, "allgather")],
}


@distributed(world_size=[1, 2], slow=[4])
@pytest.mark.parametrize("name", CASES)
def test_no_split_changes_the_step(name, world_size):
    for expert, accumulation, dispatcher in SPLITS[world_size]:
        if name == "blocks" and expert > 1 and dispatcher == "alltoall":
            continue  # refused
        try:
            check(name, expert, accumulation, dispatcher)
        except AssertionError as error:
            error.add_note(f"EP={expert} accumulation={accumulation} {dispatcher}")
            raise
