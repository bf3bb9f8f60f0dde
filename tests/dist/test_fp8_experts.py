"""Experts with float8 operands on 1 and 2 ranks against float64 products of operands on the formats' grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nxd_memopt.architectures.experts import options_of
from nxd_memopt.models.gpt_neox_moe import GPTNeoXMoEForCausalLM
from nxd_memopt.models.mixtral import MixtralForCausalLM
from nxd_memopt.modules.fp8 import experts_in_bf16, use_fp8
from nxd_memopt.modules.moe import Experts
from nxd_memopt.modules.moe.assignment import assign
from nxd_memopt.modules.moe.capacity import queue_positions
from nxd_memopt.modules.moe.dispatcher import Dispatcher
from nxd_memopt.ops.fp8 import Fp8Recipe
from nxd_memopt.ops.fp8_experts import fp8_routed_experts
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.planner.sizes.fp8_layers import experts_pay
from tests.dist.pool import distributed
from tests.dist.test_fp8 import RECIPES, rounding
from tests.planner.test_expert_activations import neox_moe_config
from tests.reference import from_all_ranks, relative_error, shard, tensors
from tests.reference_fp8_experts import experts_in_float8
from tests.reference_models import mixtral_config

TOKENS, HIDDEN, EXPERTS, WIDTH, TOP_K = 50, 32, 4, 96, 2
NAMES = ("output", "dX", "weights of choices", "gate and up", "down")
# fp32 sums in another order. A number next to the middle of two float8 numbers may be rounded to the other one
# there: a hundredth of what another scale changes.
TOLERANCE = 1e-3


def uneven(*shape: int, seed: int) -> Tensor:
    """Numbers as in test_fp8, with less different columns: sums over ranks then differ little from one rank's."""
    x = tensors(*shape, seed=seed).float() * 2.0 ** (tensors(shape[-1], seed=seed + 50)).float()
    return x * 2.0 ** (tensors(*shape[:-1], 1, seed=seed + 70)).float()


def full_weights() -> tuple[Tensor, Tensor]:
    # experts whose magnitudes differ, and so their scales
    factors = 4.0 ** torch.arange(EXPERTS).view(-1, 1, 1)
    return uneven(EXPERTS, 2 * WIDTH, HIDDEN, seed=3) * 0.1 * factors, uneven(EXPERTS, HIDDEN, WIDTH, seed=4) / factors


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, weights of the choices, the choices, of which none is expert 1, and the output's gradient."""
    x, weights = uneven(TOKENS, HIDDEN, seed=seed), tensors(TOKENS, TOP_K, seed=seed + 1).float().abs()
    chosen = tensors(TOKENS, EXPERTS - 1, seed=seed + 2).topk(TOP_K).indices
    return x, weights, torch.tensor([0, 2, 3])[chosen], uneven(TOKENS, HIDDEN, seed=seed + 5)


def experts_of(gate_up: Tensor, down: Tensor, recipe: Fp8Recipe | None) -> Experts:
    """Return the module with this rank's part of the weights."""
    experts = Experts(EXPERTS, HIDDEN, WIDTH, "silu", init_method=torch.nn.init.zeros_)
    with torch.no_grad():
        experts.gate_up_proj.copy_(gate_up)
        experts.down_proj.copy_(down)
    experts.fp8 = recipe
    return experts


