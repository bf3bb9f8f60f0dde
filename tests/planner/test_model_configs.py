"""Model configs: transformers' values of what a config.json leaves out, and files that are none."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from nxd_memopt import plan_command
from nxd_memopt.planner.architectures import num_kv_heads
from nxd_memopt.planner.model_configs import with_defaults
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
    message = error_message(lambda: plan_command.main(["--model", str(tmp_path / "a.yaml"), "--device", "h200"]))
    assert_says(message, "section model")
    (tmp_path / "a.yaml").write_text("model: {config_overrides: {model_type: llama, hidden_sise: 64}, tokenizer: d}")
    message = error_message(lambda: plan_command.main(["--model", str(tmp_path / "a.yaml"), "--device", "h200"]))
    assert_says(message, "unknown key 'hidden_sise'", "model.config_overrides", "'hidden_size'")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 512, "num_attention_heads": 7}')
    message = error_message(lambda: plan_command.main(["--model", str(tmp_path), "--device", "h200"]))
    assert_says(message, "hidden_size 512", "num_attention_heads 7")
    config = {"model_type": "qwen3_moe", "mlp_only_layers": [1], "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = error_message(lambda: plan_command.main(["--model", str(tmp_path), "--device", "h200"]))
    assert_says(message, "dense layers", "is not planned")
