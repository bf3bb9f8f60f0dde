"""A GPT-NeoX whose MLPs become experts with biases: its outputs and gradients on every split, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.checkpoint import load_pretrained, save_pretrained
from nxd_memopt.checkpoint.huggingface.upcycling import load_upcycled, upcycled_config
from nxd_memopt.commands.convert import Convert
from nxd_memopt.models.gpt_neox import GPTNeoXForCausalLM
from nxd_memopt.models.gpt_neox_moe import GPTNeoXMoEForCausalLM
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.resharding import gather_experts
from nxd_memopt.parallel_layers.utils import copy_tensor_model_parallel_attributes
from nxd_memopt.training.config.train_config import OptimizerConfig
from nxd_memopt.training.optimizer import MasterWeightOptimizer
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message, relative_error
from tests.reference_models import batch, gathered, gpt_neox_config, hugging_face, parallel_model

# fp32 has 6e-8; the weights of a token's experts add up to 1 with such an error.
TOLERANCE = 1e-6
# Gradients are sums over tokens and ranks in another order.
GRADIENT_TOLERANCE = 2e-5


def upcycled(directory: Path, config, *, sequence_parallel: bool = False, seed: int = 3, **options) -> torch.nn.Module:
    model = parallel_model(upcycled_config(config, 4, 2), sequence_parallel=sequence_parallel, **options)
    load_upcycled(model, directory, seed=seed)
    return model


FORMS = {
    "dropless": {},
    "padded": {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
    "blocks": {"moe_expert_block_size": 8},
}


@distributed(world_size=1)
@pytest.mark.parametrize(
    ("form", "changes"),
    [
        pytest.param(
            "dropless",
            {"use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"},
            marks=pytest.mark.slow,
        ),
        pytest.param("padded", {}, marks=pytest.mark.slow),
        ("blocks", {}),
    ],
)
def test_the_loss_and_its_gradients_are_those_of_the_dense_model(tmp_path, form, changes):
    """Equal experts with weights that add up to 1: their gradients add up to that of the MLP."""
    parallel_state.initialize_model_parallel()
    config = gpt_neox_config(**changes)
    hugging_face(config).save_pretrained(tmp_path)  # its biases are not zero
    dense = GPTNeoXForCausalLM(config)
    load_pretrained(dense, tmp_path)
    expected = dense(**batch()).loss
    expected.backward()
    model = upcycled(tmp_path, config, moe=MoEConfig(4, **FORMS[form]))
    loss = model(**batch()).loss
    loss.backward()
    assert relative_error(loss.detach(), expected.detach()) < TOLERANCE
    grads_of = {name: param.grad for name, param in model.named_parameters()}
    for name, param in dense.named_parameters():
        if ".mlp." not in name:
            found = grads_of[name]
        else:
            start, module, kind = name.rsplit(".", 2)
            suffix = "_bias" if kind == "bias" else ""
            found = grads_of[f"{start}.experts.{module}{suffix}"].sum(0)
        assert relative_error(found, param.grad) < GRADIENT_TOLERANCE, name
    # The experts' outputs are equal, and so the routers have no gradient from the loss.
    assert grads_of["gpt_neox.layers.0.mlp.gate.weight"].abs().max() < 1e-5


# T, EP, sequence parallelism, dispatcher, form, recompute of the MoE layers
SPLITS = {
    2: [
        (2, 1, True, "allgather", "dropless", False),
        (2, 1, False, "allgather", "padded", True),
        (1, 2, False, "alltoall", "dropless", True),
        (1, 2, False, "allgather", "blocks", False),
        (1, 2, False, "alltoall", "padded", False),
    ],
    4: [(2, 2, True, "alltoall", "dropless", False), (2, 2, True, "allgather", "blocks", True)],
}


def trained(
    directory: Path, config, tensor: int, expert: int, sequence: bool, *, is_recomputed: bool = False, **options
) -> dict[str, torch.Tensor]:
    """Loss and full gradients of one model whose experts, biases included, differ."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert)
    moe = MoEConfig(4, moe_aux_loss_coeff=0.3, **options)
    memory = {"recompute_granularity": "selective", "recompute_modules": ("moe",)} if is_recomputed else {}
    model = upcycled(directory, config, sequence_parallel=sequence, moe=moe, **memory)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".experts." not in name:
                continue
            # Every expert and every column by a factor of its own, the same on all splits.
            size, rank = (
                parallel_state.get_expert_model_parallel_size(),
                parallel_state.get_expert_model_parallel_rank(),
            )
            factors = torch.tensor([1.0, -0.5, 0.7, 1.6]).chunk(size)[rank]
            param.mul_(factors.view(-1, *[1] * (param.dim() - 1)))
    loss = model(**batch()).loss
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    grads.bucket_allreduce_gradients(model)
    return {"loss": loss.detach(), **{name: full_gradient(param) for name, param in model.named_parameters()}}


