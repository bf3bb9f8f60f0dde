"""Parts of a MoE layer alone: Sinkhorn, jitter, router dtype, capacity, balancing bias, grouped matmuls."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nxd_memopt.config import ParallelConfig
from nxd_memopt.memory.recompute import checkpoint
from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.modules.moe import MoELayer, Router, RouterStatistics, empty_rows
from nxd_memopt.modules.moe.capacity import queue_positions
from nxd_memopt.modules.moe.load_balancing import token_sums, update_expert_bias, with_row
from nxd_memopt.modules.moe.router import Routing, choose_experts, jittered, sinkhorn
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.ops.grouped_linear import grouped_linear, grouped_mm_linear, loop_linear
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from tests.dist.pool import distributed
from tests.modules.moe.definitions import Options, Weights, kept_choices, moe_forward, sinkhorn_matrix
from tests.modules.moe.test_moe_layer import EXPERTS, HIDDEN, LENGTH, ROWS, WIDTH, build, local
from tests.reference import assert_float64_close, from_all_ranks, gradients, relative_error, tensors


def router(moe: MoEConfig, *, dtype: torch.dtype = torch.float64) -> Router:
    made = Router(HIDDEN, moe, sequence_parallel_enabled=False, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(tensors(moe.num_moe_experts, HIDDEN, seed=4))
    return made


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_sinkhorn(scale):
    logits = tensors(24, 6, seed=1) * scale
    matrix = sinkhorn(logits)
    # 1e-8 in the divisors, and the iteration's end: measured 2e-8
    assert torch.allclose(matrix, sinkhorn_matrix(logits), rtol=1e-5, atol=1e-9)
    if scale <= 1:  # converged: every expert has an equal share, and every token
        assert torch.allclose(matrix.sum(0), torch.full((6,), 1 / 6, dtype=torch.float64), atol=1e-4)
        assert torch.allclose(matrix.sum(1), torch.full((24,), 1 / 24, dtype=torch.float64), atol=1e-4)


def test_sinkhorn_of_large_logits_is_finite():
    assert sinkhorn(tensors(8, 4, seed=2) * 1e4).isfinite().all()


def test_sinkhorn_does_not_balance_in_evaluation():
    moe = MoEConfig(4, moe_router_load_balancing_type="sinkhorn")
    logits = tensors(64, 4, seed=3) + torch.tensor([4.0, 3.0, 0.0, 0.0], dtype=torch.float64)
    _, trained = choose_experts(logits, moe, training=True)
    _, evaluated = choose_experts(logits, moe, training=False)
    assert torch.equal(evaluated.sort().values, logits.topk(2).indices.sort().values)
    assert trained.flatten().bincount(minlength=4).max() < evaluated.flatten().bincount(minlength=4).max()


def test_jitter_is_uniform_and_leaves_the_input_alone():
    moe = MoEConfig(4, moe_input_jitter_eps=0.3)
    made = router(moe)
    hidden = torch.ones(2000, HIDDEN, dtype=torch.float64)
    noise = jittered(hidden, 0.3, is_shard=False)
    assert torch.equal(hidden, torch.ones_like(hidden))
    assert noise.min() >= 0.7 and noise.max() <= 1.3
    # 12,000 numbers: the mean's standard error is 0.0016, that of each of ten bins' counts 33
    assert abs(noise.mean() - 1) < 0.01
    counts = torch.histc(noise, bins=10, min=0.7, max=1.3)
    assert (counts - 1200).abs().max() < 200
    assert not torch.equal(made(hidden).logits, made(hidden).logits)
    made.eval()
    assert torch.equal(made(hidden).logits, made(hidden).logits)


def test_jitter_reaches_the_router_alone_and_is_replayed_by_recompute():
    parallel_state.destroy_model_parallel()
    moe = MoEConfig(EXPERTS, moe_input_jitter_eps=0.2, moe_z_loss_coeff=0.1)
    weights = Weights.random(EXPERTS, HIDDEN, WIDTH)
    layer = build(moe, weights, sequence_parallel=False)
    x = tensors(LENGTH, ROWS, HIDDEN, seed=1)
    results = []
    for recompute in (False, True):
        torch.manual_seed(11)
        layer.zero_grad()
        own = local(x, False).requires_grad_()
        rows = empty_rows(EXPERTS, own.device)
        output, rows = checkpoint(layer, own, rows) if recompute else layer(own, rows)
        (output.square().sum() + RouterStatistics(rows).loss(moe)).backward()
        results.append([output.detach(), own.grad, layer.gate.weight.grad.clone()])
    for plain, replayed in zip(*results, strict=True):
        assert torch.equal(plain, replayed)
    torch.manual_seed(11)
    noise = torch.empty(ROWS, LENGTH, HIDDEN, dtype=torch.float64).uniform_(0.8, 1.2).transpose(0, 1)
    expected = moe_forward(x, weights, Options(), noise)
    assert_float64_close(results[0][0], local(expected.outputs, False))


def jitter_of_rank(sequence_parallel: bool) -> Tensor:
    return jittered(torch.ones(3, 2, HIDDEN, dtype=torch.float64), 0.3, is_shard=sequence_parallel)


@distributed(world_size=2)
def test_jitter_differs_between_sequence_shards_and_not_between_replicas():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_manual_seed(5)
    first, second = from_all_ranks(jitter_of_rank(True))
    assert not torch.equal(first, second)
    first, second = from_all_ranks(jitter_of_rank(False))
    assert torch.equal(first, second)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("fp64", torch.float64), (None, torch.bfloat16)])
def test_router_dtype(name, dtype):
    made = router(MoEConfig(4, moe_router_dtype=name), dtype=torch.bfloat16)
    hidden = tensors(5, HIDDEN, seed=8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = made(hidden)
    assert routing.logits.dtype == dtype
    assert routing.weights.dtype == (torch.float64 if name == "fp64" else torch.float32)
    exact = hidden.double() @ made.weight.double().t()
    # 2^-24 of fp32, 2^-53 of fp64 and 2^-8 of bf16, of sums of six products
    bound = {torch.float32: 1e-6, torch.float64: 1e-15, torch.bfloat16: 2e-2}[dtype]
    assert relative_error(routing.logits.double(), exact) < bound


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize(("tokens", "seed"), [(20, 0), (20, 1), (256, 0), (600, 0)])
def test_who_is_dropped_token_for_token(policy, tokens, seed):
    """Also of more tokens than one block of cumulative sums has."""
    experts = tensors(tokens, 5, seed=seed).topk(2, dim=1).indices
    weights = (tensors(tokens, 2, seed=seed + 10) * 2).round().sigmoid()  # many equal weights
    lists = [list(row) for row in weights]
    for factor in (0.3, 0.7, 1.0):
        capacity = math.ceil(tokens * 2 / 5 * factor)
        positions = queue_positions(weights, experts, 5, policy, capacity)
        kept = kept_choices(experts.tolist(), lists, 5, factor, policy)
        found = {
            (t, e) for t, row in enumerate(experts.tolist()) for c, e in enumerate(row) if positions[t, c] < capacity
        }
        assert found == kept
        # Those that an expert takes have its places in the order of the tokens.
        for expert in range(5):
            places = positions[(experts == expert) & (positions < capacity)].tolist()
            assert places == list(range(len(places)))


def test_a_choice_with_nan_is_not_dropped():
    """The loss becomes NaN, which ends a run: dropped, the token would be left out without a word."""
    weights = torch.tensor([[0.5], [torch.nan], [0.4], [0.6]])
    positions = queue_positions(weights, torch.zeros(4, 1, dtype=torch.int64), 1, "probs", 2)
    assert positions.flatten().tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize(
    ("options", "has_gradient"),
    [
        ({}, False),
        ({"moe_z_loss_coeff": 0.0}, False),
        ({"moe_z_loss_coeff": 0.1}, True),
        ({"moe_aux_loss_coeff": 0.1}, True),
    ],
)
def test_backward_has_no_gradients_of_zero_without_a_loss(options, has_gradient):
    moe = MoEConfig(4, **options)
    logits = tensors(3, 5, 4, seed=1).requires_grad_()
    sums = token_sums(Routing(logits, *choose_experts(logits, moe)), moe, None, sequence_first=False)
    rows = with_row(empty_rows(4, logits.device), sums, moe, None)
    assert rows.requires_grad == has_gradient


def test_padding_counts_in_no_loss():
    moe = MoEConfig(4, moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.5, moe_router_load_balancing_type="seq_aux_loss")

    logits = tensors(3, 6, 4, seed=1)
    mask = torch.ones(3, 6)
    mask[0, 4:] = 0
    mask[2] = 0

    def loss(values: Tensor) -> Tensor:
        routing = Routing(values, *choose_experts(values, moe))
        sums = token_sums(routing, moe, mask, sequence_first=False)
        return RouterStatistics(with_row(empty_rows(4, values.device), sums, moe, None)).loss(moe)

    other = logits.clone()
    other[0, 4:] += 3
    other[2] -= 2
    assert torch.equal(loss(logits), loss(other))
    logits.requires_grad_()
    loss(logits).backward()
    assert logits.grad is not None
    assert (logits.grad[mask == 0] == 0).all() and (logits.grad[mask == 1] != 0).any(-1).all()


@distributed(world_size=2)
def test_expert_bias_follows_the_load_of_all_ranks():
    parallel_state.initialize_model_parallel()
    moe = MoEConfig(4, moe_router_score_function="sigmoid", moe_router_bias_update_rate=0.25)
    made = router(moe)
    rank = parallel_state.get_data_parallel_rank()
    # Sums over the ranks: 8, 8, 12, 4 of a mean of 8. Rank 1 alone would lower expert 0.
    counts = torch.tensor([[[1.0, 4.0, 9.0, 2.0]], [[7.0, 4.0, 3.0, 2.0]]])[rank]
    update_expert_bias([made], counts)
    assert made.expert_bias.tolist() == [0.0, 0.0, -0.25, 0.25]
    # The bias changes the choice, and not the weights of what is chosen.
    with torch.no_grad():
        made.weight.zero_()
    routing = made(tensors(3, HIDDEN, seed=1))
    assert (routing.experts[:, 0] == 3).all() and (routing.experts != 2).all()
    assert torch.equal(routing.weights, torch.full_like(routing.weights, 0.5))
    assert "expert_bias" in made.state_dict()


@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 8, 0], [2, 2, 2, 2], [0, 0, 0, 0]])
@pytest.mark.parametrize("function", [loop_linear, grouped_mm_linear])
def test_grouped_linear(function, counts):
    """Experts without rows too; torch's grouped matmul has no float64."""
    dtype = torch.float64 if function is loop_linear else torch.float32
    total = sum(counts)
    if total == 0 and function is grouped_mm_linear:
        pytest.skip("can_use_grouped_mm refuses no rows")
    rows = tensors(total, 8, seed=1, dtype=dtype).requires_grad_()
    weight = tensors(4, 12, 8, seed=2, dtype=dtype).requires_grad_()
    output = function(rows, weight, torch.tensor(counts))
    owner = torch.arange(4).repeat_interleave(torch.tensor(counts))
    expected = torch.einsum("ri,roi->ro", rows, weight[owner])
    upstream = tensors(total, 12, seed=3, dtype=dtype)
    bound = 1e-14 if dtype == torch.float64 else 1e-6
    assert torch.allclose(output, expected, atol=10 * bound)
    for mine, want in zip(
        gradients(output, upstream, [rows, weight]), gradients(expected, upstream, [rows, weight]), strict=True
    ):
        assert torch.allclose(mine, want, atol=10 * bound)


def test_equal_rows_are_one_batched_matmul():
    rows, weight = tensors(8, 3, seed=1), tensors(4, 5, 3, seed=2)
    assert_float64_close(grouped_linear(rows, weight, None), loop_linear(rows, weight, torch.full((4,), 2)))


def test_missing_shared_experts_are_refused():
    parallel_state.destroy_model_parallel()
    factory = LayerFactory({}, ParallelConfig(), 0.3, torch.float64, None)
    with pytest.raises(ValueError, match="moe_shared_expert_intermediate_size"):
        MoELayer(HIDDEN, WIDTH, "silu", MoEConfig(4, moe_shared_expert_intermediate_size=4), factory=factory)
