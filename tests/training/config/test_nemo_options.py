"""Tests that a NeMo or Megatron section pastes in: equal options, and everything else reported at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nxd_memopt.training.config.nemo.model import SIZES
from nxd_memopt.training.config.parsing import config_from_mapping, read_yaml
from nxd_memopt.training.model import load_hf_config
from tests.training.chats import tokenizer
from tests.training.runs import losses, run_here

# Options in the order and the spelling of NeMo's files, with sizes for a test.
MODEL: dict[str, Any] = {
    "mcore_gpt": True,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "rampup_batch_size": None,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "encoder_seq_length": 24,
    "max_position_embeddings": "${.encoder_seq_length}",
    "num_layers": 2,
    "hidden_size": 24,
    "ffn_hidden_size": 36,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "init_method_std": 0.05,
    "use_scaled_init_method": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "kv_channels": None,
    "apply_query_key_layer_scaling": True,
    "normalization": "rmsnorm",
    "layernorm_epsilon": 1e-5,
    "bias": False,
    "activation": "fast-swiglu",
    "position_embedding_type": "rope",
    "rotary_percentage": 1.0,
    "share_embeddings_and_output_weights": False,
    "tokenizer": {"library": "huggingface", "type": "TOKENIZER", "use_fast": True},
    "native_amp_init_scale": 4294967296,
    "hysteresis": 2,
    "megatron_amp_O2": True,
    "seed": 7,
    "activations_checkpoint_granularity": None,
    "activations_checkpoint_method": "block",
    "activations_checkpoint_num_layers": 0,
    "sequence_parallel": False,
    "transformer_engine": True,
    "fp8": False,
    "optim": {
        "name": "distributed_fused_adam",
        "lr": 2e-4,
        "weight_decay": 0.01,
        "betas": [0.9, 0.98],
        "bucket_cap_mb": 125,
        "sched": {"name": "CosineAnnealing", "warmup_steps": 2, "constant_steps": 3, "min_lr": 2e-5},
    },
    "data": {
        "data_impl": "mmap",
        "seq_length": "${model.encoder_seq_length}",
        "data_prefix": [1.0, "/data/my_text_document"],
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    },
}
# What differs in the section of a GPT-NeoX.
GPT_NEOX: dict[str, Any] = {
    "normalization": "layernorm",
    "bias": True,
    "activation": "gelu",
    "bias_activation_fusion": False,
    "transformer_block_type": "gpt_j",
    "rotary_percentage": 0.5,
    "num_query_groups": None,
}
TRAINER = {"devices": 8, "precision": 32, "logger": False, "max_epochs": -1, "max_steps": 10, "gradient_clip_val": 0.5}


def mapping(**model: Any) -> dict[str, Any]:
    return {"model": MODEL | model, "trainer": dict(TRAINER)}


def test_a_computed_reference_is_named() -> None:
    """Of OmegaConf's resolvers, in files for clusters: the number of steps, from that of hosts."""
    with pytest.raises(ValueError, match=r"model.seed '\$\{multiply:.*' is computed by 'multiply', .* write its value"):
        config_from_mapping(mapping(seed="${multiply:${trainer.devices}, 2}"))


@pytest.mark.parametrize("options", [{}, {"window_size": [4, 0]}, {"qkv_bias": True}])
def test_a_model_without_query_groups_has_as_many_kv_heads_as_heads(options: dict[str, Any]) -> None:
    """transformers' Mistral has 8 by default, and its Qwen2 32."""
    sizes = {"num_query_groups": None, "hidden_size": 64, "num_attention_heads": 16, "kv_channels": None}
    found = load_hf_config(config_from_mapping(mapping(**sizes, vocab_size=257, **options)).model)
    assert found.num_key_value_heads == found.num_attention_heads == 16


def test_what_optim_and_data_leave_out() -> None:
    """AdamW's decay is torch's, Adam has none, and documents attend to each other without a data section too."""
    for name, decay in (("adamw", 0.01), ("adam", 0.0), ("fused_adam", 0.0)):
        config = config_from_mapping(mapping(optim={"name": name, "lr": 1e-3}, data=None))
        assert config.optimizer.weight_decay == decay and not config.data.isolate_documents


