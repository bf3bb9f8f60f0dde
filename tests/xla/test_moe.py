"""Mixtral on simulated NeuronCores against transformers on the CPU: loss with balancing loss, and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.utils import move_model_to_device
from tests.dist.pool import distributed
from tests.dist.test_moe_models import options_of
from tests.reference import assert_says, error_message, relative_error
from tests.reference_models import (
    batch,
    full_parameters,
    hugging_face,
    local_part,
    mixtral_config,
    parallel_model,
    qwen2_moe_config,
)

# fp32 sums in another order, and XLA's own exponential: measured below 5e-6
BOUND = 2e-5
# Static shapes without dropping: every expert has room for every token, or the blocks that all tokens can fill.
FORMS: dict[str, dict[str, Any]] = {
    "padded": {"moe_expert_capacity_factor": 4.0, "moe_pad_expert_input_to_capacity": True},
    "blocks": {"moe_expert_block_size": 8},
}


def step_of(form: str, dispatcher: str, recompute: str | None, inputs: dict[str, torch.Tensor], config: Any = None):
    """A model on the device, transformers' one, and both losses; the gradients are traced and not yet computed."""
    config = config or mixtral_config()
    reference = hugging_face(config)
    expected = reference(**inputs).loss
    expected.backward()
    moe = options_of(config, dispatcher, **FORMS[form])
    model = parallel_model(
        config, full_parameters(reference), sequence_parallel=True, moe=moe, recompute_granularity=recompute
    )
    move_model_to_device(model, backend.device)
    on_device = {name: value.to(backend.device) for name, value in inputs.items()}
    backend.mark_step()
    loss = model(**on_device).loss
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    return model, reference, loss, expected


@distributed(2, slow=[1], timeout_s=400)
@pytest.mark.parametrize(("form", "recompute"), [("padded", "full"), ("blocks", None)])
def test_loss_and_gradients_equal_the_cpus(form, recompute, world_size):
    assert backend.name == "xla"
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    assert_equal(*step_of(form, "alltoall", recompute, batch()))


@pytest.mark.slow
@distributed([1, 2], timeout_s=400)
def test_the_shared_expert_equals_the_cpus(world_size):
    """With its gate, in Qwen2-MoE, whose attention has biases too."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    model, reference, loss, expected = step_of("blocks", "allgather", None, batch(), qwen2_moe_config())
    assert any("shared_expert_gate" in name for name, _ in model.named_parameters())
    assert_equal(model, reference, loss, expected)


def assert_equal(model: Any, reference: Any, loss: torch.Tensor, expected: torch.Tensor) -> None:
    """Loss and every gradient of ``model`` equal transformers'."""
    backend.mark_step()
    assert relative_error(loss.detach().cpu(), expected.detach()) < BOUND
    wanted = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        want = local_part(name, wanted[name].grad, model.config)
        error = (param.grad.cpu() - want).norm() / wanted[name].grad.norm()
        assert error < BOUND, f"gradient of {name}: relative error {error:.1e}"
    assert torch.isfinite(loss.detach().cpu())


@distributed(2, timeout_s=400)
@pytest.mark.parametrize(
    ("form", "dispatcher"),
    [
        ("padded", "alltoall"),
        pytest.param("padded", "allgather", marks=pytest.mark.slow),
        ("blocks", "allgather"),
    ],
)
def test_expert_parallel_losses_equal_the_cpus(form, dispatcher):
    """The graphs of all ranks are compared in test_graphs."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    for shift in (0, 1):
        inputs = {name: value.roll(dist.get_rank() + shift, 1) for name, value in batch().items()}
        model, _, loss, expected = step_of(form, dispatcher, None, inputs)
        backend.mark_step()
        assert relative_error(loss.detach().cpu(), expected.detach()) < BOUND
        assert all(torch.isfinite(param.grad.cpu()).all() for param in model.parameters())


@distributed(1)
def test_options_without_a_meaning_on_the_device_are_refused():
    """Shapes that depend on the routing, and float64, which torch_xla makes float32 on NeuronCores without a word."""
    parallel_state.initialize_model_parallel()
    config = mixtral_config()
    message = error_message(lambda: parallel_model(config, moe=options_of(config, "alltoall")))
    assert_says(message, "xla", "fixed shapes", "moe_pad_expert_input_to_capacity=True", "moe_expert_block_size")
    moe = options_of(config, "allgather", **FORMS["padded"], moe_router_dtype="fp64")
    message = error_message(lambda: parallel_model(config, moe=moe))
    assert_says(message, "moe_router_dtype 'fp64'", "fp32", "xla")


@distributed(1, timeout_s=400)
def test_the_fractions_of_a_step_are_those_of_its_batches():
    """Counted in forwards of their own, which draw the same jitter: a mark ends the graph of each, as in the step."""
    parallel_state.initialize_model_parallel()
    config = mixtral_config()
    options: dict[str, Any] = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
    moe = options_of(config, "alltoall", **FORMS["blocks"] | options, moe_input_jitter_eps=0.5)
    model = parallel_model(config, full_parameters(hugging_face(config)), moe=moe)
    move_model_to_device(model, backend.device)
    model.train()
    inputs = {name: value.to(backend.device) for name, value in batch().items()}
    batches = [{name: value.roll(shift, 1) for name, value in inputs.items()} for shift in range(3)]
    backend.mark_step()
    counts: list[torch.Tensor] = []
    with model.balanced_over_step(batches):
        fractions = torch.stack([layer.step_means[:-1] for layer in model.moe_layers()])
        for each in batches:
            output = model(**each)
            output.loss.backward()
            counts.append(output.router.tokens_per_expert)
            backend.mark_step()
    tokens = sum(each["input_ids"].numel() for each in batches)
    torch.testing.assert_close(sum(counts).cpu(), (fractions * tokens).cpu(), rtol=1e-6, atol=0)  # fp32 divisions
    assert not torch.equal(counts[0].cpu(), counts[1].cpu())
