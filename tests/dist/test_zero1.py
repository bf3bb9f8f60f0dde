"""NeuronZero1Optimizer on real ranks: equal to torch's AdamW on the dense model, sharded, resumable."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_memopt.optimizer import AdamW_FP32OptimParams, NeuronZero1Optimizer
from nxd_memopt.parallel_layers import grads, layers, mappings, parallel_state
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from tests.dist.pool import distributed
from tests.reference import (
    CountCollectives,
    assert_same_on_all_ranks,
    assert_says,
    error_message,
    shard,
    tensors,
)

HIDDEN, FEED_FORWARD, SEQUENCE, BATCH = 6, 20, 4, 5  # 6 * 20 = 120, 6 and 20 elements: some shards are padded
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}


class Mlp(nn.Module):
    """Norm, column- and row-parallel layers: every kind of gradient reduction."""

    def __init__(self, *, sequence_parallel: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        sp = {"sequence_parallel_enabled": sequence_parallel, "dtype": dtype}
        self.norm = LayerNorm(HIDDEN, **sp)
        self.up = layers.ColumnParallelLinear(HIDDEN, FEED_FORWARD, gather_output=False, **sp)
        self.down = layers.RowParallelLinear(FEED_FORWARD, HIDDEN, input_is_parallel=True, **sp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def dense_copy(model: Mlp, tensor_size: int) -> nn.Sequential:
    """The same weights in torch's own modules."""
    dense = nn.Sequential(
        nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, FEED_FORWARD), nn.Tanh(), nn.Linear(FEED_FORWARD, HIDDEN)
    )
    up, down = tensors(FEED_FORWARD, HIDDEN, seed=1), tensors(HIDDEN, FEED_FORWARD, seed=2)
    up_bias, down_bias = tensors(FEED_FORWARD, seed=3), tensors(HIDDEN, seed=4)
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for target, value in zip(
            (dense[1].weight, dense[1].bias, dense[3].weight, dense[3].bias),
            (up, up_bias, down, down_bias),
            strict=True,
        ):
            target.copy_(value)
        model.up.weight.copy_(shard(up, 0, size=tensor_size, rank=rank))
        model.up.bias.copy_(shard(up_bias, 0, size=tensor_size, rank=rank))
        model.down.weight.copy_(shard(down, 1, size=tensor_size, rank=rank))
        model.down.bias.copy_(down_bias)
    return dense


def batches(step: int, micro_steps: int = 2) -> list[torch.Tensor]:
    """``micro_steps`` batches ``[S, B * D, H]`` for all data-parallel ranks together."""
    width = BATCH * parallel_state.get_data_parallel_size()
    return [tensors(SEQUENCE, width, HIDDEN, seed=100 * step + i, dtype=torch.float32) for i in range(micro_steps)]


