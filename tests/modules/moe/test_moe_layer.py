"""The layer against the definitions in float64: outputs, losses and every gradient, on every split over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nxd_memopt.config import ParallelConfig
from nxd_memopt.memory.recompute import checkpoint
from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.modules.moe import MoELayer, RouterStatistics, empty_rows
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from tests.dist.pool import distributed
from tests.modules.moe.definitions import Options, Result, Weights, losses, moe_forward
from tests.reference import relative_error, shard, tensors

EXPERTS, HIDDEN, WIDTH, LENGTH, ROWS = 4, 6, 8, 8, 3
# Sums of some hundred products in float64, in another order: measured 4e-15. A lost term is above 1e-3.
TOLERANCE = 1e-11

CASES: dict[str, tuple[dict[str, Any], Options]] = {
    "dropless": ({}, Options()),
    "softmax over all experts": ({"moe_router_pre_softmax": True}, Options(rule="pre")),
    "one expert": ({"moe_router_pre_softmax": True, "moe_router_topk": 1}, Options(rule="pre", k=1)),
    "sigmoid": ({"moe_router_score_function": "sigmoid"}, Options(rule="sigmoid")),
    "sinkhorn": ({"moe_router_load_balancing_type": "sinkhorn"}, Options(rule="sinkhorn")),
    "sinkhorn, one expert": (
        {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
        Options(rule="sinkhorn", k=1),
    ),
    "aux loss": ({"moe_aux_loss_coeff": 0.7}, Options(loss="aux", coeff=0.7)),
    "aux loss of sigmoid scores": (
        {"moe_aux_loss_coeff": 0.7, "moe_router_score_function": "sigmoid"},
        Options(rule="sigmoid", loss="aux", coeff=0.7),
    ),
    "sequence loss": (
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.7},
        Options(loss="seq", coeff=0.7),
    ),
    "global loss": (
        {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.7},
        Options(loss="global", coeff=0.7),
    ),
    "z-loss": ({"moe_z_loss_coeff": 0.3}, Options(z_coeff=0.3)),
    "capacity by weight": ({"moe_expert_capacity_factor": 0.8}, Options(factor=0.8)),
    "capacity by position": (
        {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position"},
        Options(factor=0.8, policy="position"),
    ),
    "padded": (
        {"moe_expert_capacity_factor": 1.3, "moe_pad_expert_input_to_capacity": True},
        Options(factor=1.3),
    ),
    "padded and dropped, with losses": (
        {
            "moe_expert_capacity_factor": 0.6,
            "moe_pad_expert_input_to_capacity": True,
            "moe_token_drop_policy": "position",
            "moe_aux_loss_coeff": 0.2,
            "moe_z_loss_coeff": 0.1,
        },
        Options(factor=0.6, policy="position", loss="aux", coeff=0.2, z_coeff=0.1),
    ),
    "blocks": ({"moe_expert_block_size": 4}, Options()),
    "blocks of more rows than tokens, with losses": (
        {"moe_expert_block_size": 64, "moe_aux_loss_coeff": 0.2, "moe_z_loss_coeff": 0.1},
        Options(loss="aux", coeff=0.2, z_coeff=0.1),
    ),
    "blocks of one row, one expert": (
        {"moe_expert_block_size": 1, "moe_router_pre_softmax": True, "moe_router_topk": 1},
        Options(rule="pre", k=1),
    ),
    "capacity above all tokens": ({"moe_expert_capacity_factor": 100.0}, Options()),
}


def build(moe: MoEConfig, weights: Weights, *, sequence_parallel: bool, dtype: torch.dtype = torch.float64) -> MoELayer:
    """The layer with this rank's part of ``weights``."""
    size = parallel_state.get_tensor_model_parallel_size()
    parallel = ParallelConfig(
        size,
        sequence_parallel_enabled=sequence_parallel,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_size(),
    )
    factory = LayerFactory({}, parallel, 0.3, dtype, None)
    layer = MoELayer(HIDDEN, WIDTH, "silu", moe, factory=factory)
    with torch.no_grad():
        for param, full in zip(parameters(layer), sharded(weights), strict=True):
            param.copy_(full)
    return layer


def parameters(layer: MoELayer) -> tuple[Tensor, Tensor, Tensor]:
    return layer.gate.weight, layer.experts.gate_up_proj, layer.experts.down_proj


