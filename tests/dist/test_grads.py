"""grads: sequence-parallel and data-parallel reductions, the global norm and clipping, against dense arithmetic."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import grads, mappings, parallel_state
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_memopt.parallel_layers.utils import set_tensor_model_parallel_attributes
from nxd_memopt.trainer import NxDOptimizer
from tests.dist.pool import distributed
from tests.reference import (
    CountCollectives,
    assert_same_on_all_ranks,
    assert_says,
    error_message,
    integers,
    shard,
    tensors,
)

MIXED = (torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16)


def tagged(gradient: Tensor, *, sequence_parallel: bool = True, main_grad: bool = False) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(gradient))
    param.sequence_parallel_enabled = sequence_parallel
    if main_grad:
        param.grad, param.main_grad = torch.zeros_like(gradient), gradient.clone()
    else:
        param.grad = gradient.clone()
    return param


def sum_over_ranks(i: int, dtype: torch.dtype) -> Tensor:
    """|sums| <= 4 ranks * 9: exact in bf16."""
    return sum(integers(3 + i, 2, seed=10 * i + rank) for rank in range(dist.get_world_size())).to(dtype)


def mine(i: int, dtype: torch.dtype) -> Tensor:
    return integers(3 + i, 2, seed=10 * i + dist.get_rank()).to(dtype)


class Holder(nn.Module):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList()
        for i, param in enumerate(params):  # ParameterList would make new parameters without the tags
            self.params.register_parameter(str(i), param)


def as_model(params):
    return Holder(params)


def as_optimizer(params):
    return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)


def as_generator(params):
    return (param for param in params)


@distributed(world_size=[1, 2, 4])
@pytest.mark.parametrize("source", [as_model, as_optimizer, as_generator])
@pytest.mark.parametrize("main_grad", [False, True])
def test_sequence_parallel_gradients_are_summed_in_every_dtype(main_grad, source, world_size):
    """Tagged ones alone, in place, one collective per dtype; bit-equal on all ranks."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    params = [tagged(mine(i, dtype), main_grad=main_grad) for i, dtype in enumerate(MIXED)]
    untagged = tagged(mine(7, torch.float32), sequence_parallel=False)
    without = tagged(mine(8, torch.float32))
    without.grad = None
    held = [getattr(param, "main_grad", param.grad) for param in params]
    with CountCollectives() as counted:
        grads.allreduce_sequence_parallel_gradients(source([*params, untagged, without]))
    # And one that compares the gradients of the parameter without a tag.
    assert counted.total == (0 if world_size == 1 else len(set(MIXED)) + 1)
    for i, (dtype, gradient, param) in enumerate(zip(MIXED, held, params, strict=True)):
        assert getattr(param, "main_grad", param.grad) is gradient
        assert torch.equal(gradient, sum_over_ranks(i, dtype))
    assert torch.equal(untagged.grad, mine(7, torch.float32)) and without.grad is None


