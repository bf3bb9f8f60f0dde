"""Gradients reduced under backward: those that the plain functions give, started before backward ends."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.backends import backend
from nxd_memopt.optimizer.main_grad import accumulate_in
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.layers import RowParallelLinear
from nxd_memopt.parallel_layers.overlapped_grads import OverlappedGradientReduction
from tests.dist.pool import distributed
from tests.reference import assert_says
from tests.reference_models import VOCAB, gpt_neox_config, llama_config, parallel_model


def batches(count: int) -> list[torch.Tensor]:
    """Other ones on each data-parallel rank."""
    generator = torch.Generator().manual_seed(40 + parallel_state.get_data_parallel_rank())
    return list(torch.randint(VOCAB, (count, 2, 12), generator=generator))


def gradients(model, reduction=None, *, count: int = 2):
    model.zero_grad()
    for param in model.parameters():
        param.main_grad = None
    *first, last = batches(count)
    for ids in first:
        model(ids, labels=ids).loss.backward()
    if reduction is None:
        model(last, labels=last).loss.backward()
        grads.allreduce_sequence_parallel_gradients(model)
        grads.bucket_allreduce_gradients(model)
    else:
        with reduction.last_backward():
            model(last, labels=last).loss.backward()
        grads.allreduce_sequence_parallel_gradients(model)  # knows that they are summed
    return [grads.gradient_of(param).clone() for param in model.parameters()]


@distributed(world_size=[2, 4])
@pytest.mark.parametrize(("tensor_parallel", "wide", "recompute"), [(1, False, "full"), (2, True, None)])
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_equals_the_plain_reductions(config, tensor_parallel, wide, recompute):
    parallel_state.initialize_model_parallel(tensor_parallel)
    model = parallel_model(config(), sequence_parallel=True, recompute_granularity=recompute)
    model = model.bfloat16() if wide else model.double()
    reduction = OverlappedGradientReduction(model, bucket_bytes=4000)  # registered before main_grad's hooks
    if wide:
        accumulate_in(torch.float32, model.parameters())
    expected = gradients(model)
    for _ in range(2):
        found = gradients(model, reduction)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6 if wide else 1e-12, atol=1e-8 if wide else 1e-14)


@distributed(world_size=4)
def test_a_parameter_that_one_rank_does_not_reach_keeps_the_order_of_the_collectives():
    """Ranks start a bucket with two reductions and the one after it in one call, or in two."""
    parallel_state.initialize_model_parallel(2)
    first, second, norm = (torch.nn.Parameter(torch.zeros(4)) for _ in range(3))
    norm.sequence_parallel_enabled = True
    reduction = OverlappedGradientReduction([first, second, norm], bucket_bytes=16)
    (first.sum() + 10 * second.sum() + 100 * norm.sum()).backward()
    with reduction.last_backward():
        loss = (first + 10 * second).sum()
        if parallel_state.get_data_parallel_rank() == 1:
            loss = loss + 100 * norm.sum()
        loss.backward()
    assert [param.grad[0].item() for param in (first, second, norm)] == [2, 20, 300]


class Chain(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(count))

    def forward(self, x, skip=None):
        for i, layer in enumerate(self.layers):
            x = x if i == skip else layer(x)
        return x.sum()


def started_during_backward(monkeypatch, model, **options) -> list[int]:
    """How many gradients were there when each reduction began."""
    reduction, seen = OverlappedGradientReduction(model, bucket_bytes=600), []
    plain = backend.all_reduce_async

    def all_reduce_async(tensor, group):
        seen.append(sum(param.grad is not None for param in model.parameters()))
        return plain(tensor, group)

    with monkeypatch.context() as patch, reduction.last_backward():
        patch.setattr(backend, "all_reduce_async", all_reduce_async)
        model(torch.ones(2, 8) * (1 + dist.get_rank()), **options).backward()
    return seen


@distributed(world_size=2)
def test_buckets_start_while_backward_runs():
    parallel_state.initialize_model_parallel(1)
    # 6 weights of 256 bytes, two in a bucket, each started when the next gradient arrives; the last one after backward
    assert started_during_backward(pytest.MonkeyPatch(), Chain(6)) == [3, 5, 6]


@distributed(world_size=2)
def test_parameters_that_backward_does_not_reach():
    parallel_state.initialize_model_parallel(1)
    model = Chain(4)
    x = torch.ones(2, 8) * (1 + dist.get_rank())
    reduction = OverlappedGradientReduction(model, bucket_bytes=600)
    model(x).backward()  # an earlier backward reaches all
    with reduction.last_backward():
        model(x, skip=2).backward()
    expected = Chain(4)
    expected.load_state_dict(model.state_dict())
    expected(x).backward()
    expected(x, skip=2).backward()
    grads.bucket_allreduce_gradients(expected)
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    model.zero_grad()
    with reduction.last_backward():
        model(x, skip=2).backward()
    assert model.layers[2].weight.grad is None and model.layers[3].weight.grad is not None


@distributed(world_size=2)
def test_wrong_order_of_calls():
    parallel_state.initialize_model_parallel(1)
    model = Chain(4)
    reduction = OverlappedGradientReduction(model)
    x = torch.ones(2, 8)
    message = ""
    try:
        with reduction.last_backward():
            model(x).backward()
            model(x).backward()
    except RuntimeError as error:
        message = str(error)
    assert_says(message, "a second gradient", "[8, 8]", "call backward() once")
    model.zero_grad()
    with reduction.last_backward():  # usable again
        with pytest.raises(RuntimeError, match="inside last_backward"), reduction.last_backward():
            pass
        model(x).backward()
    assert all(param.grad is not None for param in model.parameters())
    alive = weakref.ref(model.layers[0].weight)
    del model, reduction
    gc.collect()
    assert alive() is None


@distributed(world_size=2)
def test_nothing_to_reduce_starts_nothing():
    parallel_state.initialize_model_parallel(2)
    assert started_during_backward(pytest.MonkeyPatch(), Chain(3)) == []


@distributed(world_size=4)
def test_what_is_summed_is_not_summed_again():
    parallel_state.initialize_model_parallel(2)
    options = {"input_is_parallel": True, "sequence_parallel_enabled": True}
    layers = torch.nn.ModuleList(RowParallelLinear(4, 4, **options) for _ in range(2))
    reduction = OverlappedGradientReduction(layers)
    x = torch.ones(4, 1, 2)

    def both(backward):
        layers.zero_grad()
        for layer in layers:  # the second backward leaves the first layer's gradients as they were
            backward(layer(x).sum())
        return [param.grad.clone() for param in layers.parameters()]

    def plain(loss):
        loss.backward()
        grads.allreduce_sequence_parallel_gradients(layers)
        grads.bucket_allreduce_gradients(layers)

    def overlapped(loss):
        with reduction.last_backward():
            loss.backward()

    expected = both(plain)
    for a, b in zip(both(overlapped), expected, strict=True):
        torch.testing.assert_close(a, b)
