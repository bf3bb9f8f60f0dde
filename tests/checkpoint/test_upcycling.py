"""A LLaMA whose MLPs become experts: its outputs, its files, and what cannot be upcycled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralForCausalLM

from nxd_memopt.checkpoint.upcycling import upcycled_config
from nxd_memopt.convert import Convert
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.parallel_layers import parallel_state
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message, relative_error
from tests.reference_models import LLAMA3_ROPE, batch, hugging_face, llama_config, qwen3_config

# fp32 has 6e-8; the weights of a token's experts add up to 1 with such an error.
TOLERANCE = 1e-6


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


@distributed(world_size=[2])
def test_every_split_computes_what_the_dense_model_does(tmp_path, world_size):
    """T=2, then EP=2: each rank reads its columns for its experts."""
    from nxd_memopt.checkpoint import load_pretrained
    from nxd_memopt.checkpoint.upcycling import load_upcycled
    from tests.reference_models import parallel_model

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
    assert_says(error_message(Convert(tmp_path, tmp_path, moe_router_topk=3)), "--moe-router-topk", "--num-moe-experts")
    to_nxd = Convert(tmp_path, tmp_path, target_format="nxd", tensor_model_parallel_size=1, num_moe_experts=4)
    assert_says(error_message(to_nxd), "--num-moe-experts", "--to hf")
