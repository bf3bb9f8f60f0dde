"""The ``moe`` section: names, defaults from the model's config, and one error line for what cannot be honoured."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nxd_memopt.backends import backend
from nxd_memopt.certify.request import request_of
from nxd_memopt.command_line import Run
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.options import Resume
from nxd_memopt.training.config.moe import MoEOptions, resolve_options
from nxd_memopt.training.config.parsing import config_from_mapping, parse_config
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.device_support import cuda_graph_conflict
from nxd_memopt.training.hf_overrides import config_from_overrides, override_config
from nxd_memopt.training.model import load_hf_config
from nxd_memopt.training.resume.rules import RULES
from tests.reference_models import mixtral_config, qwen3_moe_config
from tests.training.runs import LLAMA, MIXTRAL, run_here, write_config

QWEN3 = {name: value for name, value in LLAMA.items() if name != "model_type"} | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "head_dim": 4,
}


def build(overrides: dict[str, Any] = MIXTRAL, **sections: Any) -> TrainConfig:
    return config_from_mapping({"model": {"tokenizer": "t", "config_overrides": overrides}, **sections})


def resolved(options: dict[str, Any], hf_config: Any) -> MoEConfig | None:
    return resolve_options(MoEOptions(**options), hf_config)


OF_THE_MODEL = {"moe_layer_freq", "moe_router_pre_softmax", "moe_ffn_hidden_size", "moe_shared_expert_gate"}


def test_the_section_is_derived_from_the_options_of_the_layers() -> None:
    """Fields, types, ranges, rules and texts; every default is None."""
    theirs = {field.name: field for field in dataclasses.fields(MoEConfig) if field.name not in OF_THE_MODEL}
    ours = {field.name: field for field in dataclasses.fields(MoEOptions)}
    assert list(ours) == list(theirs) and {field.default for field in ours.values()} == {None}
    assert all(ours[name].metadata == theirs[name].metadata for name in ours)
    text = MoEOptions.__doc__ or ""
    assert all(text.count(f"    {name}: ") == 1 for name in ours)
    assert not any(f" {name}: " in text for name in OF_THE_MODEL)
    assert "ceil(tokens * k / E * factor)" in text and "moe_input_jitter_eps: in training, multiply" in text
    with pytest.raises(ValueError, match=r"moe\.moe_router_topk must be at least 1, got 0"):
        MoEOptions(moe_router_topk=0)
    with pytest.raises(ValueError, match=r"moe\.moe_router_dtype 'fp16' is not one of"):
        MoEOptions(moe_router_dtype="fp16")
    # An option that changes the results of a resumed run is not merely reported.
    reported = {name for name, rule in RULES.items() if name.startswith("moe.") and rule.resume is Resume.REPORTED}
    assert reported == {"moe.moe_token_dispatcher_type", "moe.moe_per_layer_logging"}


def test_options_of_nemo_files_reach_the_section(tmp_path: Path) -> None:
    """NeMo has all of them in its model section, and expert_model_parallel_size too."""
    flat = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": "1e-2",
        "moe_z_loss_coeff": 1e-3,
        "moe_input_jitter_eps": 0.01,
        "moe_token_dispatcher_type": "alltoall",
        "moe_per_layer_logging": True,
        "moe_expert_capacity_factor": 1,
        "moe_pad_expert_input_to_capacity": True,
        "moe_token_drop_policy": "position",
    }
    model = {"tokenizer": "t", "config_overrides": LLAMA}
    others = {"moe_token_dropping": True, "moe_layer_recompute": False, "expert_model_parallel_size": 2}
    file = tmp_path / "nemo.yaml"
    file.write_text(yaml.safe_dump({"model": {**model, **flat, **others}}), encoding="utf-8")
    config = parse_config(["--config", str(file), "--moe.moe-z-loss-coeff", "0.5"])
    assert config.parallel.expert_model_parallel_size == 2
    assert config.moe.given() == flat | {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.5}
    moe = resolve_options(config.moe, load_hf_config(config.model, config.moe))
    assert moe is not None
    assert (moe.num_moe_experts, moe.moe_token_drop_policy) == (4, "position")


def test_defaults_are_those_of_the_model() -> None:
    """transformers' loss stays unless a type or a coefficient is given; then the other one is Megatron's."""
    config = mixtral_config()
    moe = resolved({"moe_token_dispatcher_type": "alltoall"}, config)
    assert moe is not None
    assert (moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff) == ("hf_aux_loss", 0.3)
    for given, expected in (
        ({"moe_router_load_balancing_type": "aux_loss"}, ("aux_loss", 0.0)),
        ({"moe_aux_loss_coeff": 0.1}, ("aux_loss", 0.1)),
        ({"moe_router_load_balancing_type": "none"}, ("none", 0.0)),
    ):
        moe = resolved(given, config)
        assert moe is not None
        assert (moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff) == expected
    moe = resolved({}, qwen3_moe_config(output_router_logits=False))
    assert moe is not None
    assert (moe.moe_router_pre_softmax, moe.moe_layer_freq, moe.has_aux_loss) == (True, (1, 0, 1), False)
    assert resolve_options(MoEOptions(), config_from_overrides("llama", {})) is None


def test_one_expert_for_each_token() -> None:
    """The config's own softmax over the one chosen expert gives it the weight 1, unless the section replaces it."""
    mixtral = mixtral_config(num_experts_per_tok=1, output_router_logits=False)
    for given in ({"moe_router_score_function": "sigmoid"}, {"moe_router_load_balancing_type": "sinkhorn"}):
        moe = resolved(given, mixtral)
        assert moe is not None and moe.moe_router_topk == 1
    moe = resolved({}, mixtral)
    assert moe is not None and not moe.moe_router_pre_softmax
    with pytest.raises(ValueError, match=r"moe_router_topk 1 contradicts.*says 2"):
        resolved({"moe_router_topk": 1}, mixtral_config())
    moe = resolved({}, qwen3_moe_config(num_experts_per_tok=1, norm_topk_prob=False))
    assert moe is not None and moe.moe_router_pre_softmax