def sharded(full: Weights | tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of router, gate and up, down: experts by expert rank, columns by tensor rank."""
    router, gate, up, down = (full.router, full.gate, full.up, full.down) if isinstance(full, Weights) else full
    tensor = {
        "size": parallel_state.get_tensor_model_parallel_size(),
        "rank": parallel_state.get_tensor_model_parallel_rank(),
    }
    expert = {
        "size": parallel_state.get_expert_model_parallel_size(),
        "rank": parallel_state.get_expert_model_parallel_rank(),
    }
    gate_up = torch.cat([shard(gate, 1, **tensor), shard(up, 1, **tensor)], 1)
    return router, shard(gate_up, 0, **expert), shard(shard(down, 2, **tensor), 0, **expert)


def micro_batch(data_rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and upstream gradients [S, B, H] of a data-parallel rank."""
    seed = 100 * seed + data_rank
    return tensors(LENGTH, ROWS, HIDDEN, seed=seed), tensors(LENGTH, ROWS, HIDDEN, seed=seed + 50)


def local(full: Tensor, sequence_parallel: bool) -> Tensor:
    """This rank's tokens of ``full`` [S, B, ...], in the layout of the layer."""
    if not sequence_parallel:
        return full.transpose(0, 1).contiguous()
    size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    return shard(full, 0, size=size, rank=rank)


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = tensor.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def reduced_gradients(layer: MoELayer, *, sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the mean loss over data-parallel ranks, by hand."""
    router, gate_up, down = (param.grad for param in parameters(layer))
    assert router is not None and gate_up is not None and down is not None
    if sequence_parallel:
        router = sum_over(router, parallel_state.get_tensor_model_parallel_group())
    router = sum_over(router, parallel_state.get_data_parallel_group())
    expert_data = parallel_state.get_expert_data_parallel_group()
    size = parallel_state.get_data_parallel_size()
    return router / size, sum_over(gate_up, expert_data) / size, sum_over(down, expert_data) / size


def expected(options: Options, weights: Weights) -> tuple[list[Result], list[Tensor], Tensor, tuple[Tensor, ...]]:
    """Results, input gradients and loss of every data-parallel rank, and the gradients of the weights."""
    leaves = weights.leaves()
    size = parallel_state.get_data_parallel_size()
    batches = [micro_batch(rank) for rank in range(size)]
    inputs = [x.requires_grad_() for x, _ in batches]
    results = [moe_forward(x, leaves, options) for x in inputs]
    auxiliary = losses([result.logits for result in results], options)
    total = auxiliary
    for result, (_, upstream) in zip(results, batches, strict=True):
        total = total + (result.outputs * upstream).sum() / size
    total.backward()
    grads = []
    for tensor in (leaves.router, leaves.gate, leaves.up, leaves.down):
        grads.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
    return results, [x.grad * size for x in inputs if x.grad is not None], auxiliary, tuple(grads)


def check(name: str, *, tensor: int, expert: int, sequence_parallel: bool, dispatcher: str, recompute: bool) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, expert_model_parallel_size=expert)
    model_parallel_manual_seed(7)
    moe_options, options = CASES[name]
    if "moe_expert_block_size" in moe_options:
        dispatcher = "allgather"  # the only one
    moe = MoEConfig(EXPERTS, **{**moe_options, "moe_token_dispatcher_type": dispatcher})
    weights = Weights.random(EXPERTS, HIDDEN, WIDTH)
    layer = build(moe, weights, sequence_parallel=sequence_parallel)
    rank = parallel_state.get_data_parallel_rank()
    x, upstream = (local(each, sequence_parallel) for each in micro_batch(rank))
    x.requires_grad_()
    before = x.detach().clone()
    rows = empty_rows(EXPERTS, x.device)
    output, rows = checkpoint(layer, x, rows) if recompute else layer(x, rows)
    statistics = RouterStatistics(rows)
    # Under sequence parallelism every rank adds the same losses, whose gradients go to its own tokens.
    ((output * upstream).sum() + statistics.loss(moe)).backward()
    results, input_grads, auxiliary, grads = expected(options, weights)
    assert torch.equal(x.detach(), before), "the input was written to"
    assert relative_error(output, local(results[rank].outputs.detach(), sequence_parallel)) < TOLERANCE
    assert x.grad is not None
    assert relative_error(x.grad, local(input_grads[rank], sequence_parallel)) < TOLERANCE, "input gradient"
    mean_loss = sum_over(statistics.loss(moe).detach(), parallel_state.get_data_parallel_group())
    assert torch.allclose(mean_loss / len(results), auxiliary.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    counts = [sum(mine.count(expert) for mine in results[rank].experts) for expert in range(EXPERTS)]
    assert statistics.tokens_per_expert[0].tolist() == counts
    found = reduced_gradients(layer, sequence_parallel=sequence_parallel)
    for what, mine, want in zip(("router", "gate and up", "down"), found, sharded(grads), strict=True):
        assert relative_error(mine, want) < TOLERANCE, f"gradient of {what}"


@distributed(world_size=1)
@pytest.mark.parametrize("name", CASES)
def test_one_rank(name):
    for recompute in (False, True):
        parallel_state.destroy_model_parallel()
        check(name, tensor=1, expert=1, sequence_parallel=False, dispatcher="alltoall", recompute=recompute)


# T, EP, sequence parallelism, dispatcher, recompute: pairwise, and every dispatcher with every EP
SPLITS = {
    2: [
        (2, 1, False, "allgather", True),
        (2, 1, True, "alltoall", False),
        (1, 2, False, "allgather", False),
        (1, 2, False, "alltoall", True),
    ],
    4: [
        (2, 2, True, "allgather", True),
        (2, 2, True, "alltoall", False),
        (2, 2, False, "alltoall", True),
        (1, 2, False, "allgather", True),
        (1, 4, False, "alltoall", False),
    ],
}


@distributed(world_size=2, slow=[4])
@pytest.mark.parametrize("name", CASES)
def test_every_split(name, world_size):
    for tensor, expert, sequence_parallel, dispatcher, recompute in SPLITS[world_size]:
        parallel_state.destroy_model_parallel()
        split = f"T={tensor} EP={expert} SP={sequence_parallel} {dispatcher} recompute={recompute}"
        try:
            check(
                name,
                tensor=tensor,
                expert=expert,
                sequence_parallel=sequence_parallel,
                dispatcher=dispatcher,
                recompute=recompute,
            )
        except AssertionError as error:
            error.add_note(split)
            raise