def run(
    experts: Experts, dispatcher: Dispatcher, seed: int, positions: Tensor | None = None
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Return output and gradients, and the inputs."""
    x, weights, chosen, upstream = inputs(seed)
    leaves = (x.requires_grad_(), weights.requires_grad_(), experts.gate_up_proj, experts.down_proj)
    output = dispatcher.run(x, weights, chosen, positions, experts)
    results = [output, *torch.autograd.grad(output, leaves, upstream)]
    return [each.detach() for each in results], (x.detach(), weights.detach(), chosen, upstream)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(NAMES, found, expected, strict=True):
        error = relative_error(a.double(), b)
        assert error < TOLERANCE, f"{name}: {error:.2e}"


@distributed(world_size=[1, 2])
@RECIPES
def test_each_expert_is_a_layer_of_its_own_rows(recipe):
    """With tensor parallelism each rank's columns of an expert have scales of their own."""
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    gate_up, down = full_weights()
    gate, up = (shard(half, 1, size=size) for half in gate_up.chunk(2, 1))
    own = torch.cat([gate, up], 1), shard(down, 2, size=size)
    found, given = run(experts_of(*own, recipe), Dispatcher(EXPERTS, "alltoall", None, False), 10)
    x, weights, chosen, upstream = given
    assert_equal(found, experts_in_float8(x, weights, chosen, *own, upstream, rounding(recipe)))
    assert not found[3][1].any() and not found[4][1].any(), "an expert without rows has a gradient"
    whole = experts_in_float8(x, weights, chosen, gate_up, down, upstream, rounding(recipe))
    total = sum(from_all_ranks(found[0].double()))
    assert relative_error(total, whole[0]) < 0.05  # roundings of e4m3; a lost part is above 0.5


@distributed(world_size=2)
@RECIPES
@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_ranks_of_experts_equal_one_rank(kind, recipe):
    parallel_state.initialize_model_parallel(1, expert_model_parallel_size=2)
    rank = dist.get_rank()
    gate_up, down = full_weights()
    own = [shard(each, 0, size=2) for each in (gate_up, down)]
    found, _ = run(experts_of(*own, recipe), Dispatcher(EXPERTS, kind, None, False), 10 + 20 * rank)
    x, weights, chosen, upstream = (torch.cat(pair) for pair in zip(inputs(10), inputs(30), strict=True))
    sends_rows = kind == "alltoall"
    output, dx, dweights, *grads = experts_in_float8(
        x, weights, chosen, gate_up, down, upstream, rounding(recipe), sends_rows=sends_rows
    )
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    assert_equal(found, [output[mine], dx[mine], dweights[mine], *(shard(each, 0, size=2) for each in grads)])


@distributed(world_size=1)
@RECIPES
def test_dropped_choices_add_nothing(recipe):
    parallel_state.initialize_model_parallel(1)
    x, weights, chosen, upstream = inputs(10)
    positions = queue_positions(weights, chosen, EXPERTS, "position", 12)
    gate_up, down = full_weights()
    experts = experts_of(gate_up, down, recipe)
    found, _ = run(experts, Dispatcher(EXPERTS, "alltoall", 12, False), 10, positions)
    taken = torch.where(positions < 12, chosen, EXPERTS)
    assert (taken == EXPERTS).any()
    expected = experts_in_float8(x, weights, taken, gate_up, down, upstream, rounding(recipe))
    assert_equal(found, expected)
    # A recording keeps the rows of no expert.
    assignment = assign(chosen, positions, EXPERTS, 12)
    assert assignment.offsets is not None and int(assignment.offsets[-1]) < assignment.choices.numel()
    leaves = (x.requires_grad_(), weights.requires_grad_(), experts.gate_up_proj, experts.down_proj)
    rows = (assignment.choices, assignment.offsets)
    output = fp8_routed_experts(*leaves[:2], *rows, *leaves[2:], "silu", recipe)
    assert_equal([output.detach(), *torch.autograd.grad(output, leaves, upstream)], expected)


@distributed(world_size=1)
@RECIPES
def test_a_nan_stays_with_its_expert_and_reaches_the_output(recipe):
    parallel_state.initialize_model_parallel(1)
    x, weights, chosen, _ = inputs(10)
    x[3, 5] = float("nan")
    experts = experts_of(*full_weights(), recipe)
    output = experts.routed(x, weights, assign(chosen, None, EXPERTS, None))
    shares = (chosen.unsqueeze(2) == chosen[3]).any(2).any(1)
    reached = torch.arange(TOKENS) == 3 if recipe.is_rowwise else shares
    assert torch.equal(output.isnan().all(1), reached) and torch.equal(output.isnan().any(1), reached)


@distributed(world_size=1)
def test_experts_without_gradients_and_in_evaluation():
    parallel_state.initialize_model_parallel(1)
    results = []
    for needs_weights in (True, False):
        experts = experts_of(*full_weights(), Fp8Recipe())
        experts.requires_grad_(needs_weights)
        x, weights, chosen, upstream = inputs(10)
        output = experts.routed(x.requires_grad_(), weights, assign(chosen, None, EXPERTS, None))
        output.backward(upstream)
        results.append((output.detach(), x.grad))
        assert (experts.down_proj.grad is not None) == needs_weights
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    exact = experts_of(*full_weights(), None)
    assignment = assign(chosen, None, EXPERTS, None)
    assert torch.equal(experts.eval().routed(x, weights, assignment), exact.routed(x, weights, assignment))


def mixtral(width: int = 48, **moe: Any) -> MixtralForCausalLM:
    config = mixtral_config(hidden_size=128, intermediate_size=width)
    return MixtralForCausalLM(config, device="meta", moe=options_of(config, **moe))


def test_experts_that_stay_in_bf16_have_a_reason():
    model = mixtral()
    names = use_fp8(model, Fp8Recipe())
    assert "0.mlp.experts" in names and experts_in_bf16(model) is None
    reasons = {
        "moe_expert_block_size": {"moe_expert_block_size": 4},
        "moe_pad_expert_input_to_capacity": {
            "moe_pad_expert_input_to_capacity": True,
            "moe_expert_capacity_factor": 1.0,
        },
    }
    models = {word: mixtral(**options) for word, options in reasons.items()}
    models["[128, 40], are no multiples of 16"] = mixtral(width=40)
    models["biases"] = GPTNeoXMoEForCausalLM(neox_moe_config(hidden_size=128, intermediate_size=64), device="meta")
    for word, model in models.items():
        assert not any(name.endswith("experts") for name in use_fp8(model, Fp8Recipe()))
        assert all(module.fp8 is None for module in model.modules() if isinstance(module, Experts))
        assert word in (experts_in_bf16(model) or "")


def test_rows_of_an_expert_for_which_float8_pays():
    """As measured: Mixtral with 1,024 and 512 rows for an expert, Qwen3 with 2,048 and 512, and Qwen1.5-MoE."""
    assert experts_pay(8 * 1024, 8, 4096, 14336) and not experts_pay(8 * 512, 8, 4096, 14336)
    assert experts_pay(128 * 2048, 128, 2048, 768) and not experts_pay(128 * 512, 128, 2048, 768)
    assert not experts_pay(60 * 546, 60, 2048, 1408)
    # A micro-batch of few tokens leaves the experts in bf16.
    assert use_fp8(mixtral(), Fp8Recipe(), tokens=100) == []
