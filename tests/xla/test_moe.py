"""Mixtral on simulated NeuronCores against transformers on the CPU: loss with balancing loss, and every gradient."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.utils import move_model_to_device
from tests.dist.pool import distributed
from tests.dist.test_moe_models import options_of
from tests.reference import assert_says, error_message, relative_error
from tests.reference_models import batch, full_parameters, hugging_face, local_part, mixtral_config, parallel_model

# fp32 sums in another order, and XLA's own exponential: measured below 5e-6
BOUND = 2e-5
# Every expert has room for every token: nothing is dropped, and all shapes are static.
PADDED = {"moe_expert_capacity_factor": 4.0, "moe_pad_expert_input_to_capacity": True}


@distributed([1, 2], timeout_s=400)
@pytest.mark.parametrize("recompute", [None, "full"])
def test_loss_and_gradients_equal_the_cpus(recompute, world_size):
    assert backend.name == "xla"
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    config = mixtral_config()
    reference = hugging_face(config)
    expected = reference(**batch()).loss
    expected.backward()
    moe = options_of(config, "alltoall", **PADDED)
    model = parallel_model(
        config, full_parameters(reference), sequence_parallel=True, moe=moe, recompute_granularity=recompute
    )
    move_model_to_device(model, backend.device)
    inputs = {name: value.to(backend.device) for name, value in batch().items()}
    loss = model(**inputs).loss
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    backend.mark_step()
    assert relative_error(loss.detach().cpu(), expected.detach()) < BOUND
    wanted = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        want = local_part(name, wanted[name].grad, config)
        error = (param.grad.cpu() - want).norm() / wanted[name].grad.norm()
        assert error < BOUND, f"gradient of {name}: relative error {error:.1e}"
    assert torch.isfinite(loss.detach().cpu())


@distributed(1)
def test_shapes_that_depend_on_the_routing_are_refused():
    parallel_state.initialize_model_parallel()
    config = mixtral_config()
    message = error_message(lambda: parallel_model(config, moe=options_of(config, "alltoall")))
    assert_says(message, "xla", "fixed shapes", "moe_pad_expert_input_to_capacity=True")