def train(model: Mlp, optimizer: torch.optim.Optimizer, steps: range, *, sequence_parallel: bool) -> None:
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    for step in steps:
        for batch in batches(step):
            mine = shard(batch, 1, size=size, rank=rank).to(model.up.weight.dtype)
            output = model(mappings.scatter_to_sequence_parallel_region(mine) if sequence_parallel else mine)
            if sequence_parallel:
                output = mappings.gather_from_sequence_parallel_region(output, to_model_parallel=False)
            output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_dense(dense: nn.Sequential, optimizer: torch.optim.Optimizer, steps: range, max_norm: float) -> list[float]:
    norms = []
    for step in steps:
        for batch in batches(step):
            dense(batch).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(dense.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def assert_equal_to_dense(model: Mlp, dense: nn.Sequential, tensor_size: int) -> None:
    rank = parallel_state.get_tensor_model_parallel_rank()
    expected = {
        "norm.weight": dense[0].weight,
        "norm.bias": dense[0].bias,
        "up.weight": shard(dense[1].weight.detach(), 0, size=tensor_size, rank=rank),
        "up.bias": shard(dense[1].bias.detach(), 0, size=tensor_size, rank=rank),
        "down.weight": shard(dense[3].weight.detach(), 1, size=tensor_size, rank=rank),
        "down.bias": dense[3].bias,
    }
    for name, param in model.named_parameters():
        # eps 1e-3 keeps Adam's quotient smooth: gradients that differ by fp32 rounding move weights by as little
        torch.testing.assert_close(param.detach(), expected[name].detach(), rtol=2e-6, atol=2e-6, msg=name)


@distributed(world_size=[1, 2, 4])
@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_equal_to_dense_adamw(max_norm):
    """Three steps of two micro-batches, clipped and unclipped, on 1, 2 and 4 data-parallel ranks."""
    check_against_dense(tensor_size=1, sequence_parallel=False, max_norm=max_norm)


@distributed(world_size=2, slow=[4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_equal_to_dense_adamw_on_tensor_parallel_shards(sequence_parallel, max_norm):
    """The same with T = 2; the optimizer runs the sequence-parallel hook by itself."""
    check_against_dense(tensor_size=2, sequence_parallel=sequence_parallel, max_norm=max_norm)


def check_against_dense(*, tensor_size: int, sequence_parallel: bool, max_norm: float) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
    model = Mlp(sequence_parallel=sequence_parallel)
    dense = dense_copy(model, tensor_size)
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, max_norm=max_norm, **OPTIONS)
    train(model, optimizer, range(3), sequence_parallel=sequence_parallel)
    norms = train_dense(dense, torch.optim.AdamW(dense.parameters(), **OPTIONS), range(3), max_norm)
    assert_equal_to_dense(model, dense, tensor_size)
    assert_same_on_all_ranks(optimizer.grad_norm, "norm")
    assert optimizer.grad_norm.item() == pytest.approx(norms[-1], rel=1e-5)  # fp32 sums in another order
    assert_same_on_all_ranks(model.norm.weight, "norm.weight")


@distributed(world_size=4)
def test_states_are_sharded_and_collectives_bucketed():
    """One reduce-scatter and one all-gather a step; the states hold a quarter of the elements, padded."""
    parallel_state.initialize_model_parallel()
    model = Mlp(sequence_parallel=False)
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, **OPTIONS)
    model(batches(0)[0]).sum().backward()
    with CountCollectives() as counted:
        optimizer.step()
    assert counted.total == 3, counted.calls  # and one all-reduce for the norm
    state = optimizer.base_optimizer.state
    sizes = {tuple(each["exp_avg"].shape) for each in state.values()}
    assert sizes == {(30,), (5,), (2,)}  # 120, 20 and 6 elements on 4 ranks
    bucketed = NeuronZero1Optimizer(
        model.parameters(),
        torch.optim.AdamW,
        bucket_cap_mb_reduce_scatter=100 / 2**20,
        bucket_cap_mb_all_gather=130 / 2**20,
        **OPTIONS,
    )
    with CountCollectives() as counted:
        bucketed.step()
    # of 24, 24, 480, 80, 480, 24 bytes at most 100 together: 5; at most 4 * 130: 48, 480, 80, 504
    assert counted.total == 1 + 5 + 4, counted.calls


@distributed(world_size=2)
def test_hook_called_by_the_script_too_counts_once():
    """A script that sums the sequence-parallel gradients itself, also before clipping, gets the same step."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    results = []
    for called in (False, True):
        model = Mlp(sequence_parallel=True)
        dense_copy(model, 2)
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, max_norm=1e6, **OPTIONS)
        for _ in range(2):
            output = model(mappings.scatter_to_sequence_parallel_region(batches(0)[0]))
            output.square().mean().backward()
            if called:
                grads.allreduce_sequence_parallel_gradients(optimizer)
                grads.clip_grad_norm(optimizer, 1e6)
                grads.bucket_allreduce_gradients(optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # the same gradient tensors hold the next backward's sums
        results.append([param.detach().clone() for param in model.parameters()])
    for without, with_call in zip(*results, strict=True):
        # clip_grad_norm multiplies by exactly 1
        torch.testing.assert_close(with_call, without, rtol=0, atol=0)


@distributed(world_size=2)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, AdamW_FP32OptimParams])
@pytest.mark.parametrize("tensor_size", [1, 2])
def test_bf16_parameters_follow_fp32_masters(optimizer_class, tensor_size):
    """Updates far below a bf16 step accumulate in the masters, gradients in main_grad, moments in fp32."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
    model = Mlp(sequence_parallel=False, dtype=torch.bfloat16)
    dense_copy(model, tensor_size)
    before = model.up.weight.detach().clone()
    optimizer = NeuronZero1Optimizer(model.parameters(), optimizer_class, use_grad_acc_hook=True, lr=1e-5)
    train(model, optimizer, range(4), sequence_parallel=False)
    masters = optimizer.base_optimizer.param_groups[0]["params"]
    assert {master.dtype for master in masters} == {torch.float32}
    moments = {state["exp_avg"].dtype for state in optimizer.base_optimizer.state.values()}
    assert moments == {torch.float32}
    large = before.abs() > 0.1  # half a bf16 step there: 2.4e-4, against 4 updates of 1e-5
    assert large.sum() > 20 and torch.equal(model.up.weight.detach()[large], before[large])
    index = [name for name, _ in model.named_parameters()].index("up.weight")
    moved = (
        masters[index].detach().reshape(-1)
        - shard(before.float().reshape(-1), 0, size=2 // tensor_size, rank=parallel_state.get_data_parallel_rank())
    ).abs()
    assert moved.max() > 1e-5 and moved.max() < 1e-4
    model.up.weight.sum().backward()
    assert model.up.weight.grad is None and model.up.weight.main_grad.dtype == torch.float32


@distributed(world_size=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_equal(dtype, tmp_path):
    """Six steps at once, or three, files, fresh objects, three; with the learning rate of a scheduler."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)

    def build() -> tuple[Mlp, NeuronZero1Optimizer]:
        torch.manual_seed(5)
        model = Mlp(sequence_parallel=True, dtype=dtype)
        return model, NeuronZero1Optimizer(
            model.parameters(), torch.optim.AdamW, use_grad_acc_hook=True, higher_cc_precision=True, **OPTIONS
        )

    straight, optimizer = build()
    train(straight, optimizer, range(3), sequence_parallel=True)
    optimizer.param_groups[0]["lr"] = 3e-3
    weights = {name: value.clone() for name, value in straight.state_dict().items()}
    optimizer.save_sharded_state_dict(tmp_path, num_workers_per_step=1)
    assert len(list(tmp_path.iterdir())) == 4
    train(straight, optimizer, range(3, 6), sequence_parallel=True)

    resumed, optimizer = build()
    train(resumed, optimizer, range(7, 8), sequence_parallel=True)
    resumed.load_state_dict(weights)
    optimizer.load_sharded_state_dict(tmp_path)
    assert optimizer.param_groups[0]["lr"] == 3e-3
    train(resumed, optimizer, range(3, 6), sequence_parallel=True)
    for (name, want), param in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), want.detach(), rtol=0, atol=0, msg=name)


@distributed(world_size=2)
def test_weights_loaded_after_the_optimizer_was_built_are_kept():
    """The next step starts from them, not from the masters of the initial weights."""
    parallel_state.initialize_model_parallel()
    model = Mlp(sequence_parallel=False)
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=1e-6)
    loaded = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    train(model, optimizer, range(1), sequence_parallel=False)
    for name, param in model.named_parameters():
        # one step of lr 1e-6, with weight decay below it
        torch.testing.assert_close(param.detach(), loaded[name], rtol=0, atol=1e-5)


@distributed(world_size=2)
def test_a_gradient_missing_on_one_rank_counts_as_zero():
    parallel_state.initialize_model_parallel()
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = NeuronZero1Optimizer([first, second], torch.optim.SGD, lr=1.0, grad_clipping=False)
    first.grad = torch.full((3,), 2.0)
    if dist.get_rank() == 1:
        second.grad = torch.full((3,), 4.0)
    optimizer.step()
    assert first.tolist() == [-2.0] * 3 and second.tolist() == [-2.0] * 3
    # sqrt(3 * 2^2 + 3 * 2^2)
    assert optimizer.grad_norm.item() == pytest.approx(24**0.5, rel=1e-6)  # fp32


@distributed(world_size=2)
def test_refusals(tmp_path):
    parallel_state.initialize_model_parallel()
    param = nn.Parameter(torch.zeros(3))

    def build(**options) -> NeuronZero1Optimizer:
        return NeuronZero1Optimizer([param], torch.optim.SGD, lr=1.0, **options)

    assert_says(error_message(lambda: build(sharding_groups=[[0]])), "sharding_groups", [[0]], 2)
    assert_says(error_message(lambda: build(grad_norm_groups=[[0, 1]])), [[0, 1]], [[0], [1]], "tensor-parallel")
    whole, halves = build(sharding_groups=[[0], [1]]), build()
    assert_says(error_message(lambda: halves.load_state_dict(whole.state_dict())), "sharding", [0, 1])
    assert_says(error_message(lambda: halves.load_sharded_state_dict(tmp_path)), "no rank files", "optim.dp_rank_XX")
    assert_says(error_message(build(lazy_init=True).step, RuntimeError), "init_zero")
    param.requires_grad_(False)
    assert_says(error_message(halves.step), "0 parameters", "1 did", "init_zero")


@distributed(world_size=2)
def test_freezing_one_and_unfreezing_another_is_refused():
    """As many are trained as before, so only their identity tells."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    frozen, trained = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
    optimizer = NeuronZero1Optimizer([frozen, trained], torch.optim.AdamW, lr=1.0)
    frozen.requires_grad_(True)
    trained.requires_grad_(False)
    assert_says(error_message(optimizer.step), "0 are the same", "init_zero()")
    optimizer.init_zero()
    frozen.sum().backward()
    optimizer.step()
    assert (frozen < 1).all() and (trained == 1).all()


@distributed(world_size=2)
def test_a_fully_frozen_model_takes_steps():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    optimizer = NeuronZero1Optimizer([nn.Parameter(torch.ones(3), requires_grad=False)], torch.optim.AdamW, lr=1.0)
    optimizer.step()
    assert optimizer.grad_norm == 0


@distributed(world_size=2)
def test_masters_survive_a_model_that_is_loaded_last():
    """Loading and saving in either order: the model's bf16 weights are the masters' rounding."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)

    def build():
        weight = nn.Parameter(tensors(4, 3, seed=1).bfloat16())
        return weight, NeuronZero1Optimizer([weight], torch.optim.AdamW, lr=1e-3)

    weight, optimizer = build()
    (weight * tensors(4, 3, seed=2)).sum().backward()
    optimizer.step()
    saved, state = weight.detach().clone(), optimizer.state_dict()
    assert not torch.equal(state["sharded_master_weights"][0].bfloat16().float(), state["sharded_master_weights"][0])
    resumed_weight, resumed = build()
    resumed.load_state_dict(state)
    with torch.no_grad():
        resumed_weight.copy_(saved)
    assert torch.equal(resumed.state_dict()["sharded_master_weights"][0], state["sharded_master_weights"][0])
    with torch.no_grad():
        resumed_weight.add_(1)
    written = resumed.state_dict()["sharded_master_weights"][0]
    assert (written - state["sharded_master_weights"][0] > 0.5).all()  # 1, but for bf16's rounding of it


@distributed(world_size=2)
def test_float64_parameters_have_float64_masters():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    weights = [nn.Parameter(tensors(4, 3, seed=seed)) for seed in range(3)]  # float64
    before = [weight.detach().clone() for weight in weights]
    optimizer = NeuronZero1Optimizer(weights[:1], torch.optim.AdamW, lr=0.0, weight_decay=0.0)
    optimizer.add_param_group({"params": weights[1:2]})
    for weight in weights:
        weight.square().sum().backward()
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))
    assert {state["exp_avg"].dtype for state in optimizer.base_optimizer.state.values()} == {torch.float64}
    narrow = NeuronZero1Optimizer([nn.Parameter(torch.ones(3))], torch.optim.AdamW)
    message = error_message(lambda: narrow.add_param_group({"params": weights[2:]}))
    assert_says(message, "torch.float64", "torch.float32", "optimizer_dtype=torch.float64")
    rounding = NeuronZero1Optimizer(weights[2:], torch.optim.AdamW, optimizer_dtype=torch.float32, lr=0.0)
    assert rounding.optimizer_dtype == torch.float32, "asked for"
