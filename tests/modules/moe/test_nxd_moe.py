"""neuronx-distributed's MoE names against definitions in float64, on every split over ranks, and its faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.modules.moe.nxd import (
    ExpertMLPs,
    ExpertMLPsV2,
    GroupLimitedRouter,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterSinkhorn,
    RouterTopK,
    SharedExperts,
    load_balancing_loss_func,
)
from nxd_memopt.modules.moe.nxd.token_shuffling import token_shuffle
from nxd_memopt.parallel_layers import grads, parallel_state
from tests.dist.pool import distributed
from tests.reference import relative_error, shard, tensors

EXPERTS, HIDDEN, WIDTH, LENGTH, ROWS = 4, 6, 8, 8, 3
# Sums of some hundred products in float64, in another order. A lost term is above 1e-3.
TOLERANCE = 1e-11


@dataclass(frozen=True)
class Case:
    """Options of router and experts."""

    k: int = 2
    capacity_factor: float | None = None
    glu: bool = True
    normalize: bool = False
    act_fn: str = "softmax"
    over_topk: bool = False
    hidden_act: str = "silu"

    def experts(self, **changes: Any) -> ExpertMLPs:
        options: dict[str, Any] = {
            "num_experts": EXPERTS,
            "top_k": self.k,
            "hidden_size": HIDDEN,
            "intermediate_size": WIDTH,
            "hidden_act": self.hidden_act,
            "glu_mlp": self.glu,
            "capacity_factor": self.capacity_factor,
            "normalize_top_k_affinities": self.normalize,
            "dtype": torch.float64,
        }
        return ExpertMLPs(**options | changes)


CASES = {
    "full capacity": Case(),
    "dropless": Case(capacity_factor=0.0, normalize=True),
    "capacity": Case(capacity_factor=0.8),
    "capacity, normalized": Case(capacity_factor=0.6, normalize=True),
    "sigmoid of the chosen": Case(act_fn="sigmoid", over_topk=True),
    "without gate, dropless": Case(capacity_factor=-1.0, glu=False, hidden_act="gelu"),
    "one expert": Case(k=1, capacity_factor=1.0),
}


def defined(x: Tensor, router: Tensor, first: Tensor, second: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Output and logits of all tokens ``[T, H]``, token by token and choice by choice."""
    logits = x @ router.t()
    choices = logits.topk(case.k, dim=1).indices
    scored = logits.gather(1, choices) if case.over_topk else logits
    affinities = scored.sigmoid() if case.act_fn == "sigmoid" else scored.softmax(1)
    weights = affinities if case.over_topk else affinities.gather(1, choices)
    factor = case.capacity_factor
    most = x.size(0)
    if factor is not None and 0 < factor < EXPERTS / case.k:
        most = min(most, -int(-x.size(0) * case.k * factor // EXPERTS))
    taken = [0] * EXPERTS
    act = getattr(F, case.hidden_act)
    outputs = []
    for token in range(x.size(0)):
        kept = []
        for j, expert in enumerate(choices[token].tolist()):
            if taken[expert] < most:
                kept.append((j, expert))
            taken[expert] += 1
        total = torch.zeros_like(x[token])
        divisor = sum((weights[token, j] for j, _ in kept), torch.zeros((), dtype=x.dtype)) if case.normalize else 1.0
        for j, expert in kept:
            projected = x[token] @ first[expert]
            if case.glu:
                gate, up = projected.chunk(2)
                hidden = act(gate) * up
            else:
                hidden = act(projected)
            total = total + weights[token, j] / divisor * (hidden @ second[expert])
        outputs.append(total)
    return torch.stack(outputs), logits


def full_weights(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The router ``[E, H]``, first ``[E, H, F or 2 F]`` and second ``[E, F, H]`` weights."""
    first = tensors(EXPERTS, HIDDEN, (1 + case.glu) * WIDTH, seed=2) * 0.5
    return tensors(EXPERTS, HIDDEN, seed=1), first, tensors(EXPERTS, WIDTH, HIDDEN, seed=3) * 0.5


def own_part(first: Tensor, second: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """This rank's experts, and its columns of them: of gate and of up."""
    size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    blocks = first.chunk(2, 2) if case.glu else (first,)
    first = torch.cat([shard(block, 2, size=size, rank=rank) for block in blocks], 2)
    second = shard(second, 1, size=size, rank=rank)
    expert = {
        "size": parallel_state.get_expert_model_parallel_size(),
        "rank": parallel_state.get_expert_model_parallel_rank(),
    }
    return shard(first, 0, **expert), shard(second, 0, **expert)


def summed(tensor: Tensor | None, group: dist.ProcessGroup | None, *, enabled: bool) -> Tensor:
    assert tensor is not None
    total = tensor.clone()
    if enabled and group is not None:
        dist.all_reduce(total, group=group)
    return total


@distributed(world_size=[1, 2], slow=[4])
@pytest.mark.parametrize("layout", ["plain", "sequence", "sequence, router too"])
@pytest.mark.parametrize("name", CASES)
def test_layer(name: str, layout: str, world_size: int) -> None:
    tensor_size = 1 if layout == "plain" and world_size == 2 else min(2, world_size)
    expert_size = world_size // tensor_size
    parallel_state.initialize_model_parallel(tensor_size, expert_model_parallel_size=expert_size)
    case = CASES[name]
    sequence, routes_shards = layout != "plain", layout.endswith("too")
    router = RouterTopK(
        EXPERTS,
        case.k,
        HIDDEN,
        sequence_parallel_enabled=routes_shards,
        dtype=torch.float64,
        act_fn=case.act_fn,
        apply_act_fn_over_topk=case.over_topk,
    )
    experts = case.experts()
    layer = MoE(router, experts, sequence_parallel_enabled=sequence, return_router_logits=True)
    first = experts.mlp_op.gate_up_proj if case.glu else experts.mlp_op.up_proj
    second = experts.mlp_op.down_proj
    full = full_weights(case)
    with torch.no_grad():
        router.linear_router.weight.copy_(full[0])
        for linear, part in zip((first, second), own_part(*full[1:], case), strict=True):
            linear.weight.copy_(part)
    data_rank = parallel_state.get_data_parallel_rank()
    seeds = [10 * rank for rank in range(parallel_state.get_data_parallel_size())]
    batches = [
        (tensors(LENGTH, ROWS, HIDDEN, seed=seed + 5), tensors(LENGTH, ROWS, HIDDEN, seed=seed + 6)) for seed in seeds
    ]
    group = parallel_state.get_tensor_model_parallel_group()
    rank = parallel_state.get_tensor_model_parallel_rank()

    def own(tensor: Tensor) -> Tensor:
        return shard(tensor, 0, size=tensor_size, rank=rank) if sequence else tensor

    x = own(batches[data_rank][0]).clone().requires_grad_()
    before = x.detach().clone()
    output, logits = layer(x)
    output.backward(own(batches[data_rank][1]))
    assert torch.equal(x, before)  # the caller's tensor is not written to

    # Every rank's tokens have outputs of their own; the experts have gradients of all ranks' tokens.
    leaves = [weight.clone().requires_grad_() for weight in full]
    inputs = [batch.clone().requires_grad_() for batch, _ in batches]
    results = [defined(each.view(-1, HIDDEN), *leaves, case) for each in inputs]
    pairs = zip(results, batches, strict=True)
    losses = [(result[0].view(LENGTH, ROWS, HIDDEN) * upstream).sum() for result, (_, upstream) in pairs]
    router_grad = torch.autograd.grad(losses[data_rank], leaves[0], retain_graph=True)[0]
    first_grad, second_grad = torch.autograd.grad(sum(losses), leaves[1:], retain_graph=True)
    (input_grad,) = torch.autograd.grad(losses[data_rank], inputs[data_rank])
    wanted_output, wanted_logits = results[data_rank]
    assert relative_error(output, own(wanted_output.view(LENGTH, ROWS, HIDDEN))) < TOLERANCE
    assert relative_error(logits, wanted_logits) < TOLERANCE
    assert relative_error(x.grad, own(input_grad)) < TOLERANCE
    found = summed(router.linear_router.weight.grad, group, enabled=routes_shards)
    assert router.linear_router.weight.sequence_parallel_enabled == routes_shards
    assert relative_error(found, router_grad) < TOLERANCE
    for linear, part in zip((first, second), own_part(first_grad, second_grad, case), strict=True):
        assert relative_error(linear.weight.grad, part) < TOLERANCE


@distributed(world_size=4)
def test_tensor_and_expert_parallel_layers() -> None:
    """T = 2 and EP = 2: outputs, and the gradients of tokens, router and experts, in float64."""
    body: Any = test_layer
    for layout in ("plain", "sequence"):
        body.distributed_body("dropless", layout, 4)
        parallel_state.destroy_model_parallel()


@distributed(world_size=2)
def test_a_process_without_experts_averages_over_all_ranks() -> None:
    """Like a pipeline stage that has dense layers alone."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    dense = torch.nn.Linear(3, 2)
    for param in dense.parameters():
        param.grad = torch.full_like(param, float(dist.get_rank()))
    grads.bucket_allreduce_gradients(dense)
    assert all(torch.equal(param.grad, torch.full_like(param, 0.5)) for param in dense.parameters())


@pytest.mark.parametrize(
    ("factor", "glu", "hidden_act"), [(None, True, "silu"), (0.0, False, "gelu"), (-1.0, True, "gelu")]
)
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


@distributed(world_size=2)
def test_expert_parallel_ranks_start_with_the_experts_of_one_rank() -> None:
    """Not with equal ones: neuronx-distributed draws the same local shapes from one seed."""
    weights = []
    for size in (1, 2):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=size)
        torch.manual_seed(5)
        weights.append(Case().experts().mlp_op.gate_up_proj.weight.detach())
        parallel_state.destroy_model_parallel()
    rank = dist.get_rank()
    assert torch.equal(weights[1], weights[0][2 * rank : 2 * rank + 2])
    assert not torch.equal(weights[0][0], weights[0][2])


def test_loss_is_its_definition_and_one_k_th_of_transformers() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as transformers_loss

    logits = tensors(20, EXPERTS, seed=4)
    for k in (1, 2, 3):
        probabilities = logits.softmax(1)
        mask = F.one_hot(probabilities.topk(k, dim=1).indices, EXPERTS).double()  # [T, k, E]
        expected = EXPERTS / k * (mask.mean(0) * probabilities.mean(0)).sum()
        found = load_balancing_loss_func(logits, EXPERTS, k)
        assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=1e-6)
        assert found.item() * k == pytest.approx(float(transformers_loss((logits,), EXPERTS, k)), rel=1e-6)


def test_sinkhorn_balances_in_training_only() -> None:
    router = RouterSinkhorn(EXPERTS, 1, HIDDEN, dtype=torch.float64)
    x = tensors(30, HIDDEN, seed=1) + 2
    logits, affinities, chosen = router(x)
    matrix = logits.detach().exp().double()
    rows, columns = torch.ones(30, 1).double(), torch.ones(1, EXPERTS).double()
    for _ in range(30):
        rows = 1 / 30 / (matrix * columns).sum(1, keepdim=True)
        columns = 1 / EXPERTS / (matrix * rows).sum(0, keepdim=True)
    assert torch.equal(chosen, (rows * matrix * columns).argmax(1, keepdim=True))
    assert torch.allclose(affinities, logits.sigmoid())
    router.eval()
    assert torch.equal(router(x)[2], logits.argmax(1, keepdim=True))
    strict = RouterSinkhorn(EXPERTS, 1, HIDDEN, sinkhorn_iterations=1, sinkhorn_tol=1e-30)
    with pytest.raises(ValueError, match="sinkhorn_tol is 1e-30"):
        strict(x.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jitter_leaves_the_input_alone(dtype: torch.dtype) -> None:
    router = RouterTopK(EXPERTS, 2, HIDDEN, jitter_eps=0.5)
    x = torch.ones(40, HIDDEN, dtype=dtype).requires_grad_()
    logits = router(x)[0]
    assert torch.equal(x, torch.ones_like(x))
    assert (logits - logits[0]).abs().amax() > 0.01
    router.eval()
    assert torch.equal(router(x)[0], router(x)[0])


def test_clamps_bias_and_scale_of_the_gate() -> None:
    config = RoutedExpertsMLPOpsConfig(
        2, HIDDEN, WIDTH, 1, "silu", True, hidden_act_scaling_factor=1.7, hidden_act_bias=1.0,
        gate_clamp_upper_limit=0.0, up_clamp_lower_limit=-0.5, up_clamp_upper_limit=0.5,
    )  # fmt: skip
    gate, up = tensors(5, WIDTH, seed=1), tensors(5, WIDTH, seed=2)
    wanted = gate.clamp(max=0.0)
    wanted = F.silu(1.7 * wanted) * (up.clamp(-0.5, 0.5) + 1)
    assert torch.allclose(config.activate(torch.cat([gate, up], -1)), wanted)


def test_evaluation_drops_no_token() -> None:
    case = Case(capacity_factor=0.5)
    experts = case.experts().eval()
    x, router = tensors(12, HIDDEN, seed=1), tensors(EXPERTS, HIDDEN, seed=2)
    affinities = (x @ router.t()).softmax(1)
    chosen = affinities.topk(2, dim=1).indices
    weights = (experts.mlp_op.gate_up_proj.weight, experts.mlp_op.down_proj.weight)
    wanted, _ = defined(x, router, *weights, Case())
    assert relative_error(experts(x, affinities, chosen, 12), wanted) < TOLERANCE
    experts.train()
    assert relative_error(experts(x, affinities, chosen, 12), wanted) > 1e-2


def router_of(**options: Any) -> RouterTopK:
    return RouterTopK(options.pop("num_experts", EXPERTS), options.pop("top_k", 2), HIDDEN, **options)


REFUSED = {
    "Invalid top_k=5": lambda: router_of(top_k=5),
    "act_fn": lambda: router_of(act_fn="tanh"),
    "store_transposed_weights": lambda: router_of(store_transposed_weights=True),
    "Inconsistent top_k": lambda: MoE(router_of(top_k=1), Case().experts()),
    "Inconsistent num_experts": lambda: MoE(router_of(num_experts=8), Case().experts()),
    "must have SP enabled": lambda: MoE(router_of(sequence_parallel_enabled=True), Case().experts()),
    "Inconsistent sequence_dimension": lambda: MoE(
        router_of(sequence_parallel_enabled=True, sequence_dimension=1),
        Case().experts(),
        sequence_parallel_enabled=True,
    ),
    "token_shuffle_group_size 2": lambda: MoE(router_of(), Case().experts(), token_shuffle_group_size=2),
    "init_tkg_module": lambda: MoE(router_of(), Case().experts(), init_tkg_module=True),
    "normalize_top_k_affinities": lambda: Case(k=1, normalize=True).experts(),
    "bias=True": lambda: Case().experts(bias=True),
    "early_expert_affinity_modulation": lambda: Case().experts(early_expert_affinity_modulation=True),
    "hidden_act": lambda: Case(hidden_act="swish").experts(),
    "padding_mask": lambda: MoE(router_of(), Case().experts())(torch.zeros(2, 1, HIDDEN), torch.ones(2, 1)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_other_refusals_and_default_dimensions() -> None:
    with pytest.raises(NotImplementedError, match="Top-1"):
        RouterSinkhorn(EXPERTS, 2, HIDDEN)
    with pytest.raises(NotImplementedError, match="return_bias"):
        Case().experts(return_bias=True)
    with pytest.raises(ValueError, match="expert_distribution"):
        Case().experts(expert_distribution=[[0]])
    experts = Case().experts(block_size=128, use_index_calc_kernel=True)
    layer = MoE(router_of(sequence_parallel_enabled=True), experts, sequence_parallel_enabled=True)
    assert layer.sequence_dimension == layer.router.sequence_dimension == 0
    assert set(dict(layer.named_parameters())) == {
        "router.linear_router.weight",
        "expert_mlps.mlp_op.gate_up_proj.weight",
        "expert_mlps.mlp_op.down_proj.weight",
    }
    assert isinstance(experts, ExpertMLPsV2)
    assert experts.mlp_op.gate_up_proj.weight.partition_dim == 2
    assert experts.mlp_op.gate_up_proj.weight.partition_stride == 2


def test_rows_of_experts_of_equal_number() -> None:
    operator = Case().experts().mlp_op
    x = tensors(EXPERTS, 3, HIDDEN, seed=1)
    projected = torch.einsum("ech,ehf->ecf", x, operator.gate_up_proj.weight)
    gate, up = projected.chunk(2, -1)
    wanted = torch.einsum("ecf,efh->ech", F.silu(gate) * up, operator.down_proj.weight)
    assert torch.allclose(operator(x), wanted)


def test_norm_and_index() -> None:
    x = tensors(LENGTH, ROWS, HIDDEN, seed=1)
    router, experts = router_of(dtype=torch.float64), Case().experts()
    norm = torch.nn.RMSNorm(HIDDEN, dtype=torch.float64)
    output, index = MoE(router, experts, return_expert_index=True)(norm(x))
    (found,) = MoE(router, experts, rmsnorm=norm)(x)
    assert torch.allclose(found, output)
    assert index.shape == (LENGTH * ROWS, 2) and index.dtype == torch.int64


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_shared_experts(fused: bool, sequence: bool, world_size: int) -> None:
    """Their output is added, and their gradients of tokens and weights are those of an MLP of twice the width."""
    parallel_state.initialize_model_parallel(world_size)
    shared = SharedExperts(HIDDEN, WIDTH, 2, "silu", dtype=torch.float64, fused_gate_up_projection=fused)
    size, rank = world_size, parallel_state.get_tensor_model_parallel_rank()
    gate, up, down = (
        tensors(*shape, seed=seed) for seed, shape in enumerate([(16, HIDDEN), (16, HIDDEN), (HIDDEN, 16)])
    )
    parts = [shard(each, dim, size=size, rank=rank) for each, dim in ((gate, 0), (up, 0), (down, 1))]
    weights = [shared.gate_up_proj.weight] if fused else [shared.gate_proj.weight, shared.up_proj.weight]
    weights.append(shared.down_proj.weight)
    with torch.no_grad():
        for weight, part in zip(weights, [torch.cat(parts[:2]), parts[2]] if fused else parts, strict=True):
            weight.copy_(part)
    router, experts = router_of(dtype=torch.float64), Case().experts()

    def own(tensor: Tensor) -> Tensor:
        return shard(tensor, 0, size=size, rank=rank) if sequence else tensor

    x, upstream = tensors(LENGTH, ROWS, HIDDEN, seed=7), tensors(LENGTH, ROWS, HIDDEN, seed=8)
    results = []
    for module in (None, shared):
        mine = own(x).clone().requires_grad_()
        (output,) = MoE(router, experts, shared_experts=module, sequence_parallel_enabled=sequence)(mine)
        results.append((output, *torch.autograd.grad(output, [mine, *(weights if module else [])], own(upstream))))
    leaves = [each.clone().requires_grad_() for each in (x, gate, up, down)]
    added = (F.silu(leaves[0] @ leaves[1].t()) * (leaves[0] @ leaves[2].t())) @ leaves[3].t()
    wanted = torch.autograd.grad(added, leaves, upstream)
    assert relative_error(results[1][0] - results[0][0], own(added)) < TOLERANCE
    assert relative_error(results[1][1] - results[0][1], own(wanted[0])) < TOLERANCE
    sharded = [shard(each, dim, size=size, rank=rank) for each, dim in zip(wanted[1:], (0, 0, 1), strict=True)]
    for found, part in zip(results[1][2:], [torch.cat(sharded[:2]), sharded[2]] if fused else sharded, strict=True):
        assert relative_error(found, part) < TOLERANCE


def test_groups_limit_the_choice() -> None:
    router = GroupLimitedRouter(8, 3, HIDDEN, n_group=4, topk_group=2, dtype=torch.float64)
    router.e_score_correction_bias = torch.tensor([-3.0, -3.0, 0.3, -4.0, -2.0, 0.1, -1.0, -5.0])
    x = tensors(20, HIDDEN, seed=1)
    logits, affinities, chosen = router(x)
    assert torch.allclose(affinities, logits.sigmoid())
    for token in range(20):
        biased = (affinities[token] + router.e_score_correction_bias).tolist()
        groups = sorted(range(4), key=lambda group: -(biased[2 * group] + biased[2 * group + 1]))[:2]
        allowed = [expert for group in groups for expert in (2 * group, 2 * group + 1)]
        # Their biased scores are negative: a 0 for the other groups would be chosen before them.
        assert chosen[token].tolist() == sorted(allowed, key=lambda expert: -biased[expert])[:3]
    with pytest.raises(ValueError, match="topk_group 1 leave 2 experts"):
        GroupLimitedRouter(8, 3, HIDDEN, n_group=4, topk_group=1)
    with pytest.raises(ValueError, match="for inference"):
        SharedExperts(HIDDEN, WIDTH, 1, "silu", transpose_weights=True)


@distributed(world_size=2, slow=[4])
@pytest.mark.parametrize("seed", [None, 3])
def test_shuffled_tokens_have_their_own_outputs_and_gradients(seed: int | None, world_size: int) -> None:
    parallel_state.initialize_model_parallel(world_size // 2)
    router, experts = router_of(dtype=torch.float64), Case().experts()
    torch.manual_seed(10 + parallel_state.get_data_parallel_rank())  # equal on tensor-parallel ranks
    rank = parallel_state.get_data_parallel_rank()
    results = []
    for group_size in (1, 2):
        options: dict[str, Any] = {"token_shuffle_group_size": group_size, "token_shuffle_seed": seed}
        layer = MoE(router, experts, return_router_logits=True, **options)
        x = tensors(LENGTH, ROWS, HIDDEN, seed=rank).requires_grad_()
        state = torch.get_rng_state()
        output, logits = layer(x)
        drawn = not torch.equal(state, torch.get_rng_state())
        (grad,) = torch.autograd.grad(output, x, tensors(LENGTH, ROWS, HIDDEN, seed=rank + 5))
        results.append((output, grad))
        # A seed draws from a generator of its own: dropout does not repeat.
        assert drawn == (group_size == 2 and seed is None)
        assert (layer.shuffle_permutation is not None) == (group_size == 2 and seed is not None)
    for plain, shuffled in zip(*results, strict=True):
        assert relative_error(shuffled, plain) < TOLERANCE
    # Half of the tokens that this rank routed are the other rank's.
    own = (logits.unsqueeze(1) - router(x)[0]).abs().amax(-1) < 1e-9
    assert own.any(1).sum() == LENGTH * ROWS // 2
    with pytest.raises(ValueError, match="token_shuffle_group_size"):
        token_shuffle(torch.zeros(1, 3, HIDDEN))
    parallel_state.destroy_token_shuffle_group()
