"""What could make the routers' losses wrong without an error: the bias, masks, ties, blocks that are left too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_memopt.modules.moe import Router
from nxd_memopt.modules.moe.causal_lm import MoECausalLM
from nxd_memopt.modules.moe.hf_options import with_shared_expert
from nxd_memopt.modules.moe.load_balancing import update_expert_bias
from nxd_memopt.modules.moe.nxd import ExpertMLPs, RouterSinkhorn, RouterTopK
from nxd_memopt.modules.moe.router import choose_experts
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers import parallel_state
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message, relative_error
from tests.reference_models import batch, mixtral_config, parallel_model

BIAS = torch.tensor([0.5, 0.0, 0.0, -0.5])
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 1e-3}


def build(options: dict[str, Any], **memory: Any) -> MoECausalLM:
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = mixtral_config()
    moe = MoEConfig(num_moe_experts=config.num_local_experts, moe_router_topk=2, **options)
    torch.manual_seed(5)
    return parallel_model(config, moe=moe, **memory)


@distributed(world_size=[1, 2])
def test_the_fractions_of_a_step_are_those_of_the_loss_with_a_bias():
    """The bias changes the choice, and not what the loss balances."""
    model = build(GLOBAL | BIASED)
    for layer in model.moe_layers():
        layer.gate.expert_bias.copy_(BIAS[: layer.moe.num_moe_experts])
    inputs = batch()
    plain = model(**inputs)
    assert not torch.equal(plain.router.tokens_per_expert, build(GLOBAL)(**inputs).router.tokens_per_expert)
    with model.balanced_over_step([inputs]):
        of_step = model(**inputs)
        assert torch.equal(of_step.router.tokens_per_expert, plain.router.tokens_per_expert)
    assert relative_error(of_step.router_loss, plain.router_loss) < 1e-6


@distributed(world_size=1)
@pytest.mark.parametrize("memory", [{}, {"recompute_granularity": "full"}])
def test_a_backward_after_the_block_of_a_step_is_refused(memory):
    model = build(GLOBAL, **memory)
    inputs = batch()
    with model.balanced_over_step([inputs]):
        model(**inputs).loss.backward()
        loss = model(**inputs).loss
    assert_says(error_message(loss.backward, RuntimeError), "balanced_over_step", "inside the block")
    model(**inputs).loss.backward()


def test_a_bias_stays_fp32_in_a_model_of_another_dtype():
    moe = MoEConfig(num_moe_experts=4, moe_router_topk=1, **BIASED)
    router = Router(8, moe, sequence_parallel_enabled=False, dtype=torch.float32)
    router.expert_bias.fill_(1 / 3)
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.expert_bias, torch.full((4,), 1 / 3))
    router.double()
    assert router.expert_bias.dtype == torch.float32
    assert set(router.state_dict()) == {"weight", "expert_bias"}


@distributed(world_size=1)
def test_masks_say_which_tokens_count_and_not_how_much():
    model = build({"moe_aux_loss_coeff": 0.7, "moe_z_loss_coeff": 0.1})
    inputs = batch()
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, -3:] = 0
    expected = model(**inputs, token_mask=mask)
    for other in (mask * 7, -mask, mask.bool(), mask.double() / 3):
        found = model(**inputs, token_mask=other)
        assert torch.equal(found.router.rows, expected.router.rows)
    message = error_message(lambda: model(**inputs, token_mask=mask[:, 1:]), ValueError)
    assert_says(message, "token_mask", str(list(mask[:, 1:].shape)), str(list(mask.shape)))


def test_large_logits_are_no_ties_of_sigmoid_scores():
    moe = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_router_score_function="sigmoid")
    logits = torch.tensor([[18.0, 19.0, 30.0, 17.4], [20.0, 30.0, 25.0, 40.0]])
    _, experts = choose_experts(logits, moe)
    assert experts.tolist() == [[2, 1], [3, 1]]


@distributed(world_size=2)
def test_evaluation_does_not_wait_for_other_ranks(world_size):
    """One rank may have more batches to evaluate than the other."""
    model = build(GLOBAL).eval()
    if parallel_state.get_data_parallel_rank() == 0:
        model(**batch())
    torch.distributed.barrier()


BAD = {
    "no width": (
        lambda: with_shared_expert(mixtral_config(), 0, gate=False),
        ["moe_shared_expert_intermediate_size", "at least 1", "got 0"],
    ),
    "negative width": (lambda: with_shared_expert(mixtral_config(), -4, gate=True), ["at least 1", "-4"]),
    "counts of other layers": (
        lambda: update_expert_bias(
            [
                Router(
                    8,
                    MoEConfig(num_moe_experts=4, moe_router_topk=1, **BIASED),
                    sequence_parallel_enabled=False,
                    dtype=torch.float32,
                )
            ],
            torch.zeros(2, 4),
        ),
        ["[2, 4]", "1 routers", "4 experts"],
    ),
    "jitter of NxD's router": (lambda: RouterTopK(4, 2, 8, jitter_eps=2.0), ["jitter_eps 2.0", "[0, 1)"]),
    "iterations of NxD's router": (
        lambda: RouterSinkhorn(4, 1, 8, sinkhorn_iterations=-1),
        ["sinkhorn_iterations", "at least 1", "-1"],
    ),
    "capacity of NxD's experts": (
        lambda: ExpertMLPs(4, 2, 8, 16, "silu", True, float("nan")),
        ["capacity_factor", "nan"],
    ),
    "weight of the losses": (
        lambda: build({"moe_aux_loss_coeff": 0.1})(**batch(), router_loss_weight=float("nan")),
        ["router_loss_weight", "nan"],
    ),
}


@distributed(world_size=1)
@pytest.mark.parametrize("name", BAD)
def test_bad_inputs(name):
    action, words = BAD[name]
    assert_says(error_message(action, ValueError), *words)
