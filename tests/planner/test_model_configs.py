"""Model configs: transformers' values of what a config.json leaves out, and files that are none."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from nxd_memopt.architectures.configs import with_defaults
from nxd_memopt.architectures.model_spec import num_kv_heads
from nxd_memopt.certify.command import read
from nxd_memopt.commands.plan import command as plan_command
from nxd_memopt.config import HIDDEN_ACTS
from nxd_memopt.ops.activation import ACTIVATIONS
from tests.reference import assert_says, error_message


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_kv_heads_that_a_config_leaves_out_are_transformers(model_type):
    heads = {"hidden_size": 1024, "num_attention_heads": 64}
    theirs = AutoConfig.for_model(model_type, **heads).num_key_value_heads
    assert num_kv_heads(with_defaults({"model_type": model_type, **heads})) == theirs


def test_files_that_are_no_model_are_refused(tmp_path):
    for content in ("no json", "[]", '{"hidden_size": 3}'):
        (tmp_path / "config.json").write_text(content)
        message = error_message(lambda: plan_command.main(["--model", str(tmp_path), "--device", "h200"]))
        assert_says(message, "config.json")
    (tmp_path / "config.json").unlink()
    message = error_message(lambda: plan_command.main(["--model", str(tmp_path), "--device", "h200"]))
    assert_says(message, f"{tmp_path} has no config.json", "directory of a Hugging Face model")
    (tmp_path / "a.yaml").write_text("data: {seq_length: 8}")
    message = error_message(lambda: plan_command.main(["--config", str(tmp_path / "a.yaml"), "--device", "h200"]))
    assert_says(message, "model.pretrained is not set")
    (tmp_path / "a.yaml").write_text("model: {config_overrides: {model_type: llama, hidden_sise: 64}, tokenizer: d}")
    message = error_message(lambda: plan_command.main(["--config", str(tmp_path / "a.yaml"), "--device", "h200"]))
    assert_says(message, "unknown key 'hidden_sise'", "model.config_overrides", "'hidden_size'")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 512, "num_attention_heads": 7}')
    message = error_message(lambda: plan_command.main(["--model", str(tmp_path), "--device", "h200"]))
    assert_says(message, "hidden_size 512", "num_attention_heads 7")
    config = {"model_type": "qwen3_moe", "mlp_only_layers": [1], "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = error_message(lambda: plan_command.main(["--model", str(tmp_path), "--device", "h200"]))
    assert_says(message, "dense layers", "is not planned")


VALUES = {
    "hidden_act": ({"hidden_act": "silo"}, ("hidden_act", "'silo'", "did you mean 'silu'")),
    "rope": ({"rope_parameters": {"rope_type": "proportional"}}, ("rope_type", "'proportional'", "llama3")),
    "rope of older files": ({"rope_scaling": {"type": "su"}}, ("rope_type", "'su'")),
    "rope without a name": ({"rope_scaling": "linear"}, ("rope_parameters", "'linear'", "no mapping")),
    "dropout": ({"attention_dropout": 1.5}, ("attention_dropout", "below 1", "got 1.5")),
    "quantization": ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config", "'fp8'")),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_models_refuse_are_not_planned_and_not_certified(name, tmp_path):
    values, words = VALUES[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | values))
    message = error_message(lambda: plan_command.main(["--model", str(tmp_path), "--device", "h200"]))
    assert_says(message, *words)
    message = error_message(lambda: read(["--model", str(tmp_path), "--backend", "cpu"]))
    assert_says(message, *words)


def test_the_names_of_activations_are_those_of_the_functions():
    assert tuple(ACTIVATIONS) == HIDDEN_ACTS


def test_published_ropes_are_planned(tmp_path):
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    for scaling in (None, rope, {"type": "linear", "factor": 2.0}):
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "llama", "max_position_embeddings": 2048, "rope_scaling": scaling})
        )
        assert plan_command.main(["--model", str(tmp_path), "--device", "h200"]) == 0