def full_gradient(param: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of the full parameter, on every rank."""
    grad = param.grad.clone()
    copy_tensor_model_parallel_attributes(grad, param)
    grad = gather_experts(grad)
    return gathered(grad, grad)


@distributed(world_size=2, slow=[4])
def test_every_split_has_the_gradients_of_one_rank(tmp_path, world_size):
    config = gpt_neox_config()
    if parallel_state.get_global_rank() == 0:
        hugging_face(config).save_pretrained(tmp_path)
    dist.barrier()
    # All data-parallel ranks have the same batch: their mean is what each of them has alone.
    expected = trained(tmp_path, config, 1, 1, False)
    for tensor, expert, sequence, dispatcher, form, recompute in SPLITS[world_size]:
        options = {"moe_token_dispatcher_type": dispatcher, "is_recomputed": recompute, **FORMS[form]}
        found = trained(tmp_path, config, tensor, expert, sequence, **options)
        for name, value in expected.items():
            error = relative_error(found[name], value)
            bound = TOLERANCE if name == "loss" else GRADIENT_TOLERANCE
            assert error < bound, f"T={tensor} EP={expert} {dispatcher} {form}: {name} {error:.1e}"


@distributed(world_size=1)
def test_experts_of_a_random_model_differ_and_their_biases_are_zero():
    parallel_state.initialize_model_parallel()
    model = GPTNeoXMoEForCausalLM(upcycled_config(gpt_neox_config(), 4, 2))
    experts = model.gpt_neox.layers[1].mlp.experts
    assert torch.unique(experts.dense_h_to_4h.detach(), dim=0).size(0) == 4
    assert 0.1 < experts.dense_4h_to_h.std() < 0.3  # initializer_range 0.2
    assert not experts.dense_h_to_4h_bias.any() and not experts.dense_4h_to_h_bias.any()


@distributed(world_size=1)
def test_weight_decay_reaches_no_bias_of_an_expert():
    """They have two dimensions, as no other bias."""
    parallel_state.initialize_model_parallel()
    model = GPTNeoXMoEForCausalLM(upcycled_config(gpt_neox_config(), 4, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
            param.grad = torch.zeros_like(param)
    optimizer = MasterWeightOptimizer(list(model.parameters()), OptimizerConfig(weight_decay=0.5))
    optimizer.reduce_gradients()
    optimizer.step(lr=0.1)
    for name, param in model.named_parameters():
        is_vector = name.endswith("bias") or "layernorm" in name or "layer_norm" in name
        assert torch.equal(param.detach(), torch.full_like(param, 1.0 if is_vector else 1 - 0.1 * 0.5)), name


@distributed(world_size=1)
def test_refusals(tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()
    hugging_face(gpt_neox_config()).save_pretrained(tmp_path / "dense")
    config = upcycled_config(gpt_neox_config(), 4, 2)
    model = GPTNeoXMoEForCausalLM(config, device="meta")
    message = error_message(lambda: save_pretrained(model, tmp_path / "export"))
    assert_says(message, "num_moe_experts 4", "transformers' gpt_neox", "save_training_state")
    assert not (tmp_path / "export").exists()
    message = error_message(Convert(tmp_path / "dense", tmp_path / "moe", num_moe_experts=4))
    assert_says(message, "--num-moe-experts 4", "transformers has no gpt_neox", "nxd-memopt train")
    assert_says(error_message(lambda: parallel_model(config, mlp_tile_tokens=8)), "mlp_tile_tokens 8", "leave it out")
    message = error_message(lambda: GPTNeoXMoEForCausalLM(config, moe=MoEConfig(8), device="meta"))
    assert_says(message, "num_moe_experts 8", "GPTNeoXMoEConfig", "4")
