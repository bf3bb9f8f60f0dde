"""Sequence-parallel gradients that a script's hooks sum, or that take another gradient's place."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.optimizer import NeuronZero1Optimizer, OptimizerInBackward
from nxd_memopt.optimizer.main_grad import accumulate_in
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.overlapped_grads import OverlappedGradientReduction
from nxd_memopt.trainer import NxDOptimizer
from tests.dist.pool import distributed
from tests.dist.test_gradient_ledger import backward, by_data, by_library, is_all, own, reduce_from, tagged, tracked
from tests.reference import assert_says, error_message


def sum_after_accumulation(param):
    param.register_post_accumulate_grad_hook(lambda param: None if param.grad is None else by_data(param))


@distributed(2)
@pytest.mark.parametrize("hook_first", [True, False])
@pytest.mark.parametrize("kind", ["zero1", "nxd", "overlapped"])
def test_a_hook_that_sums_and_an_optimizer_sum_once(kind, hook_first):
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    if hook_first:
        sum_after_accumulation(param)
    optimizer = reduction = None
    if kind == "zero1":
        optimizer = NeuronZero1Optimizer([param], torch.optim.SGD, grad_clipping=False, lr=1.0)
    elif kind == "nxd":
        options = {"zero_one_enabled": False, "grad_clipping": False, "max_grad_norm": 1.0}
        optimizer = NxDOptimizer(torch.optim.SGD([param], lr=1.0), {"optimizer_config": options})
    else:
        optimizer, reduction = torch.optim.SGD([param], lr=1.0), OverlappedGradientReduction([param])
    if not hook_first:
        sum_after_accumulation(param)
    for step in range(4):
        if reduction is not None and hook_first:
            with reduction.last_backward():
                backward(param)
        else:
            backward(param)
        grads.allreduce_sequence_parallel_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert is_all(param, -3.0 * (step + 1))


@distributed(2)
def test_a_hook_that_sums_before_the_optimizer_in_backward():
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    sum_after_accumulation(param)
    optimizer = OptimizerInBackward(torch.optim.SGD([param], lr=1.0))
    for step in range(2):
        backward(param)
        optimizer.step()
        assert is_all(param, -3.0 * (step + 1))


@distributed(2)
def test_a_hook_that_sums_a_part_added_to_a_sum_is_an_error():
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    sum_after_accumulation(param)
    parallel_state.gradient_ledger.track([param])
    backward(param)
    assert_says(error_message(lambda: backward(param)), "a later backward pass added", "zero_grad()")


@distributed(2)
@pytest.mark.parametrize("sums_by", ["view", "itself"])
@pytest.mark.parametrize("hook_first", [True, False])
def test_a_hook_that_sums_incoming_gradients(hook_first, sums_by):
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)

    def register():
        param.register_hook(lambda grad: (reduce_from(grad.data if sums_by == "view" else grad), None)[1])

    if hook_first:
        register()
    parallel_state.gradient_ledger.track([param])
    if not hook_first:
        register()
    for set_to_none in (False, True, False):
        for _ in range(2):  # sums are added to a sum
            backward(param)
        by_library(param)
        assert is_all(param.grad, 6)
        torch.optim.SGD([param]).zero_grad(set_to_none=set_to_none)


@distributed(2)
@pytest.mark.parametrize("returns", [True, False])
def test_a_hook_that_sums_a_copy_of_an_incoming_gradient_is_an_error(returns):
    """Whether the sum takes the gradient's place is not known when the copy is summed."""
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    parallel_state.gradient_ledger.track([param])
    param.register_hook(lambda grad: reduce_from(grad.clone()) if returns else (reduce_from(grad.clone()), None)[1])
    backward(param)
    assert_says(error_message(lambda: by_library(param)), "in no hook on an incoming gradient")


class SummedInBackward(torch.autograd.Function):
    """The identity for two parameters; backward sums the first one's gradient, both in one storage."""

    @staticmethod
    def forward(ctx, first, second):
        return torch.cat([first, second])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        reduce_from(grad[:3])
        return grad[:3], grad.data[3:]  # .data: version counters of their own


@distributed(2)
def test_a_function_that_sums_one_of_two_gradients_in_one_storage():
    parallel_state.initialize_model_parallel(2)
    params = [tagged(3), tagged(4)]
    parallel_state.gradient_ledger.track(params)
    for set_to_none in (False, True, False):
        for _ in range(2):
            (SummedInBackward.apply(*params) * own(7)).sum().backward()
        grads.allreduce_sequence_parallel_gradients(params)
        for param in params:
            assert is_all(param.grad, 6)
        torch.optim.SGD(params).zero_grad(set_to_none=set_to_none)


@distributed(2)
def test_a_sum_in_another_tensors_place():
    parallel_state.initialize_model_parallel(2)

    def halved(param):
        param.grad = param.grad / 2

    def cloned(param):
        param.grad = param.grad.clone()

    for replace in (halved, cloned):
        param = tracked(3)
        by_library(param)
        replace(param)
        message = error_message(lambda param=param: by_library(param))
        assert_says(message, "assigned to .grad", "mark_sequence_parallel_gradients_summed", "zero_grad()")
        before = param.grad.clone()
        grads.mark_sequence_parallel_gradients_summed([param])
        by_library(param)
        assert torch.equal(param.grad, before)
        replace(param)
        backward(param)
        assert_says(error_message(lambda param=param: by_library(param)), "a later backward pass added")
    param = tracked(3)
    param.grad = reduce_from(param.grad.clone())
    by_library(param)
    assert is_all(param.grad, 3)


@distributed(2)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_part_added_out_of_place_to_a_sum_is_an_error():
    parallel_state.initialize_model_parallel(2)
    param = tracked(3)
    by_library(param)
    (param * own(3)).sum().backward(create_graph=True)
    assert_says(error_message(lambda: by_library(param)), "a later backward pass added")
    param.grad = None


@distributed(2)
def test_gradients_that_a_script_assigns_in_each_step_are_parts():
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    optimizer = torch.optim.SGD([param], lr=1.0)
    for step in range(3):
        (param.grad,) = torch.autograd.grad((param * own(3)).sum(), param)
        by_library(param)
        optimizer.step()
        assert is_all(param, -3.0 * (step + 1))


@distributed(2)
def test_main_grad_of_gradients_that_a_hook_sums():
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    param.data = param.data.bfloat16()
    sum_after_accumulation(param)
    optimizer = NeuronZero1Optimizer(
        [param], torch.optim.SGD, grad_clipping=False, use_grad_acc_hook=True, save_master_weights=True, lr=1.0
    )
    for step in range(3):
        for _ in range(2):
            backward(param)
        assert is_all(param.main_grad, 6)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
        assert is_all(param, -6.0 * (step + 1))


@distributed(2)
def test_main_grad_of_a_sum_and_a_part_is_an_error():
    parallel_state.initialize_model_parallel(2)
    for first_is_sum in (True, False):
        param = tagged(3)
        param.data = param.data.bfloat16()
        is_summing = [first_is_sum]
        param.register_post_accumulate_grad_hook(
            lambda param, is_summing=is_summing: by_data(param) if is_summing[0] else None
        )
        parallel_state.gradient_ledger.track([param])
        accumulate_in(torch.float32, [param])
        backward(param)
        is_summing[0] = not first_is_sum
        backward(param)
        assert_says(error_message(lambda param=param: by_library(param)), "added this rank's part")
