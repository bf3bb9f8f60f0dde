"""A LLaMA whose MLPs become experts: its outputs, its files, and what cannot be upcycled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralForCausalLM, Qwen2MoeForCausalLM

from nxd_memopt.checkpoint import load_pretrained
from nxd_memopt.checkpoint.huggingface.upcycling import load_upcycled, upcycled_config
from nxd_memopt.commands.convert import Convert
from nxd_memopt.models import model_class
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.modules.moe.hf_options import with_shared_expert
from nxd_memopt.parallel_layers import grads, parallel_state
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message, relative_error
from tests.reference_models import (
    LLAMA3_ROPE,
    batch,
    gathered,
    hugging_face,
    llama_config,
    mixtral_config,
    parallel_model,
    qwen3_config,
)

# fp32 has 6e-8; the weights of a token's experts add up to 1 with such an error.
TOLERANCE = 1e-6
# Gradients are sums over tokens and ranks in another order.
GRADIENT_TOLERANCE = 2e-5


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "head_dim": 12, "rope_parameters": LLAMA3_ROPE}])
def test_transformers_computes_the_same_with_the_written_files(tmp_path: Path, changes: dict) -> None:
    dense = hugging_face(llama_config(**changes)).eval()
    dense.save_pretrained(tmp_path / "dense")
    Convert(tmp_path / "dense", tmp_path / "moe", num_moe_experts=6, moe_router_topk=3)()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    assert isinstance(model, MixtralForCausalLM)
    assert (model.config.num_local_experts, model.config.num_experts_per_tok) == (6, 3)
    ids = batch()["input_ids"]
    with torch.no_grad():
        assert relative_error(model(ids).logits, dense(ids).logits) < TOLERANCE
    # Routers of different layers and experts differ, and depend on the seed alone.
    routers = torch.stack([layer.mlp.gate.weight for layer in model.model.layers]).flatten(0, 1)
    assert torch.unique(routers, dim=0).size(0) == 2 * 6
    assert 0.1 < routers.std() < 0.3  # initializer_range 0.2
    Convert(tmp_path / "dense", tmp_path / "again", num_moe_experts=6, moe_router_topk=3)()
    Convert(tmp_path / "dense", tmp_path / "other", num_moe_experts=6, moe_router_topk=3, seed=5)()
    again, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("again", "other"))
    assert torch.equal(again.model.layers[1].mlp.gate.weight, model.model.layers[1].mlp.gate.weight)
    assert not torch.equal(other.model.layers[1].mlp.gate.weight, model.model.layers[1].mlp.gate.weight)


def test_a_gated_shared_expert_is_written_as_a_qwen2_moe(tmp_path: Path) -> None:
    """Its down projection is zero: the first forward is the dense model's. Then every weight of it counts."""
    dense = hugging_face(llama_config(head_dim=12)).eval()
    dense.save_pretrained(tmp_path / "dense")
    Convert(tmp_path / "dense", tmp_path / "moe", num_moe_experts=4, moe_shared_expert_intermediate_size=20)()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    assert isinstance(model, Qwen2MoeForCausalLM)
    ids = batch()["input_ids"]
    with torch.no_grad():
        assert relative_error(model(ids).logits, dense(ids).logits) < TOLERANCE
    shared = model.model.layers[1].mlp.shared_expert
    assert 0.1 < shared.gate_proj.weight.std() < 0.3 and not shared.down_proj.weight.any()
    assert not torch.equal(shared.gate_proj.weight, shared.up_proj.weight)
    assert not torch.equal(shared.gate_proj.weight, model.model.layers[0].mlp.shared_expert.gate_proj.weight)


@pytest.mark.parametrize(("gate", "window"), [(False, 5), (True, None), (True, 5)])
def test_a_model_with_experts_gets_a_shared_one(tmp_path: Path, gate: bool, window: int | None) -> None:
    """With a gate Mixtral's files are read by a Qwen2-MoE: other names, the same function."""
    parallel_state.destroy_model_parallel()
    config = mixtral_config(sliding_window=window)
    own = hugging_face(config).eval()
    own.save_pretrained(tmp_path)
    model = model_class("qwen2_moe" if gate else "mixtral")(with_shared_expert(config, 20, gate=gate)).eval()
    load_upcycled(model, tmp_path, seed=3)
    with torch.no_grad():
        assert relative_error(model(**batch()).loss, own(**batch()).loss - aux_loss(own)) < TOLERANCE
        model.model.layers[0].mlp.shared_expert.down_proj.weight.fill_(0.1)
        assert abs(model(**batch()).loss - own(**batch()).loss + aux_loss(own)) > 1e-3


