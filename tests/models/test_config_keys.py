"""A config.json with options of other architectures: models and planner read what transformers' class reads.

Every option of some architecture, on every architecture: logits equal to transformers', or an error that names the
option. The planner, which reads the file, gives what it gives of transformers' object.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from nxd_memopt.architectures.config_options import reads
from nxd_memopt.architectures.configs import with_defaults
from nxd_memopt.architectures.experts import options_of
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.architectures.parameters import parameters
from nxd_memopt.checkpoint.huggingface.importing import load_sources
from nxd_memopt.config import ParallelConfig
from nxd_memopt.models import model_class
from nxd_memopt.planner.sizes.rank_sizes import rank_sizes
from tests.reference_models import FAMILY, batch

SIZES = FAMILY | {"initializer_range": 0.5}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
QWEN_EXPERTS = EXPERTS | {"num_experts": 4, "moe_intermediate_size": 12}
CONTENTS: dict[str, dict[str, Any]] = {
    "gpt_neox": {name: value for name, value in SIZES.items() if name != "num_key_value_heads"},
    "granite": SIZES | {"head_dim": 4},
    "llama": SIZES,
    "mistral": SIZES | {"sliding_window": 5},
    "mixtral": SIZES | EXPERTS | {"num_local_experts": 4, "head_dim": 4},  # transformers computes with a null in yarn
    "phi3": SIZES | {"pad_token_id": None, "eos_token_id": 2, "head_dim": 4},
    "qwen2": SIZES,
    "qwen2_moe": SIZES | QWEN_EXPERTS | {"shared_expert_intermediate_size": 20},
    "qwen3": SIZES | {"head_dim": 6},
    "qwen3_moe": SIZES | QWEN_EXPERTS,
}
WINDOW = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
TYPES = ["sliding_attention", "full_attention"]
LONG = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 5.0]}
CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"sliding_window": 4},
    "no window": {"sliding_window": None},
    "window that is off": {"sliding_window": 4, "use_sliding_window": False},
    "window that is on": WINDOW,
    "window on by default size": {"use_sliding_window": True, "max_window_layers": 0},
    "types": WINDOW | {"layer_types": TYPES},
    "types without a window": {"sliding_window": None, "layer_types": TYPES},
    "types with the window off": {"sliding_window": 4, "use_sliding_window": False, "layer_types": TYPES},
    "unknown types": WINDOW | {"layer_types": ["sliding_attention", "chunked_attention"]},
    "head_dim": {"head_dim": 16},
    "attention_bias": {"attention_bias": True},
    "no attention_bias": {"attention_bias": False},
    "mlp_bias": {"mlp_bias": True},
    "qkv_bias": {"qkv_bias": True},
    "no qkv_bias": {"qkv_bias": False},
    "norm_topk_prob": {"norm_topk_prob": True},
    "no norm_topk_prob": {"norm_topk_prob": False},
    "num_experts": {"num_experts": 6},
    "num_local_experts": {"num_local_experts": 6},
    "both numbers of experts": {"num_experts": 6, "num_local_experts": 5},
    "one expert per token": {"num_experts_per_tok": 1},
    "moe_intermediate_size": {"moe_intermediate_size": 16},
    "shared_expert_intermediate_size": {"shared_expert_intermediate_size": 8},
    "shared_expert_gate": {"shared_expert_gate": True},
    "decoder_sparse_step": {"decoder_sparse_step": 2},
    "mlp_only_layers": {"mlp_only_layers": [0]},
    "router_jitter_noise": {"router_jitter_noise": 0.1},
    "use_parallel_residual": {"use_parallel_residual": False},
    "rotary_pct": {"rotary_pct": 0.5},
    "embedding_multiplier": {"embedding_multiplier": 12.0},
    "attention_multiplier": {"attention_multiplier": 0.3},
    "attention_multiplier of 0": {"attention_multiplier": 0.0},
    "residual_multiplier": {"residual_multiplier": 0.22},
    "logits_scaling": {"logits_scaling": 8.0},
    "resid_pdrop": {"resid_pdrop": 0.1},
    "embd_pdrop": {"embd_pdrop": 0.1},
    "longrope": {"rope_scaling": LONG, "original_max_position_embeddings": 5, "max_position_embeddings": 64},
    "longrope under its old name": {"rope_scaling": LONG | {"type": "su"}, "original_max_position_embeddings": 12},
    "longrope of a part": {"rope_scaling": LONG | {"short_factor": [2.0], "partial_rotary_factor": 0.5}},
    "rotary_emb_base": {"rotary_emb_base": 100.0},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "rope_theta": {"rope_theta": 100.0},
    "rope_scaling": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope_scaling of a part": {"rope_scaling": {"type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}},
    "yarn with the length at the top level": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9},
        "original_max_position_embeddings": 3,
    },
    "llama3 with the length at the top level": {
        "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 3,
    },
    "rms_norm_eps": {"rms_norm_eps": 0.5},
    "layer_norm_eps": {"layer_norm_eps": 0.5},
    "hidden_dropout": {"hidden_dropout": 0.5},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    "num_key_value_heads": {"num_key_value_heads": 4},
    "null num_key_value_heads": {"num_key_value_heads": None},
    "num_query_groups": {"num_query_groups": 4},
    "null num_query_groups": {"num_query_groups": None},
    "pad_token_id": {"pad_token_id": 0},
    "hidden_act": {"hidden_act": "gelu_new"},
    "hidden_activation": {"hidden_activation": "gelu_new", "act_fn": "relu"},
    "pretraining_tp": {"pretraining_tp": 2},
}


def reference_of(config: Any) -> Any:
    """transformers' model in float64, with biases and norms that are not trivial; None if it refuses the config."""
    torch.manual_seed(5)
    try:
        kernels = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_config(config, **kernels).double().eval()
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() == 1:
                    param.add_(0.3 * torch.randn(param.shape, dtype=torch.float64))
            model(batch()["input_ids"], use_cache=False)
    except (KeyError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    return model


def ours_of(config: Any, reference: Any, tmp_path: Any) -> Any:
    model = model_class(config.model_type)(config, dtype=torch.float64).eval()
    if reference is not None:
        load_sources(model, dict(reference.state_dict()), tmp_path)
    return model


def cases() -> list[Any]:
    """Architecture and content: each option that it reads by itself, and all others together."""
    found = []
    for model_type, content in CONTENTS.items():
        content = content | {"model_type": model_type}
        strays: dict[str, Any] = {}
        for name_of_change, change in CHANGES.items():
            if any(reads(content, name) for name in change) or not change:
                found.append(pytest.param(model_type, content | change, False, id=f"{model_type}-{name_of_change}"))
            # transformers' GPT-NeoX takes it for RoPE but not for the heads: it is refused, by a case of its own.
            elif (model_type, name_of_change) == ("gpt_neox", "head_dim"):
                found.append(pytest.param(model_type, content | change, False, id="gpt_neox-head_dim"))
            else:
                strays |= {name: value for name, value in change.items() if value is not None}
        found.append(pytest.param(model_type, content | strays, True, id=f"{model_type}-others"))
    return found


@pytest.mark.parametrize(("model_type", "content", "is_others"), cases())
def test_logits_are_those_of_transformers_or_the_option_is_refused(content, model_type, is_others, tmp_path):
    try:
        config = CONFIG_MAPPING[model_type].from_dict(deepcopy(content))
    except Exception:
        return
    reference = reference_of(config)
    ids = batch()["input_ids"]
    try:
        ours = ours_of(config, reference, tmp_path)
        logits = ours(ids).logits.detach()
    except ValueError as error:
        assert not is_others, error  # options of other architectures change nothing
        changed = [name for name, value in content.items() if CONTENTS[model_type].get(name) != value]
        changed += [name for value in content.values() if isinstance(value, dict) for name in value]
        # KV heads of another number are named by the weights' shape.
        assert any(name in str(error) for name in ("k_proj", *changed)), error
        return
    if reference is None:
        # Qwen2MoeConfig leaves it null, of which its model makes no number.
        assert content.get("num_key_value_heads", 0) is None, "transformers refuses the config"
        return
    expected = reference(ids, use_cache=False).logits.detach()
    # transformers' norms and routers compute in fp32, also in float64 models; LongRoPE's factor enlarges the scores.
    torch.testing.assert_close(logits, expected, atol=3e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize(("model_type", "content", "is_others"), cases())
def test_the_planner_reads_a_file_as_transformers_reads_it(content, model_type, is_others):
    try:
        config = CONFIG_MAPPING[model_type].from_dict(deepcopy(content))
    except Exception:
        return
    try:
        expected = facts(config)
    except ValueError as error:
        assert not is_others, error
        with pytest.raises(ValueError, match=re.escape(str(error).partition("(")[0])):
            facts(with_defaults(content))
        return
    assert facts(with_defaults(content)) == expected


def facts(config: Any) -> dict[str, Any]:
    spec = model_spec(config)
    is_moe = spec.moe_layers
    found: dict[str, Any] = {"windows": spec.windows, "experts": is_moe}
    found["parameters"] = [(each.name, each.shape) for each in parameters(spec)]
    if any(is_moe):
        found["options"] = options_of(config)
    if any(is_moe) == all(is_moe):
        sizes = rank_sizes(spec, ParallelConfig(), sequence_length=12, micro_batch_size=1, dtype="float32")
        found["sizes"] = sizes
    return found