def test_overrides_of_models_with_experts() -> None:
    """KV heads that equal the heads are a choice of Mixtral, not derived; either name of the experts counts."""
    config = mixtral_config(num_key_value_heads=8)
    changed = override_config(config, {"num_experts": 6, "initializer_range": 0.1})
    assert (changed.num_key_value_heads, changed.num_local_experts, changed.initializer_range) == (8, 6, 0.1)
    changed = override_config(mixtral_config(num_attention_heads=4, num_key_value_heads=4), {"num_local_experts": 2})
    assert (changed.num_key_value_heads, changed.num_experts) == (4, 2)
    qwen = override_config(qwen3_moe_config(head_dim=6), {"num_experts": 16, "moe_intermediate_size": 6})
    assert (qwen.num_experts, qwen.head_dim, qwen.mlp_only_layers) == (16, 6, [1])
    with pytest.raises(ValueError, match=r"unknown key 'num_local_expert'.*did you mean 'num_local_experts'"):
        override_config(config, {"num_local_expert": 4})


def test_instances_of_shards_would_divide_the_ranks_of_experts() -> None:
    instances = {"sharding": "zero2", "num_distributed_optimizer_instances": 2}
    with pytest.raises(ValueError, match=r"expert_model_parallel_size 2 and .*instances 2.*leave the instances out"):
        build(parallel={"expert_model_parallel_size": 2}, data_parallel=instances)


NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"} | {"model_type": "gpt_neox"}
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "export of GPT-NeoX with experts": (
        NEOX,
        {"moe": {"num_moe_experts": 4}},
        "moe.num_moe_experts 4 is unknown to transformers' gpt_neox, and trainer.export is true: set it to false",
    ),
    "ranks": (MIXTRAL, {"parallel": {"expert_model_parallel_size": 2}}, "data-parallel size 1.*start a multiple of 2"),
    "experts": (MIXTRAL, {"moe": {"num_moe_experts": 8}}, "num_moe_experts 8 contradicts MixtralConfig.*4"),
    "padding": (MIXTRAL, {"moe": {"moe_pad_expert_input_to_capacity": True}}, "needs moe_expert_capacity_factor"),
    "sinkhorn": (MIXTRAL, {"moe": {"moe_router_load_balancing_type": "sinkhorn"}}, "trainer.export is true"),
    "bias": (
        MIXTRAL,
        {"moe": {"moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 1e-3}},
        "trainer.export is true",
    ),
    "compile": (MIXTRAL, {"trainer": {"compile": "layer"}}, "trainer.compile layer.*set it to null"),
    "dense": (LLAMA, {"moe": {"moe_aux_loss_coeff": 0.1}}, "moe.moe_aux_loss_coeff 0.1 needs a model with experts"),
    "dense layers": (QWEN3, {"moe": {"moe_layer_freq": [1, 0]}}, r"moe_layer_freq \[1, 0\] is an option of the model"),
    "biases": (
        LLAMA | {"mlp_bias": True},
        {"moe": {"num_moe_experts": 4}},
        "num_moe_experts 4 makes a Mixtral.*'mlp_bias'",
    ),
    "qwen3": (
        LLAMA | {"model_type": "qwen3"},
        {"moe": {"num_moe_experts": 4}},
        "num_moe_experts 4 replaces the MLPs of llama and gpt_neox models.*'qwen3'",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_options_that_cannot_be_honoured(tmp_path: Path, name: str) -> None:
    """One line, before any text is tokenized."""
    overrides, sections, message = REFUSALS[name]
    outcome = run_here(write_config(tmp_path, model={"config_overrides": overrides}, **sections))
    lines = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    assert outcome.returncode == 2 and len(lines) == 1, outcome.stderr[-2000:]
    assert re.search(message, lines[0]), lines[0]
    assert not (tmp_path / "run" / "tokens").exists()


def test_cuda_graphs_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would replay the routing of the micro-batch that it captured."""
    monkeypatch.setattr(backend, "capture_refusal", lambda: None)
    config = build()
    conflict = cuda_graph_conflict(config, load_hf_config(config.model, config.moe))
    assert conflict is not None and "mixtral has experts" in conflict
    dense = build(LLAMA)
    assert cuda_graph_conflict(dense, load_hf_config(dense.model, dense.moe)) is None


def test_certify_gets_all_options_of_experts() -> None:
    moe = {"num_moe_experts": 4, "moe_expert_block_size": 64, "moe_z_loss_coeff": 0.5}
    run = Run("", build(LLAMA | {"num_hidden_layers": 4}, moe=moe), frozenset(), is_bare=False)
    request = request_of(run.config, run.model_config(), backend="cpu", device="cuda", layer_counts=None)
    found = request.moe
    assert found is not None and (found.moe_expert_block_size, found.moe_z_loss_coeff) == (64, 0.5)
    assert (request.config["model_type"], request.config["num_local_experts"]) == ("mixtral", 4)