def aux_loss(model: torch.nn.Module) -> torch.Tensor:
    return model.config.router_aux_loss_coef * model(**batch()).aux_loss


@pytest.mark.slow
@distributed(world_size=[2])
def test_a_shared_expert_is_the_same_on_every_split(tmp_path, world_size):
    """Two steps from one dense model at T=2 with SP and at EP=2: equal losses and shared weights."""
    config = llama_config()
    if parallel_state.get_global_rank() == 0:
        hugging_face(config).save_pretrained(tmp_path)
    torch.distributed.barrier()
    results = []
    for tensor, expert in ((2, 1), (1, 2)):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert)
        upcycled = upcycled_config(config, 4, 2, shared_width=20, shared_gate=True)
        model = parallel_model(upcycled, sequence_parallel=True)
        load_upcycled(model, tmp_path, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(**batch()).loss
            loss.backward()
            grads.allreduce_sequence_parallel_gradients(model)
            grads.bucket_allreduce_gradients(model)
            optimizer.step()
        mlp = model.model.layers[0].mlp
        shared = [gathered(param.detach(), param) for param in mlp.shared_expert.parameters()]
        results.append([model(**batch()).loss.detach(), mlp.shared_expert_gate.weight.detach(), *shared])
    assert results[0][2].abs().max() > 0 and len(results[0]) == 5
    for first, second in zip(*results, strict=True):
        assert relative_error(first, second) < GRADIENT_TOLERANCE


@pytest.mark.slow
@distributed(world_size=2)
def test_every_split_computes_what_the_dense_model_does(tmp_path, world_size):
    """T=2, then EP=2: each rank reads its columns for its experts."""
    config = llama_config()
    if parallel_state.get_global_rank() == 0:
        hugging_face(config).save_pretrained(tmp_path)
    torch.distributed.barrier()
    routers = []
    for tensor, expert in ((2, 1), (1, 2)):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert)
        model = parallel_model(upcycled_config(config, 4, 2), sequence_parallel=True).eval()
        load_upcycled(model, tmp_path, seed=3)
        routers.append(model.model.layers[0].mlp.gate.weight.detach().clone())
        loss = model(**batch()).loss
        if expert == 1:
            dense = LlamaForCausalLM(config).eval()
            load_pretrained(dense, tmp_path)
            expected = dense(**batch()).loss
        assert relative_error(loss, expected) < TOLERANCE
    assert torch.equal(*routers)


def test_refusals(tmp_path: Path) -> None:
    qwen = error_message(lambda: upcycled_config(qwen3_config(), 4, 2))
    assert_says(qwen, "num_moe_experts 4", "'qwen3'", "LLaMA or GPT-NeoX")
    assert_says(error_message(lambda: upcycled_config(llama_config(mlp_bias=True), 4, 2)), "'mlp_bias'", "no biases")
    # Also with the default's value.
    for top_k in (2, 3):
        message = error_message(Convert(tmp_path, tmp_path, moe_router_topk=top_k))
        assert_says(message, "--moe-router-topk", "--num-moe-experts")
    to_nxd = Convert(tmp_path, tmp_path, target_format="nxd", tensor_model_parallel_size=1, num_moe_experts=4)
    assert_says(error_message(to_nxd), "--num-moe-experts", "--to hf")


def test_tensors_of_an_mlp_that_are_not_copied_are_named(tmp_path: Path) -> None:
    """Biases that the config does not have, and the scales of quantized weights."""
    dense = hugging_face(llama_config(mlp_bias=True))
    dense.save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text()) | {"mlp_bias": False}
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    message = error_message(lambda: Convert(tmp_path / "dense", tmp_path / "moe", num_moe_experts=4)())
    assert_says(message, "has 6 that the model lacks", "mlp.down_proj.bias")