def test_constant_steps_count_from_the_last_step() -> None:
    assert config_from_mapping(mapping()).optimizer.decay_steps == 7
    # Without any, the decay ends at the last step, also if the command line changes it.
    values = mapping(optim=MODEL["optim"] | {"sched": {"name": "CosineAnnealing", "constant_steps": 0}})
    config = config_from_mapping(values)
    longer = replace(config, trainer=replace(config.trainer, max_steps=100))
    assert (config.optimizer.decay_steps, config.decay_steps, longer.decay_steps) == (None, 10, 100)
    values = mapping()
    values["trainer"]["max_steps"] = 3
    with pytest.raises(ValueError, match=r"constant_steps 3 needs a larger trainer\.max_steps, got 3: set it"):
        config_from_mapping(values)


def test_a_section_pastes_in(tmp_path: Path) -> None:
    tokenizer(None).save_pretrained(tmp_path)
    config = config_from_mapping(mapping(tokenizer={"library": "huggingface", "type": str(tmp_path)}))
    sizes = load_hf_config(config.model)
    assert (sizes.model_type, sizes.vocab_size, sizes.num_hidden_layers, sizes.intermediate_size) == (
        "llama",
        257,
        2,
        36,
    )
    assert (sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim) == (6, 2, 4)
    assert (sizes.rms_norm_eps, sizes.initializer_range, sizes.tie_word_embeddings) == (1e-5, 0.05, False)
    assert sizes.max_position_embeddings == 24 == config.data.seq_length
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (2e-4, (0.9, 0.98), 0.01)
    assert config.optimizer.min_lr_ratio == pytest.approx(0.1)
    assert (config.optimizer.warmup_steps, config.decay_steps, config.optimizer.clip_grad) == (2, 7, 0.5)
    assert config.data_parallel.sharding == "zero1" and config.trainer.precision == "32-true"
    assert config.data.dataset == "/data/my_text_document.idx" and config.data.isolate_documents is False
    assert (config.trainer.seed, config.memory.recompute_granularity) == (7, None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"window_size": [16, 0]}, {"model_type": "mistral", "sliding_window": 16}),
        ({"window_size": None, "mcore_customization_config": {"parallel_attention": False}}, {"model_type": "llama"}),
        ({"qkv_bias": True, "override_vocab_size": 300}, {"model_type": "qwen2", "vocab_size": 300}),
    ],
)
def test_others_of_the_llama_family(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    tokenizer(None).save_pretrained(tmp_path)
    library = {"tokenizer": {"library": "huggingface", "type": str(tmp_path)}}
    sizes = load_hf_config(config_from_mapping(mapping(**library, **changes)).model)
    assert {name: getattr(sizes, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"use_parallel_residual": True, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "hidden_dropout": 0.0}),
        ({"transformer_block_type": "pre_ln"}, {"use_parallel_residual": False}),
        # NeMo's kernel of bias and activation computes GeLU by tanh.
        (
            {"bias_activation_fusion": True, "hidden_dropout": 0.25},
            {"hidden_act": "gelu_pytorch_tanh", "hidden_dropout": 0.25},
        ),
    ],
)
def test_layer_norms_are_gpt_neox(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    tokenizer(None).save_pretrained(tmp_path)
    section = {"tokenizer": {"library": "huggingface", "type": str(tmp_path)}, "rotary_base": 5000} | GPT_NEOX | changes
    without = {name: value for name, value in mapping(**section)["model"].items() if value is not None}
    sizes = load_hf_config(config_from_mapping({"model": without, "trainer": dict(TRAINER)}).model)
    assert (sizes.model_type, sizes.attention_bias, sizes.tie_word_embeddings) == ("gpt_neox", True, False)
    assert (sizes.rope_parameters["partial_rotary_factor"], sizes.rope_parameters["rope_theta"]) == (0.5, 5000)
    assert {name: getattr(sizes, name) for name in expected} == expected


def test_scaled_positions_are_those_of_llama_3_1(tmp_path: Path) -> None:
    tokenizer(None).save_pretrained(tmp_path)
    library = {"tokenizer": {"library": "huggingface", "type": str(tmp_path)}}
    model = config_from_mapping(mapping(**library, scale_positional_embedding=True, rotary_base=500000.0)).model
    rope = load_hf_config(model).rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("llama3", 500000.0, 8.0)
    assert (rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]) == (1, 4, 8192)


