"""Sequence-parallel gradients are summed once, by hand or by the library, or there is an error."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.optimizer import NeuronZero1Optimizer, OptimizerInBackward
from nxd_memopt.optimizer.main_grad import accumulate_in
from nxd_memopt.parallel_layers import grads, mappings, parallel_state
from nxd_memopt.parallel_layers.overlapped_grads import OverlappedGradientReduction
from nxd_memopt.parallel_layers.summed_gradients import forget_sum, mark_summed, move_sum, needs_sum, observe
from nxd_memopt.trainer import NxDOptimizer
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message

reduce_from = mappings.reduce_from_tensor_model_parallel_region
TWICE = "summed twice"
MIXTURE = "a later backward pass adds"
WRITTEN = "written to since"
UNKNOWN = "before it was known as the gradient"


def own(*shape: int, dtype=torch.float32):
    """Rank + 1 everywhere: on two ranks the sum is 3."""
    return torch.full(shape, float(dist.get_rank() + 1), dtype=dtype, device=backend.device)


def tagged(*shape: int, dtype=torch.float32) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(shape, dtype=dtype, device=backend.device))
    param.sequence_parallel_enabled = True
    return param


def backward(param, scale: float = 1.0) -> None:
    """Add ``scale * (rank + 1)`` to the gradient."""
    (param * own(*param.shape) * scale).sum().backward()


def with_gradient(*shape: int) -> nn.Parameter:
    """A parameter with the gradient rank + 1, which the library has seen."""
    param = tagged(*shape)
    observe([param])
    backward(param)
    return param


def by_library(param) -> None:
    grads.allreduce_sequence_parallel_gradients([param])


def is_all(tensor, value: float) -> bool:
    return bool((tensor.detach().cpu() == value).all())


# Sums by hand


def by_data(param):
    reduce_from(param.grad.data)


def by_itself(param):
    reduce_from(param.grad)


def by_flat_view(param):
    reduce_from(param.grad.data.view(-1))


@distributed(2)
@pytest.mark.parametrize("by_hand", [by_data, by_itself, by_flat_view, by_library])
def test_the_library_does_not_sum_again(by_hand):
    parallel_state.initialize_model_parallel(2)
    param = with_gradient(2, 3)
    for set_to_none in (True, False, True, False, False):
        by_hand(param)
        assert is_all(param.grad, 3)
        grads.clip_grad_norm([param], 1e9)
        grads.bucket_allreduce_gradients([param])
        by_library(param)
        by_library(param)
        assert is_all(param.grad, 3)
        torch.optim.SGD([param]).zero_grad(set_to_none=set_to_none)
        backward(param)
    by_library(param)
    assert is_all(param.grad, 3)


@distributed(2)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("first", [by_data, by_library])
def test_a_second_sum_and_a_later_part_are_errors(first):
    parallel_state.initialize_model_parallel(2)
    param = with_gradient(3)
    first(param)
    assert_says(error_message(lambda: by_data(param)), TWICE, "[3]")
    assert_says(error_message(lambda: backward(param)), MIXTURE, "[3]", "zero_grad()")
    assert_says(error_message(lambda: by_library(param)), WRITTEN)
    param.grad.zero_()
    by_library(param)  # zeros without a new backward pass are no error
    param.grad.zero_()
    backward(param)
    backward(param)
    by_library(param)
    assert is_all(param.grad, 6), "micro-batches add up"
    assert_says(error_message(lambda: (param * own(3)).sum().backward(create_graph=True)), MIXTURE)
    param.grad = None


@distributed(2)
def test_other_writes_to_a_sum_are_errors_until_the_script_says_that_it_is_one():
    parallel_state.initialize_model_parallel(2)

    def clipped(param):
        nn.utils.clip_grad_norm_([param], 1e-3)

    def halved(param):
        param.grad = param.grad / 2

    def cloned(param):
        param.grad = param.grad.clone()

    for write in (clipped, halved, cloned):
        param = with_gradient(3)
        by_data(param)
        write(param)
        message = error_message(lambda param=param: by_library(param))
        assert_says(message, WRITTEN, "grads.clip_grad_norm", "mark_sequence_parallel_gradients_summed")
        before = param.grad.clone()
        grads.mark_sequence_parallel_gradients_summed([param])
        by_library(param)
        assert torch.equal(param.grad, before)
    cloned(param)
    assert_says(error_message(lambda: backward(param)), MIXTURE)


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
def test_sums_of_unknown_tensors_are_errors():
    """Of a slice, of a gradient that was not seen, and of a tensor that becomes the gradient."""
    parallel_state.initialize_model_parallel(2)
    param = with_gradient(4)
    assert_says(error_message(lambda: reduce_from(param.grad.data[:2])), "[4]", "all of it")
    late = tagged(3)
    backward(late)
    by_data(late)
    assert_says(error_message(lambda: by_library(late)), UNKNOWN, "build the optimizer")
    late.grad = None
    backward(late)
    by_library(late)
    assert is_all(late.grad, 3)
    assigned = tagged(3)
    assigned.grad = reduce_from(own(3))
    assert_says(error_message(lambda: by_library(assigned)), UNKNOWN)


@distributed(2)
def test_gradients_in_one_storage():
    """They share a version counter; each has its own mark, and a sum of both at once is refused."""
    parallel_state.initialize_model_parallel(2)
    params, flat = [tagged(3), tagged(2, 2)], own(7)
    params[0].grad, params[1].grad = flat[:3], flat[3:].view(2, 2)
    observe(params)
    assert_says(error_message(lambda: reduce_from(flat.data)), "shares memory")
    reduce_from(params[0].grad)
    grads.allreduce_sequence_parallel_gradients(params)
    assert is_all(flat, 3)


@distributed(2)
def test_a_sum_over_other_ranks_marks_nothing():
    parallel_state.initialize_model_parallel(1)
    group = parallel_state.get_data_parallel_group()
    param = with_gradient(3)
    reduce_from(param.grad.data, group)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    by_library(param)
    assert is_all(param.grad, 6), "3 on both ranks"


@distributed(2)
def test_marks_do_not_outlive_their_memory():
    """Addresses come back at once when tensors are freed."""
    parallel_state.initialize_model_parallel(2)
    param = with_gradient(64)
    for step in range(40):
        if step % 2:
            by_data(param)
        else:
            reduce_from(own(64))
        by_library(param)
        assert is_all(param.grad, 3)
        param.grad = None
        backward(param)


# Sums in hooks


def sum_in_a_hook(param):
    param.register_post_accumulate_grad_hook(lambda param: None if param.grad is None else by_data(param))


def optimizer_of(kind: str, param):
    if kind == "zero1":
        return NeuronZero1Optimizer([param], torch.optim.SGD, grad_clipping=False, lr=1.0)
    if kind == "nxd":
        options = {"zero_one_enabled": False, "grad_clipping": False, "max_grad_norm": 1.0}
        return NxDOptimizer(torch.optim.SGD([param], lr=1.0), {"optimizer_config": options})
    return torch.optim.SGD([param], lr=1.0)


@distributed(2)
@pytest.mark.parametrize("by_hand", ["", "after backward", "first hook", "last hook"])
@pytest.mark.parametrize("kind", ["zero1", "nxd", "overlapped"])
def test_optimizers_sum_once(kind, by_hand):
    """Parameters after steps of rate 1: minus 3 a step."""
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    if by_hand == "first hook":
        sum_in_a_hook(param)
    reduction = OverlappedGradientReduction([param]) if kind == "overlapped" else None
    optimizer = optimizer_of(kind, param)
    if by_hand == "last hook":
        sum_in_a_hook(param)
    for step in range(4):
        if reduction is not None and by_hand in ("", "first hook"):
            with reduction.last_backward():
                backward(param)
        else:
            backward(param)
        if by_hand == "after backward":
            by_data(param)
        if reduction is not None:
            grads.allreduce_sequence_parallel_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert is_all(param, -3.0 * (step + 1))


@distributed(2)
def test_optimizer_in_backward_sums_once_a_step():
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    sum_in_a_hook(param)
    optimizer = OptimizerInBackward(torch.optim.SGD([param], lr=1.0))
    for step in range(3):
        backward(param)
        optimizer.step()
        assert param.grad is None and is_all(param, -3.0 * (step + 1))


@distributed(2)
@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("summed", ["itself", "copy"])
def test_a_sum_of_an_incoming_gradient_is_an_error(summed, micro_batch):
    """Added to the gradient of another micro-batch, it would not be seen."""
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    if micro_batch:  # seen before the hook is registered
        observe([param])
        backward(param)
    param.register_hook(lambda grad: (reduce_from(grad.clone() if summed == "copy" else grad), None)[1])
    observe([param])
    assert_says(error_message(lambda: backward(param)), UNKNOWN, "no hook on an incoming gradient")


# Gradients elsewhere


@distributed(2)
def test_main_grad():
    parallel_state.initialize_model_parallel(2)
    param = tagged(3, dtype=torch.bfloat16)
    accumulate_in(torch.float32, [param])
    observe([param])
    for set_to_none in (False, True, False):
        for _ in range(2):
            backward(param)
        reduce_from(param.main_grad.data)
        by_library(param)
        assert is_all(param.main_grad, 6)
        param.main_grad = None if set_to_none else param.main_grad.zero_()
    backward(param)
    by_library(param)
    assert_says(error_message(lambda: backward(param)), MIXTURE)


@distributed(2)
def test_a_hook_that_sums_before_the_gradient_is_added_elsewhere_is_an_error():
    parallel_state.initialize_model_parallel(2)
    param = tagged(3, dtype=torch.bfloat16)
    sum_in_a_hook(param)
    observe([param])
    accumulate_in(torch.float32, [param])
    assert_says(error_message(lambda: backward(param)), "a hook has summed", "sum main_grad")


def test_static_buffers_of_graphs_have_the_mark_of_their_values():
    param = nn.Parameter(torch.zeros(2))
    param.sequence_parallel_enabled = True
    param.grad = torch.ones(2)
    mark_summed([param])
    summed, buffer = param.grad, torch.zeros(2)
    stream = io.BytesIO()
    torch.save(summed, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=True), summed)
    param.grad = buffer
    buffer.copy_(summed)
    move_sum(summed, buffer)
    assert not needs_sum(param)
    forget_sum(param, buffer)
    assert needs_sum(param)
    summed.mul_(2)
    move_sum(summed, buffer)
    assert_says(error_message(lambda: (buffer.fill_(1), needs_sum(param))), WRITTEN)
    move_sum(torch.ones(2), buffer)
    assert needs_sum(param)


@distributed(2)
def test_a_compiled_function_marks_its_sums():
    """torch.compile leaves its graph for the sum."""
    parallel_state.initialize_model_parallel(2)
    param = with_gradient(3)
    torch.compile(lambda grad: reduce_from(grad) * 1.0, backend="eager")(param.grad.data)
    by_library(param)
    assert is_all(param.grad, 3)