@distributed(world_size=4)
@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 60, 1 << 20])
def test_data_parallel_mean(bucket_bytes, tensor_size):
    """In place, over the data-parallel group alone; parameters or gradients given."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
    group = [rank for rank in range(4) if rank % tensor_size == dist.get_rank() % tensor_size]
    values = [[4 * integers(3 + i, 2, seed=10 * i + rank) for rank in group] for i in range(len(MIXED))]
    want = [
        (sum(each) / len(group)).to(dtype) for each, dtype in zip(values, MIXED, strict=True)
    ]  # exact: 4 * integers
    own = [4 * integers(3 + i, 2, seed=10 * i + dist.get_rank()).to(dtype) for i, dtype in enumerate(MIXED)]
    params, bare = [tagged(gradient) for gradient in own], [gradient.clone() for gradient in own]
    with CountCollectives() as counted:
        grads.bucket_allreduce_gradients(params, bucket_bytes=bucket_bytes)
    grads.bucket_allreduce_gradients(bare, bucket_bytes=bucket_bytes)
    for param, gradient, expected in zip(params, bare, want, strict=True):
        assert torch.equal(param.grad, expected) and torch.equal(gradient, expected)
    if tensor_size == 4:
        assert counted.total == 0
    elif bucket_bytes != 60:
        assert counted.total == (5 if bucket_bytes == 1 else 3), "one per tensor; one per dtype"


def parameters_of_every_kind(size: int) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Column and row shards, KV replicas (2 shards for T=4), replicated ones; and their dense gradients."""
    partitions = max(1, size // 2)
    dense = [
        tensors(4 * size, 3, seed=1),
        tensors(3, 4 * size, seed=2),
        tensors(2 * partitions, 3, seed=3),
        tensors(5, seed=4),
    ]
    replicas = size // partitions
    column, row, kv, replicated = (
        tagged(gradient, sequence_parallel=False)
        for gradient in (
            shard(dense[0], 0),
            shard(dense[1], 1),
            shard(dense[2], 0, size=partitions, rank=dist.get_rank() // replicas),
            dense[3],
        )
    )
    set_tensor_model_parallel_attributes(column, True, 0, full_shape=tuple(dense[0].shape))
    set_tensor_model_parallel_attributes(row, True, 1, full_shape=tuple(dense[1].shape))
    set_tensor_model_parallel_attributes(kv, True, 0, full_shape=tuple(dense[2].shape), replicas=replicas)
    no_gradient = nn.Parameter(torch.zeros(3))
    return [column, no_gradient, row, kv, replicated], dense


@distributed(world_size=[1, 2, 4])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_clip_grad_norm(norm_type, world_size):
    """Norm of the dense gradient, and torch's clipping of it, from every source of parameters."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    for source in (list, as_generator, as_model):
        for max_norm in (0.5, 1e6):
            check_clipping(source, max_norm, norm_type, world_size)


def check_clipping(source, max_norm: float, norm_type: float, world_size: int) -> None:
    params, dense = parameters_of_every_kind(world_size)
    before = [None if param.grad is None else param.grad.clone() for param in params]
    reference = [nn.Parameter(torch.zeros_like(gradient)) for gradient in dense]
    for param, gradient in zip(reference, dense, strict=True):
        param.grad = gradient.clone()
    want = nn.utils.clip_grad_norm_(reference, max_norm, norm_type)
    for function in (
        lambda: grads.get_grad_norm(source(params), norm_type),
        lambda: grads.clip_grad_norm(source(params), max_norm, norm_type),
    ):
        norm = function()
        assert norm.shape == () and norm.dtype == torch.float32
        assert_same_on_all_ranks(norm, "norm")
        # norms are fp32: 6e-8 each, some terms
        torch.testing.assert_close(norm.double(), want.double(), rtol=1e-6, atol=0)
    factor = min(1.0, max_norm / (want.item() + 1e-6))
    for param, gradient in zip(params, before, strict=True):
        assert (param.grad is None) == (gradient is None)
        if gradient is not None:  # the factor comes from the fp32 norm
            torch.testing.assert_close(param.grad, gradient * factor, rtol=1e-6, atol=0)


@distributed(world_size=2)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clip_grad_norm_of_mixed_dtypes(norm_type):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    params = [tagged(tensors(64, seed=i, dtype=dtype)) for i, dtype in enumerate(MIXED)]
    want = torch.linalg.vector_norm(torch.cat([param.grad.double() for param in params]), norm_type)
    norm = grads.clip_grad_norm(params, 1e-3, norm_type)
    # every gradient is widened before it is summed in fp32: 6e-8, some terms
    torch.testing.assert_close(norm.double(), want, rtol=1e-6, atol=0)
    clipped = torch.linalg.vector_norm(torch.cat([param.grad.double() for param in params]), norm_type)
    # gradients in bf16 round by 2^-9 when scaled
    torch.testing.assert_close(clipped.item(), 1e-3, rtol=4e-3, atol=0)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_ranks_without_some_or_any_kind_of_gradient(norm_type, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    assert grads.clip_grad_norm([], 1.0, norm_type).item() == 0
    replicated = tagged(torch.full((4,), 3.0), sequence_parallel=False)
    want = 6.0 if norm_type == 2.0 else 3.0
    assert grads.get_grad_norm([replicated], norm_type).item() == pytest.approx(want, rel=1e-6)  # fp32
    column = tagged(torch.full((4,), 3.0), sequence_parallel=False)
    set_tensor_model_parallel_attributes(column, True, 0, full_shape=(4 * world_size,))
    want *= math.sqrt(world_size) if norm_type == 2.0 else 1
    assert grads.get_grad_norm([column], norm_type).item() == pytest.approx(want, rel=1e-6)  # fp32


@distributed(world_size=2)
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("kind", ["column", "data", "expert"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_bad_gradients_of_one_rank_are_every_ranks_norm(value, kind, norm_type):
    """As torch's own clipping of all gradients in one process, whichever the rank is."""
    size = 2 if kind == "column" else 1
    parallel_state.initialize_model_parallel(size, expert_model_parallel_size=2 if kind == "expert" else 1)
    for bad in range(2):
        local = torch.tensor([3.0, value] if dist.get_rank() == bad else [5.0, 1.0])
        column = tagged(local.clone(), sequence_parallel=False)
        if kind == "column":
            set_tensor_model_parallel_attributes(column, True, 0, full_shape=(4,))
        column.expert_model_parallel = kind == "expert"
        whole = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        whole[0].grad, whole[1].grad = torch.tensor([3.0, value]), torch.tensor([5.0, 1.0])
        want = torch.nn.utils.clip_grad_norm_(whole, 1.0, norm_type)
        options = {"sharding_group": dist.group.WORLD} if kind == "data" else {}
        norm = grads.clip_grad_norm([column], 1.0, norm_type, **options)
        torch.testing.assert_close(norm, want, equal_nan=True)
        mine = whole[0 if dist.get_rank() == bad else 1].grad
        torch.testing.assert_close(column.grad, mine, equal_nan=True)


def test_norm_of_many_elements():
    """torch's own fp32 norm of these is 2e-4 too small on a CPU."""
    param = nn.Parameter(torch.empty(1 << 11, 1 << 12))
    param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(0))
    expected = param.grad.double().norm().item()
    assert abs(grads.get_grad_norm([param]).item() / expected - 1) < 2e-6
    transposed = nn.Parameter(torch.empty(1 << 12, 1 << 11))
    transposed.grad = param.grad.t()
    assert abs(grads.get_grad_norm([transposed]).item() / expected - 1) < 2e-6


def test_refusals():
    assert_says(error_message(lambda: grads.clip_grad_norm([], 0.0)), "max_norm", "0.0", "above 0")
    assert_says(error_message(lambda: grads.get_grad_norm([], 0.5)), "norm_type", "0.5", "at least 1")


class OwnNorm(nn.Module):
    """A norm of a user, applied to a sequence shard ``[s, B, H]`` before the parallel layers."""

    def __init__(self, *, tagged: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.scale.sequence_parallel_enabled = tagged
        self.replicated = nn.Parameter(torch.ones(6))
        self.norm = LayerNorm(6, sequence_parallel_enabled=True)
        self.up = ColumnParallelLinear(6, 8, gather_output=False, sequence_parallel_enabled=True)
        self.down = RowParallelLinear(8, 6, input_is_parallel=True, sequence_parallel_enabled=True)

    def forward(self, shard: Tensor) -> Tensor:
        # Applied to the full sequence, as after a gather: every rank has all of its gradient.
        local = self.down(self.up(self.norm(shard * self.scale)))
        full = mappings.gather_from_sequence_parallel_region(local, to_model_parallel=False)
        return (full * self.replicated).square().sum()


@distributed(world_size=2)
@pytest.mark.parametrize("is_tagged", [False, True])
@pytest.mark.parametrize("uses_trainer", [False, True])
def test_a_parameter_that_is_not_tagged_is_named_once(is_tagged: bool, uses_trainer: bool) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = OwnNorm(tagged=is_tagged)
    optimizer: torch.optim.Optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    if uses_trainer:
        optimizer = NxDOptimizer(optimizer, {"optimizer_config": {"zero_one_enabled": True}})
    counts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            model(shard(tensors(4, 2, 6, seed=step), 0).float()).backward()
            with CountCollectives() as counted:
                optimizer.step()
            counts.append(counted.total)
    said = [str(each.message) for each in caught]
    if is_tagged or dist.get_rank():
        assert said == []
    else:
        assert len(said) == 1 and "different gradients of scale [6], which is neither sharded nor tagged" in said[0]
    assert counts[0] == counts[1] + 1 and counts[1] == counts[2]
    if is_tagged:
        assert_same_on_all_ranks(model.scale)
    else:
        both = [torch.empty(6) for _ in range(2)]
        dist.all_gather(both, model.scale.detach())
        assert not torch.allclose(both[0], both[1])