def test_options_next_to_the_sections() -> None:
    aws_keys = {
        "enable_recovery_time_instrumentation": False,
        "enable_checkpoint_removal_protection": True,
        "async_checkpointing": True,
        "restore_from_path": None,
    }
    config = config_from_mapping({**aws_keys, **mapping(precision="${trainer.precision}")})
    assert config.trainer.async_save and config.trainer.precision == "32-true"
    with pytest.raises(ValueError, match="restore_from_path is not supported"):
        config_from_mapping({**mapping(), "restore_from_path": "a.nemo"})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_kv_heads": 3}, "model.num_kv_heads 3 contradicts 2: write one of num_query_groups, num_kv_heads"),
        ({"qkv_bias": True, "window_size": [4, 0]}, "model: an attention window with qkv_bias is not supported"),
        (
            {"qkv_bias": True, "scale_positional_embedding": True},
            "model: qkv_bias with scale_positional_embedding is not supported",
        ),
        ({"use_scaled_init_method": None}, "model.use_scaled_init_method is not given, and NeMo's default is True"),
        (
            {"optim": {"name": "adam", "weight_decay": 0.1}},
            "model.optim.name 'adam' with weight_decay 0.1 is not supported",
        ),
        ({"normalization": "layernorm1p"}, "model.normalization 'layernorm1p' is not supported: only 'rmsnorm' is"),
        ({"normalization": "layernorm"}, "swiglu' is not supported: only 'gelu' or None is"),
        (GPT_NEOX | {"kv_channels": 8}, "model.kv_channels 8 is not supported with normalization 'layernorm': 6 heads"),
        ({"tokenizer": {"library": "sentencepiece", "model": "a.model"}}, "model.tokenizer.library 'sentencepiece'"),
        ({"optim": {"name": "muon"}}, "model.optim.name 'muon' is not supported"),
        ({"optim": {"lr": 1e-4, "sched": {"name": "WarmupHold"}}}, "model.optim.sched.name 'WarmupHold'"),
        ({"data": {"data_prefix": [0.5, "a", 0.5]}}, "data_prefix [0.5, 'a', 0.5] is neither a path nor pairs"),
        ({"data": {"splits_string": "900,50,50"}}, "model.data.splits_string '900,50,50' is not supported"),
        ({"hidden_size": "${.width}"}, "model.hidden_size '${.width}' refers to nothing"),
        ({"hidden_size": "${.ffn_hidden_size}", "ffn_hidden_size": "${.hidden_size}"}, "refers to itself: write its"),
        ({"optim": {"lr": 1e-3, "sched": {"min_lr": "${.least}"}}}, "model.optim.sched.min_lr '${.least}' refers"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as raised:
        config_from_mapping(mapping(**changes))
    assert says in str(raised.value)


def test_everything_wrong_is_reported_at_once(tmp_path: Path) -> None:
    values = mapping(normalization="layernorm1p", bias=True, num_leyers=3) | {
        "exp_manager": {"name": "a"},
        "optimiser": {},
    }
    values["optimizer"] = {"lr": "fast"}
    values["trainer"] |= {"limit_val_batches": 50, "max_stebs": 3}
    path = tmp_path / "nemo.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.raises(ValueError, match="8 problems:\n- ") as raised:
        read_yaml(path)
    for part in (
        "exp_manager is not supported",
        "model.normalization",
        "model.bias",
        "'num_leyers'",
        "'optimiser' in the configuration: did you mean 'optimizer'",
        "trainer.limit_val_batches is not supported: see data.eval_sequences",
        "'max_stebs' in trainer: did you mean 'max_steps'",
        "optimizer.lr must be float",
    ):
        assert part in str(raised.value), part


@pytest.mark.parametrize("is_gpt_neox", [False, True])
def test_a_pasted_section_trains_the_model_of_these_sizes(is_gpt_neox: bool, tmp_path: Path) -> None:
    """Losses are those of the same options under Hugging Face's names."""
    tokenizer(None).save_pretrained(tmp_path / "tokenizer")
    section = MODEL | GPT_NEOX if is_gpt_neox else MODEL
    pasted = {name: value for name, value in section.items() if name != "data"}
    pasted["tokenizer"] = {"library": "huggingface", "type": str(tmp_path / "tokenizer")}
    trainer = TRAINER | {"output_dir": str(tmp_path / "pasted")}
    _run(tmp_path, {"model": pasted, "trainer": trainer})
    sizes = {theirs: section[name] for name, theirs in SIZES.items() if section.get(name) is not None}
    sizes |= {"max_position_embeddings": 24, "vocab_size": 257, "model_type": "llama"}
    if is_gpt_neox:
        sizes["layer_norm_eps"] = sizes.pop("rms_norm_eps")
        sizes |= {"model_type": "gpt_neox", "rotary_pct": 0.5, "use_parallel_residual": True, "hidden_act": "gelu"}
    plain = {
        "model": {"tokenizer": str(tmp_path / "tokenizer"), "config_overrides": sizes},
        "data": {"seq_length": 24, "micro_batch_size": 2, "global_batch_size": 4},
        "optimizer": {
            "lr": 2e-4,
            "weight_decay": 0.01,
            "betas": [0.9, 0.98],
            "warmup_steps": 2,
            "decay_steps": 7,
            "min_lr_ratio": 0.1,
            "clip_grad": 0.5,
        },
        "trainer": {"max_steps": 10, "seed": 7, "output_dir": str(tmp_path / "plain")},
    }
    _run(tmp_path, plain)
    assert losses(tmp_path / "pasted") == losses(tmp_path / "plain")


def _run(path: Path, values: dict[str, Any]) -> None:
    (path / "t.txt").write_text("some text of a few words. " * 300, encoding="utf-8")
    values["data"] = values.get("data", {}) | {"dataset": str(path / "t.txt"), "eval_sequences": 0}
    values["trainer"] |= {"export": False}
    (path / "c.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    outcome = run_here(path / "c.yaml")
    assert outcome.returncode == 0, outcome.stderr


def test_paths_that_are_named_twice_have_both_shares() -> None:
    prefix = [0.3, "/d/first", 0.5, "/d/second", 0.2, "/d/first"]
    mixture = config_from_mapping(mapping(data={"data_prefix": prefix})).data.mixture
    assert mixture == pytest.approx({"/d/first.idx": 0.5, "/d/second.idx": 0.5})
    assert config_from_mapping(mapping(data={"data_prefix": [1.0, "/d/first"]})).data.dataset == "/d/first.idx"


def test_a_window_without_a_bound_is_no_window() -> None:
    for window in (-1, [-1, 0]):
        overrides = config_from_mapping(mapping(window_size=window)).model.config_overrides
        assert "sliding_window" not in overrides and overrides["model_type"] == "llama"
    assert config_from_mapping(mapping(window_size=[7, 0])).model.config_overrides["sliding_window"] == 7


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("normalization", "NeMo's default is 'layernorm'"),
        ("position_embedding_type", "NeMo's default is 'learned_absolute'"),
        ("ffn_hidden_size", "usually 4 times hidden_size"),
    ],
)
def test_options_that_are_left_out_are_asked_for_where_nemos_default_is_another_model(name: str, says: str) -> None:
    values = mapping()
    del values["model"][name]
    with pytest.raises(ValueError, match=f"model.{name} is not given") as raised:
        config_from_mapping(values)
    assert says in str(raised.value)


def test_options_that_are_left_out_have_nemos_values() -> None:
    values = mapping(optim={"name": "fused_adam", "lr": 1e-3}, data={"data_prefix": [1.0, "/d/a"]})
    del values["trainer"]["gradient_clip_val"], values["model"]["layernorm_epsilon"]
    config = config_from_mapping(values)
    found = config.optimizer
    assert (found.lr_schedule, found.weight_decay, found.betas, found.clip_grad) == ("constant", 0, (0.9, 0.999), 0)
    assert config.data.isolate_documents is False and config.model.config_overrides["rms_norm_eps"] == 1e-5
    cosine = mapping(optim={"name": "adamw", "lr": 1e-3, "sched": {"name": "CosineAnnealing"}})
    assert config_from_mapping(cosine).optimizer.min_lr_ratio == 0
    # An option of the program's own section comes first.
    own = values | {"optimizer": {"weight_decay": 0.2, "clip_grad": 2.0}, "data": {"isolate_documents": True}}
    config = config_from_mapping(own)
    assert (config.optimizer.weight_decay, config.optimizer.clip_grad, config.data.isolate_documents) == (
        0.2,
        2.0,
        True,
    )
