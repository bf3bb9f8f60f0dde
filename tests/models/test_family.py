"""Mistral, Qwen2 and Qwen3: files in both directions, and windows of old configs."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.architectures.parameters import parameters
from nxd_memopt.checkpoint import load_config, load_pretrained, save_pretrained
from nxd_memopt.config import MemoryConfig
from nxd_memopt.models import model_class
from tests.reference import assert_says, error_message
from tests.reference_models import (
    batch,
    gpt_neox_config,
    hugging_face,
    llama_config,
    mistral_config,
    qwen2_config,
    qwen3_config,
)

FAMILY = {
    "mistral": mistral_config,
    "qwen2": lambda: qwen2_config(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": lambda: qwen3_config(tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", FAMILY)
def test_hugging_face_directories_both_ways(name, tmp_path):
    reference = hugging_face(FAMILY[name]()).eval()
    reference.save_pretrained(tmp_path / "theirs")
    config = load_config(tmp_path / "theirs")
    ours = model_class(config.model_type)(config).eval()
    load_pretrained(ours, tmp_path / "theirs")
    ids = batch()["input_ids"]
    torch.testing.assert_close(ours(ids).logits, reference(ids).logits, atol=2e-5, rtol=1e-5)
    save_pretrained(ours, tmp_path / "ours")
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.architectures == [type(again).__name__]
    assert torch.equal(again.eval()(ids).logits, reference(ids).logits)
    names = {each.name: each.shape for each in parameters(model_spec(config))}
    assert names == {key: tuple(value.shape) for key, value in reference.named_parameters()}


@pytest.mark.parametrize("name", FAMILY)
def test_windows_of_a_file_are_those_of_transformers(name, tmp_path):
    """A config.json of before ``layer_types``, as published, and the object that transformers makes of it."""
    content = json.loads(FAMILY[name]().to_json_string())
    content.pop("layer_types", None)
    config = type(FAMILY[name]()).from_dict(content)
    kinds = getattr(config, "layer_types", ["sliding_attention"] * config.num_hidden_layers)
    windows = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert model_spec(content).windows == model_spec(config).windows == windows
    expected = {"mistral": (5, 5), "qwen2": (None, 4), "qwen3": (None, None)}
    assert windows == expected[name]


def test_a_stored_window_that_is_off_limits_nothing():
    content = json.loads(qwen2_config().to_json_string()) | {"sliding_window": 4, "use_sliding_window": False}
    content.pop("layer_types")
    assert model_spec(content).windows == (None, None)


def test_kept_attention_needs_a_kernel_with_windows():
    memory = {"recompute_granularity": "full", "recompute_keep_core_attn": True}
    message = error_message(lambda: model_class("mistral")(mistral_config(), memory=MemoryConfig(**memory)))
    assert_says(message, "recompute_keep_core_attn", "tiled")


def test_an_export_has_megatrons_number_of_kv_heads_under_transformers_name(tmp_path):
    model = model_class("llama")(llama_config(num_key_value_heads=8, num_query_groups=2)).eval()
    save_pretrained(model, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = batch()["input_ids"]
    torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=2e-5, rtol=1e-5)


def test_a_null_number_of_kv_heads_is_none_of_gpt_neox():
    """As transformers loads it: GPT-NeoX has no such option."""
    content = json.loads(gpt_neox_config().to_json_string())
    assert model_spec(content | {"num_key_value_heads": None}) == model_spec(content)
