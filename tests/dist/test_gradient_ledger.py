"""Sequence-parallel gradients are summed once, by hand or by the library, or there is an error."""

from __future__ import annotations

import gc
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.optimizer import NeuronZero1Optimizer, OptimizerInBackward
from nxd_memopt.optimizer.main_grad import accumulate_in
from nxd_memopt.parallel_layers import grads, mappings, parallel_state
from nxd_memopt.parallel_layers.gradient_ledger import GradientLedger
from nxd_memopt.parallel_layers.gradient_writes import move_sum_record
from nxd_memopt.parallel_layers.overlapped_grads import OverlappedGradientReduction
from nxd_memopt.trainer import NxDOptimizer
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message

reduce_from = mappings.reduce_from_tensor_model_parallel_region


def own(*shape: int, dtype=torch.float32):
    """Rank + 1 everywhere: on two ranks the sum is 3."""
    return torch.full(shape, float(dist.get_rank() + 1), dtype=dtype, device=backend.device)


def tagged(*shape: int) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(shape, device=backend.device))
    param.sequence_parallel_enabled = True
    return param


def backward(param, scale: float = 1.0) -> None:
    """Add ``scale * (rank + 1)`` to the gradient."""
    (param * own(*param.shape) * scale).sum().backward()


def tracked(*shape: int) -> nn.Parameter:
    """A parameter with the gradient rank + 1, which the library has seen."""
    param = tagged(*shape)
    parallel_state.gradient_ledger.track([param])
    backward(param)
    return param


def by_library(param) -> None:
    grads.allreduce_sequence_parallel_gradients([param])


def is_all(tensor, value: float) -> bool:
    return bool((tensor.detach().cpu() == value).all())


# A gradient is summed once


def by_data(param):
    reduce_from(param.grad.data)


def by_detach(param):
    with torch.no_grad():
        reduce_from(param.grad.detach())


def by_itself(param):
    reduce_from(param.grad)


def by_flat_view(param):
    reduce_from(param.grad.data.view(-1))


@distributed(2)
@pytest.mark.parametrize("by_hand", [by_data, by_detach, by_itself, by_flat_view])
def test_the_librarys_sum_leaves_a_sum_by_hand_alone(by_hand):
    parallel_state.initialize_model_parallel(2)
    param = tracked(2, 3)
    for _ in range(2):
        by_hand(param)
        assert is_all(param.grad, 3)
        grads.clip_grad_norm([param], 1e9)
        grads.bucket_allreduce_gradients([param])
        grads.allreduce_sequence_parallel_gradients([param])
        grads.allreduce_sequence_parallel_gradients([param])
        assert is_all(param.grad, 3)
        param.grad = None
        backward(param)
    grads.allreduce_sequence_parallel_gradients([param])
    assert is_all(param.grad, 3)


@distributed(2)
@pytest.mark.parametrize("zero", ["foreach", "one", "none"])
def test_a_zeroed_gradient_is_a_part_again(zero):
    parallel_state.initialize_model_parallel(2)
    param = tracked(3)
    optimizer = torch.optim.SGD([param], lr=1.0, foreach=zero == "foreach")
    for _ in range(3):
        for _ in range(2):  # accumulates two micro-batches
            backward(param, 0.5)
        optimizer.zero_grad(set_to_none=zero == "none")
        backward(param)
        backward(param)
        by_data(param)
        grads.allreduce_sequence_parallel_gradients(optimizer)
        assert is_all(param.grad, 6)
        optimizer.zero_grad(set_to_none=zero == "none")


@distributed(2)
def test_a_zero_gradient_without_a_new_backward_is_no_error():
    parallel_state.initialize_model_parallel(2)
    param = tracked(3)
    by_data(param)
    param.grad.zero_()
    grads.allreduce_sequence_parallel_gradients([param])
    assert is_all(param.grad, 0)


@distributed(2)
@pytest.mark.parametrize("sum_first", ["by hand", "by the library"])
def test_a_part_added_to_a_sum_is_an_error(sum_first):
    parallel_state.initialize_model_parallel(2)
    param = tracked(3)
    by_data(param) if sum_first == "by hand" else by_library(param)
    backward(param)
    backward(param)
    message = error_message(lambda: grads.allreduce_sequence_parallel_gradients([param]))
    assert_says(message, "[3]", "a later backward pass added", "zero_grad()")
    assert error_message(lambda: by_data(param)) == message
    param.grad.zero_()
    backward(param)
    grads.allreduce_sequence_parallel_gradients([param])
    assert is_all(param.grad, 3)


@distributed(2)
def test_a_sum_that_something_else_scaled_is_an_error():
    parallel_state.initialize_model_parallel(2)
    param = tracked(3)
    by_data(param)
    nn.utils.clip_grad_norm_([param], 1e-3)
    message = error_message(lambda: grads.allreduce_sequence_parallel_gradients([param]))
    assert_says(message, "written to since", "grads.clip_grad_norm", "mark_sequence_parallel_gradients_summed")
    before = param.grad.clone()
    grads.mark_sequence_parallel_gradients_summed([param])
    grads.allreduce_sequence_parallel_gradients([param])
    assert torch.equal(param.grad, before)


@distributed(2)
def test_a_second_sum_by_hand_is_an_error():
    parallel_state.initialize_model_parallel(2)
    param = tracked(3)
    by_data(param)
    assert_says(error_message(lambda: by_data(param)), "summed twice")
    assert is_all(param.grad, 3)


@distributed(2)
def test_a_part_of_a_gradient_is_refused():
    parallel_state.initialize_model_parallel(2)
    param = tracked(4)
    assert_says(error_message(lambda: reduce_from(param.grad.data[:2])), "[4]", "pass all of it")


