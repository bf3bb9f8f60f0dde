"""What a step reports of its routers: the share of choices that experts without room have dropped."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.architectures.experts import expert_capacity
from nxd_memopt.models.mixtral import MixtralForCausalLM
from nxd_memopt.modules.moe import moe_layer
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.routers import ExpertForwardBackward
from tests.reference_models import mixtral_config

EXPERTS, TOP_K, TOKENS = 4, 2, 2 * 24


def micro_batch(seed: int, *, has_padding: bool = False) -> MicroBatch:
    ids = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(2, 24, dtype=torch.bool) if has_padding else None
    return MicroBatch(ids, ids, torch.tensor([float(ids.numel())]), token_mask=mask)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_the_dropped_share_is_that_of_the_queues(factor, policy, monkeypatch):
    parallel_state.initialize_model_parallel()
    moe = MoEConfig(
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_expert_capacity_factor=factor,
        moe_token_drop_policy=policy,
    )
    torch.manual_seed(5)
    model = MixtralForCausalLM(mixtral_config(), moe=moe)
    capacity = expert_capacity(TOKENS, TOP_K, EXPERTS, factor)
    queues = moe_layer.queue_positions
    places: list[torch.Tensor] = []

    def recorded(*args):
        places.append(queues(*args))
        return places[-1]

    monkeypatch.setattr(moe_layer, "queue_positions", recorded)
    forward_backward = ExpertForwardBackward(model, 3, None)
    for seed in range(3):
        forward_backward(micro_batch(seed))
    found = torch.stack(places)
    assert found.numel() == 3 * len(model.moe_layers()) * TOKENS * TOP_K
    dropped = (found >= capacity).sum().item()
    assert dropped > 0 or factor > 1
    assert forward_backward.take().values()["dropped_share"] == pytest.approx(dropped / found.numel())


def test_a_batch_with_padding_has_no_dropped_share():
    parallel_state.initialize_model_parallel()
    moe = MoEConfig(num_moe_experts=EXPERTS, moe_router_topk=TOP_K, moe_expert_capacity_factor=0.5)
    forward_backward = ExpertForwardBackward(MixtralForCausalLM(mixtral_config(), moe=moe), 2, None)
    forward_backward(micro_batch(1))
    forward_backward(micro_batch(2, has_padding=True))
    assert "dropped_share" not in forward_backward.take().values()


def test_without_a_capacity_nothing_is_dropped():
    parallel_state.initialize_model_parallel()
    moe = MoEConfig(num_moe_experts=EXPERTS, moe_router_topk=TOP_K)
    forward_backward = ExpertForwardBackward(MixtralForCausalLM(mixtral_config(), moe=moe), 1, None)
    forward_backward(micro_batch(1))
    assert "dropped_share" not in forward_backward.take().values()
