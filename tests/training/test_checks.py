"""Tests of values that look wrong and have a right result: 1e-4, ~, overridden sizes, a finished export."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter
from transformers import AutoConfig

from nxd_memopt.architectures.model_spec import rope_options
from nxd_memopt.backends import backend
from nxd_memopt.planner.hardware import device_named
from nxd_memopt.training.checks import require_applicable_memory, require_startable
from nxd_memopt.training.config.parsing import parse_config
from nxd_memopt.training.config.yaml_file import parse_yaml
from nxd_memopt.training.hf_overrides import config_from_overrides, override_config
from nxd_memopt.training.model import load_hf_config
from tests.deferred_transfers import DeferredTransfers
from tests.training.runs import LLAMA, run_here, write_config


def test_numbers_with_an_exponent_need_no_decimal_point(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    text = config.read_text(encoding="utf-8").replace("  lr: 0.01", "  lr: 1e-4")
    config.write_text(text.replace("    vocab_size", "    rms_norm_eps: 1e-5\n    vocab_size"), encoding="utf-8")
    parsed = parse_config(["--config", str(config), "--model.config-overrides.initializer-range", "2e-2"])
    assert parsed.optimizer.lr == 1e-4
    hf_config = load_hf_config(parsed.model)
    assert (hf_config.rms_norm_eps, hf_config.initializer_range) == (1e-5, 2e-2)


def test_yaml_that_is_not_a_number_stays_a_text() -> None:
    assert parse_yaml("[1e-4, 1E4, -2e3, 1.5e+2, 3, e5, 1e, 12-1e5]") == [
        1e-4,
        1e4,
        -2e3,
        150.0,
        3,
        "e5",
        "1e",
        "12-1e5",
    ]
    merged = parse_yaml("base: &b {lr: 1}\nother: {<<: *b, lr: 2}")
    assert merged["other"] == {"lr": 2}
    with pytest.raises(ValueError, match=r"line 2 has a list or mapping as a key"):
        parse_yaml("a: 1\n[1]: 2")


def test_a_leading_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = write_config(
        tmp_path, trainer={"output_dir": "~/run", "resume_from": "~/a"}, data={"dataset": "~/l.jsonl"}
    )
    parsed = parse_config(["--config", str(config), "--model.tokenizer", "~/tokenizer"])
    found = (parsed.trainer.output_dir, parsed.trainer.resume_from, parsed.data.dataset, parsed.model.tokenizer)
    assert found == tuple(str(tmp_path / name) for name in ("run", "a", "l.jsonl", "tokenizer"))
    pattern = parse_config(["--config", str(config), "--data.dataset", "./b//*.txt"])
    assert pattern.data.dataset == "./b//*.txt"


def test_sizes_that_follow_from_others_follow_overrides() -> None:
    """head_dim and KV heads are derived again, unless the file sets them; the RoPE frequency is kept."""
    plain = config_from_overrides("llama", {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 5e5})
    changed = override_config(plain, {"num_attention_heads": 8})
    assert (plain.head_dim, changed.head_dim, changed.num_key_value_heads) == (16, 8, 8)
    assert plain.num_attention_heads == 4
    grouped = config_from_overrides("llama", LLAMA)
    assert override_config(grouped, {"hidden_size": 48}).num_key_value_heads == 2
    assert override_config(plain, {"rope_theta": 1e6}).rope_parameters["rope_theta"] == 1e6
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    beside = AutoConfig.for_model("llama", original_max_position_embeddings=16)
    assert rope_options(override_config(beside, {"rope_parameters": yarn}))["original_max_position_embeddings"] == 64
    scaled = override_config(plain, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    assert (scaled.rope_parameters["rope_theta"], scaled.rope_parameters["factor"]) == (5e5, 2.0)
    older = override_config(scaled, {"rope_scaling": None})
    assert (older.rope_parameters["rope_theta"], older.rope_parameters["rope_type"]) == (5e5, "default")
    neox = config_from_overrides("gpt_neox", {"rotary_pct": 0.5})
    assert override_config(neox, {"rotary_pct": 1.0}).rope_parameters["partial_rotary_factor"] == 1.0
    phi3 = config_from_overrides("phi3", {"partial_rotary_factor": 0.5, "head_dim": 16})
    assert override_config(phi3, {"partial_rotary_factor": 0.75}).rope_parameters["partial_rotary_factor"] == 0.75


def test_an_earlier_export_of_the_run_is_replaced(tmp_path: Path) -> None:
    config = write_config(tmp_path, trainer={"max_steps": 2, "save_interval": "never"}, data={"eval_sequences": 0})
    assert run_here(config).returncode == 0
    first = (tmp_path / "run" / "export" / "model.safetensors").read_bytes()
    assert run_here(config, "--optimizer.lr", "0.02").returncode == 0
    assert (tmp_path / "run" / "export" / "model.safetensors").read_bytes() != first


def _gguf(directory: Path) -> Path:
    (directory / "model").mkdir()
    writer = GGUFWriter(directory / "model" / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return write_config(directory, model={"pretrained": str(directory / "model"), "config_overrides": {}})


@pytest.mark.parametrize(
    ("package", "prepare", "extra"),
    [
        ("yaml", write_config, "train"),
        ("datasets", write_config, "train"),
        ("gguf", _gguf, "gguf"),
    ],
)
def test_a_missing_package_is_one_line_with_its_extra(
    package: str, prepare: Callable[[Path], Path], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepare(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)  # import fails, and find_spec finds nothing
    outcome = run_here(config)
    lines = outcome.stderr.splitlines()
    assert outcome.returncode == 2 and len(lines) == 1, outcome.stderr[-2000:]
    assert lines[0].startswith("error: ") and package in lines[0] and f"pip install 'nxd_memopt[{extra}]'" in lines[0]
    assert not (tmp_path / "run").exists()


REFUSED_TECHNIQUES = {
    "activations_on_a_cpu": ({"recompute_granularity": "full", "cpu_offloading_activations": True}, "NVIDIA GPU"),
    "layers": ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}, "2 layers"),
    "groups": ({"attention_head_groups": 4}, "attention_head_groups 4 does not divide"),
    "attention": ({"attention_backend": "cudnn"}, "attention_backend 'cudnn' cannot be met"),
}


@pytest.mark.parametrize("name", REFUSED_TECHNIQUES)
def test_a_technique_that_cannot_be_applied_is_refused_before_tokenizing(name: str, tmp_path: Path) -> None:
    memory, message = REFUSED_TECHNIQUES[name]
    outcome = run_here(write_config(tmp_path, memory=memory, data={"isolate_documents": False}))
    assert outcome.returncode == 2 and message in outcome.stderr and outcome.stderr.count("\n") == 1, outcome.stderr
    assert not (tmp_path / "run").exists()


def test_weights_on_the_host_are_checked_without_moving_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With host transfers the weights' options are valid or too many, and neither needs memory."""
    monkeypatch.setattr(type(backend), "host_transfers", lambda self: DeferredTransfers(available_bytes=0))

    def check(number: int, **options: object) -> None:
        memory = options | {"cpu_offloading_num_layers": number}
        config = parse_config(["--config", str(write_config(tmp_path, memory=memory))])
        require_applicable_memory(config, load_hf_config(config.model))

    weights = {"cpu_offloading_weights": True}
    activations = {"cpu_offloading_activations": True, "recompute_granularity": "full"}
    for options in (weights, activations, weights | activations):
        check(2, **options)
        with pytest.raises(ValueError, match="cpu_offloading_num_layers 3 exceeds the model's 2 layers"):
            check(3, **options)


def test_recompute_that_a_stage_cannot_have_names_the_rank(tmp_path: Path) -> None:
    memory = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": [2, 1]}
    model = {"config_overrides": LLAMA | {"num_hidden_layers": 3}}
    config = parse_config(["--config", str(write_config(tmp_path, memory=memory, parallel=parallel, model=model))])
    with pytest.raises(ValueError, match="rank 1 of the pipeline: recompute_num_layers 2 exceeds the 1 layers to"):
        require_startable(config, load_hf_config(config.model), device_named("h200"), 2)