@distributed(2)
def test_gradients_in_one_flat_tensor():
    """A flat sum covers all of them; sums one by one, which share a version counter, cover each."""
    parallel_state.initialize_model_parallel(2)
    for at_once in (True, False):
        params, flat = [tagged(3), tagged(2, 2)], own(7)
        parallel_state.gradient_ledger.track(params)
        params[0].grad, params[1].grad = flat[:3], flat[3:].view(2, 2)
        for tensor in [flat.data] if at_once else [param.grad for param in params]:
            reduce_from(tensor)
        grads.allreduce_sequence_parallel_gradients(params)
        assert is_all(flat, 3)


@distributed(2)
def test_a_gradient_of_a_parameter_seen_too_late_is_an_error():
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    backward(param)
    by_data(param)
    message = error_message(lambda: grads.allreduce_sequence_parallel_gradients([param]))
    assert_says(message, "before the library knew its parameter", "build the optimizer")
    param.grad = None
    backward(param)
    grads.allreduce_sequence_parallel_gradients([param])
    assert is_all(param.grad, 3)


@distributed(2)
def test_a_sum_over_other_ranks_marks_nothing():
    parallel_state.initialize_model_parallel(1)
    group = parallel_state.get_data_parallel_group()
    param = tracked(3)
    reduce_from(param.grad.data, group)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    grads.allreduce_sequence_parallel_gradients([param])
    assert is_all(param.grad, 6), "3 on both ranks"


@distributed(2)
def test_main_grad():
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    param.data = param.data.bfloat16()
    accumulate_in(torch.float32, [param])
    grads.allreduce_sequence_parallel_gradients([param])  # known, without a gradient
    parallel_state.gradient_ledger.track([param])
    for zero in (False, True):
        for _ in range(2):
            backward(param)
        reduce_from(param.main_grad.data)
        grads.allreduce_sequence_parallel_gradients([param])
        assert is_all(param.main_grad, 6)
        param.main_grad.zero_() if not zero else None
    backward(param)
    assert_says(error_message(lambda: grads.allreduce_sequence_parallel_gradients([param])), "added this rank's part")


# Optimizers


@distributed(2)
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("kind", ["zero1", "nxd", "overlapped"])
def test_optimizers_sum_once(kind, by_hand):
    """Parameters after steps of rate 1: minus 3 a step."""
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    reduction = OverlappedGradientReduction([param]) if kind == "overlapped" else None
    options = {"zero_one_enabled": False, "grad_clipping": False, "max_grad_norm": 1.0}
    optimizer = torch.optim.SGD([param], lr=1.0)
    if kind == "nxd":
        optimizer = NxDOptimizer(optimizer, {"optimizer_config": options})
    if kind == "zero1":
        optimizer = NeuronZero1Optimizer([param], torch.optim.SGD, grad_clipping=False, lr=1.0)
    for step in range(3):
        if reduction is not None and not by_hand:
            with reduction.last_backward():
                backward(param)
        else:
            backward(param)
        if by_hand:
            by_data(param)
        if reduction is not None:
            grads.allreduce_sequence_parallel_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
        assert is_all(param, -3.0 * (step + 1))


@distributed(2)
def test_optimizer_in_backward_sums_once_a_step():
    parallel_state.initialize_model_parallel(2)
    param = tagged(3)
    optimizer = OptimizerInBackward(torch.optim.SGD([param], lr=1.0))
    for step in range(3):
        backward(param)
        optimizer.step()
        assert param.grad is None and is_all(param, -3.0 * (step + 1))


# Identity


@distributed(2)
def test_storages_are_told_apart_when_memory_is_used_again():
    """Addresses come back at once when tensors are freed; a record must not."""
    parallel_state.initialize_model_parallel(2)
    param = tracked(64)
    for step in range(40):
        if step % 2:
            by_data(param)
        else:
            reduce_from(own(64))
        grads.allreduce_sequence_parallel_gradients([param])
        assert is_all(param.grad, 3)
        param.grad = None
        backward(param)


def test_the_ledger_keeps_nothing_alive():
    ledger = GradientLedger(_prune_above=4)
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for param in params:
        param.sequence_parallel_enabled, param.grad = True, torch.ones(2)
    ledger.track(params)
    del params, param
    gc.collect()
    for _ in range(300):
        with ledger.writing_sum(torch.ones(2), over_tensor_ranks=True):
            pass
    assert not ledger._params and len(ledger._unknown_sums) <= 257


def test_a_moved_gradient_keeps_its_state_and_a_saved_one_loads():
    ledger, param = GradientLedger(), nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    ledger.mark_summed([param])
    target = torch.zeros(2)
    target.copy_(param.grad)
    move_sum_record(param.grad, target)
    stream = io.BytesIO()
    torch.save(param.grad, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=True), param.grad)
    param.grad = target
    assert not ledger.needs_sum(param)
    move_sum_record(torch.ones(2), target)
    assert ledger.needs_sum(param)


@distributed(2)
def test_a_compiled_function_records_its_sums():
    """torch.compile leaves its graph for the sum, and refuses it where it may not."""
    parallel_state.initialize_model_parallel(2)
    param = tracked(3)
    torch.compile(lambda grad: reduce_from(grad) * 1.0, backend="eager")(param.grad.data)
    grads.allreduce_sequence_parallel_gradients([param])
    assert is_all(param.grad, 3)
    param.grad = None
    backward(param)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda grad: reduce_from(grad) * 1.0, backend="eager", fullgraph=True)(param.grad.data)
    assert is_all(param.grad, dist.get_rank() + 1)
