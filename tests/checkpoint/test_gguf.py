"""GGUF files whose weights or frequencies transformers would read incompletely, and one that it reads."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, RopeScalingType
from transformers import LlamaConfig, LlamaForCausalLM

from nxd_memopt.checkpoint import load_config, load_pretrained
from nxd_memopt.checkpoint.huggingface.gguf_metadata import BLOCKS
from nxd_memopt.checkpoint.huggingface.tokenizers import load_tokenizer
from nxd_memopt.commands.convert import Convert
from nxd_memopt.models import model_class
from tests.reference import assert_says, error_message

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.5,
}
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    **{f"model.layers.0.{theirs}.weight": f"blk.0.{name}.weight" for theirs, name in PARTS.items()},
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of query and key in the order of GGUF files: pairs of dimensions are neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(directory: Path, *, left_out: str = "", added: str = "", scaling: RopeScalingType | None = None):
    """Write a LLaMA with random weights; return transformers' model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    writer = GGUFWriter(directory / "model.gguf", "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(32)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(4.0)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleaved(values, 2 if "q_proj" in name else 1)
        if NAMES[name] != left_out:
            writer.add_tensor(NAMES[name], np.ascontiguousarray(values))
    if added:
        writer.add_tensor(added, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def load(directory: Path) -> torch.nn.Module:
    model = model_class("llama")(load_config(directory)).eval()
    load_pretrained(model, directory)
    return model


def test_a_complete_file_has_the_models_logits(tmp_path):
    reference = write(tmp_path, scaling=RopeScalingType.NONE)
    ids = torch.arange(32).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path)(ids).logits, reference(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("left", [1, 0.02], ids=["a byte less", "header"])
def test_a_file_that_is_cut_short_is_said_to_be(left, tmp_path):
    """Before anything is converted, whoever reads it."""
    write(tmp_path)
    gguf = tmp_path / "model.gguf"
    os.truncate(gguf, gguf.stat().st_size - 1 if left == 1 else int(left * gguf.stat().st_size))
    for action in (lambda: load(tmp_path), lambda: load_tokenizer(str(tmp_path))):
        assert_says(
            error_message(action), "model.gguf is not a readable GGUF file: it is cut short", "download it again"
        )


def test_sizes_of_blocks_are_those_of_the_gguf_package():
    assert all(GGML_QUANT_SIZES[GGMLQuantizationType(code)] == block for code, block in BLOCKS.items())


def test_a_gguf_file_is_told_to_pass_its_directory(tmp_path):
    write(tmp_path)
    gguf = tmp_path / "model.gguf"
    for action in (Convert(gguf, tmp_path / "out"), lambda: load_tokenizer(str(gguf))):
        assert_says(error_message(action), f"{gguf} is a file: pass its directory")


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"left_out": "blk.0.ffn_up.weight"}, ("lacks 1 tensors of a llama", "mlp.up_proj.weight")),
        ({"added": "blk.0.attn_q.bias"}, ("1 biases that a llama", "blk.0.attn_q.bias")),
        ({"scaling": RopeScalingType.LINEAR}, ("RoPE scaling 'linear'", "config.json")),
        ({"added": "rope_freqs.weight"}, ("RoPE scaling 'llama3'", "config.json")),
    ],
    ids=str,
)
def test_what_transformers_would_read_incompletely_is_refused(options, facts, tmp_path):
    """Missing weights would be random ones, and biases and scaled frequencies would be dropped."""
    write(tmp_path, **options)
    assert_says(error_message(lambda: load(tmp_path)), "model.gguf", *facts)
