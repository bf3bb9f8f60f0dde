"""Translates a NeMo or Megatron ``model`` section: sizes, optimizer, tokenizer and data under this library's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from nxd_memopt.training.config.nemo import gpt_neox as nemo_gpt_neox
from nxd_memopt.training.config.nemo.gpt_neox import gpt_neox_sizes, is_gpt_neox
from nxd_memopt.training.config.nemo.sections import MISSING, Sections, read_data, read_optimizer, read_tokenizer

VOCABULARY_OF_TOKENIZER = "tokenizer"
"""Value of ``vocab_size`` in ``model.config_overrides``: the tokenizer's number of tokens."""

# NeMo's name -> Hugging Face's, in model.config_overrides.
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "num_kv_heads": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "init_method_std": "initializer_range",
    "layernorm_epsilon": "rms_norm_eps",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
    "rotary_base": "rope_theta",
    "attention_dropout": "attention_dropout",
    "vocab_size": "vocab_size",
    "override_vocab_size": "vocab_size",
}
# Options that make the model another one of the LLaMA family; ``_architecture`` reads them.
ARCHITECTURE = ("window_size", "sliding_window_size", "qkv_bias", "scale_positional_embedding")
# The scaling of rotary frequencies that NeMo has for LLaMA 3.1, without options of its own.
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Options of models and techniques with the values that this library has.
ONLY: dict[str, tuple[Any, ...]] = {
    "normalization": ("rmsnorm",),
    "activation": ("swiglu", "fast-swiglu", "silu"),
    "position_embedding_type": ("rope",),
    "bias": (False,),
    "has_bias": (False,),
    "transformer_block_type": ("pre_ln",),
    "rotary_percentage": (1, None),
    "attention_type": ("multihead",),
    "hidden_dropout": (0,),
    "ffn_dropout": (0,),
    "openai_gelu": (False,),
    "headscale": (False,),
    "normalize_attention_scores": (True,),
    "use_scaled_init_method": (False,),
    "fp32_residual_connection": (False,),
    "fp16_lm_cross_entropy": (False,),
    "fp8": (False,),
    "fp8_e4m3": (False,),
    "fp8_hybrid": (False,),
    "use_emha": (False,),
    "context_parallel_size": (1, None),
    "rampup_batch_size": (None,),
    "restore_from_path": (None,),
    "resume_from_checkpoint": (None,),
    "num_micro_batches_with_partial_activation_checkpoints": (None,),
    "activations_checkpoint_layers_per_pipeline": (None,),
    "flexible_pipeline_parallel_stages": (None,),
    "seq_len_interpolation_factor": (None,),
    "convert_to_hf": (False,),
    "zero_use_fp32_grad_accum": (False,),
    "ub_tp_comm_overlap": (False,),
    "fsdp": (False,),
}
# Patterns of choices of kernels, buffers and logs: the computed values do not depend on them, or on the options of
# fp8 and FSDP, which ``ONLY`` keeps off. ``apply_query_key_layer_scaling`` divides scores and multiplies them again.
WITHOUT_EFFECT = (
    "*_fusion",
    "*_p2p_comm",
    "apex_transformer_log_level",
    "apply_query_key_layer_scaling",
    "config_path",
    "deterministic_mode",
    "disable_layer_norm_checkpointing",
    "fp8_*",
    "fsdp_*",
    "gc_interval",
    "grad_allreduce_chunk_size_mb",
    "gradient_as_bucket_view",
    "log_*_norm",
    "make_vocab_size_divisible_by",
    "mcore_gpt",
    "megatron_amp_O2",
    "nsys_profile",
    "onnx_safe",
    "output_dir",
    "persist_layer_norm",
    "p*_process",
    "reduce_amax",
    "sharp",
    "sync_batch_comm",
    "tp_comm_atomic_*",
    "transformer_engine",
    "ub_tp_comm_overlap_cfg",
    "use_flash_attention",
)
# NeMo's values of options that its files may leave out, which is an error where they are not supported, and for the
# dropouts, because 0 is more likely meant.
DEFAULTS: dict[str, Any] = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "normalization": "layernorm",
    "activation": "gelu",
    "bias": True,
    "position_embedding_type": "learned_absolute",
    "use_scaled_init_method": True,
}
SAME = {"bias": ("bias", "has_bias")}
# Sections and options of NeMo's trainer and its other parts, and what this program has instead.
NOT_SUPPORTED = {
    "defaults": "Hydra's lists of files: write all options into this file",
    "hydra": "Hydra's own options: leave them out",
    "run": "the launcher's options: see nxd-memopt launch",
    "exp_manager": "see trainer.output_dir, save_interval and keep_checkpoints",
    "name": "see trainer.output_dir",
    "restore_from_path": "see model.pretrained and model.warm_start",
    "trainer.limit_val_batches": "see data.eval_sequences",
    "trainer.max_time": "a signal stops a run and saves it",
}
# Options next to ``model``: checkpoints here are complete before an older one is removed.
TOP_WITHOUT_EFFECT = ("enable_recovery_time_instrumentation", "enable_checkpoint_removal_protection")
_COMPUTED = re.compile(r"\$\{([\w.]+):")  # a resolver of OmegaConf
_REFERENCE = re.compile(r"\$\{(\.?)([\w.]+)\}")


def knows(name: str) -> bool:
    """Return whether ``name`` is an option of NeMo's ``model`` section that ``translate`` reads."""
    special = (
        *ARCHITECTURE,
        "tokenizer",
        "optim",
        "data",
        "seed",
        "wrap_with_zero",
        "zero_use_master_weight",
        "mcore_customization_config",
    )
    return name in SIZES or name in ONLY or name in special or any(fnmatchcase(name, each) for each in WITHOUT_EFFECT)


def translate(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the sections with the NeMo options of ``model`` under this library's names.

    A ``model`` section without ``num_layers`` is not NeMo's and stays as it is.

    Args:
        values: sections of the configuration.
        problems: gets a text for each option that is not supported.
    """
    values = _without_unsupported(values, problems)
    model = values.get("model")
    if not isinstance(model, Mapping) or "num_layers" not in model:
        return dict(values)
    sections: Sections = {name: dict(options or {}) for name, options in values.items() if isinstance(options, Mapping)}
    rest = {name: options for name, options in values.items() if not isinstance(options, Mapping)}
    rest = {name: value for name, value in rest.items() if name not in TOP_WITHOUT_EFFECT}
    if "async_checkpointing" in rest:
        sections.setdefault("trainer", {}).setdefault("async_save", rest.pop("async_checkpointing"))
    # Sections of the model that are not read may have what cannot be resolved.
    model = {
        name: value if isinstance(value, Mapping) else resolved(value, values, f"model.{name}", problems)
        for name, value in model.items()
    }
    own = {name: value for name, value in model.items() if not knows(name)}
    if isinstance(model.get("tokenizer"), str):
        own["tokenizer"] = model["tokenizer"]
    # NeMo's model section repeats the trainer's.
    if "precision" in own and own["precision"] == sections.get("trainer", {}).get("precision"):
        del own["precision"]
    # NeMo reads these two for full recompute only.
    if own.get("activations_checkpoint_granularity") != "full":
        for name in ("activations_checkpoint_method", "activations_checkpoint_num_layers"):
            own.pop(name, None)
    overrides = dict(own.pop("config_overrides", None) or {})
    overrides = _sizes(model, problems) | overrides
    sections["model"] = own | {"config_overrides": overrides}
    supported = _allowed(model)
    for name, default in DEFAULTS.items():
        is_given = any(model.get(each) is not None for each in SAME.get(name, (name,)))
        if not is_given and default not in supported.get(name, ()):
            problems.append(f"model.{name} is not given, and NeMo's default is {default!r}: write it")
    if model.get("ffn_hidden_size") is None:
        problems.append("model.ffn_hidden_size is not given: write it, usually 4 times hidden_size")
    for name, allowed in supported.items():
        if name in model and model[name] not in allowed:
            shown = " or ".join(repr(value) for value in allowed)
            problems.append(f"model.{name} {model[name]!r} is not supported: only {shown} is")
    readers: dict[str, Callable[[Any, Sections, list[str]], None]] = {
        "tokenizer": read_tokenizer,
        "optim": read_optimizer,
        "data": read_data,
    }
    for name, read in readers.items():
        if isinstance(model.get(name), Mapping):
            read(resolved(model[name], values, f"model.{name}", problems), sections, problems)
    if model.get("data") is None:
        read_data({}, sections, problems)
    if "seed" in model:
        sections.setdefault("trainer", {}).setdefault("seed", model["seed"])
    if model.get("wrap_with_zero"):
        sections.setdefault("data_parallel", {}).setdefault("sharding", "zero1")
    return rest | sections


def _without_unsupported(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return ``values`` without NeMo's sections and options that have no counterpart, which become problems."""
    remaining = dict(values)
    if isinstance(values.get("trainer"), Mapping):
        remaining["trainer"] = dict(values["trainer"])
    for place, remedy in NOT_SUPPORTED.items():
        section, _, name = place.rpartition(".")
        options = remaining.get(section, {}) if section else remaining
        # null is NeMo's default.
        if isinstance(options, dict) and options.pop(name, None) is not None:
            problems.append(f"{place} is not supported: {remedy}")
    return remaining


def _allowed(model: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the values that are supported, for the options that may not have any value."""
    if not is_gpt_neox(model):
        return ONLY
    allowed = ONLY | nemo_gpt_neox.ONLY
    return {name: values for name, values in allowed.items() if name not in nemo_gpt_neox.CONFIGURED}


def _sizes(model: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the Hugging Face configuration of a model of these sizes: of the LLaMA family, or GPT-NeoX."""
    sizes: dict[str, Any] = {}
    for name, theirs in SIZES.items():
        value = model.get(name)
        # null means NeMo's default; it equals transformers' except for num_key_value_heads.
        if value is None:
            continue
        if sizes.setdefault(theirs, value) != value:
            others = [other for other in SIZES if SIZES[other] == theirs]
            problems.append(f"model.{name} {value!r} contradicts {sizes[theirs]!r}: write one of {', '.join(others)}")
    # NeMo takes the size from the tokenizer.
    sizes = {
        "model_type": "llama",
        "vocab_size": VOCABULARY_OF_TOKENIZER,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        **sizes,
    }
    if is_gpt_neox(model):
        for name in ARCHITECTURE:
            if model.get(name):
                problems.append(f"model.{name} {model[name]!r} with normalization 'layernorm' is not supported")
        return gpt_neox_sizes(model, sizes, problems)
    # transformers' Mistral and Qwen2 have another number of KV heads by default.
    if "num_attention_heads" in sizes:
        sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    return sizes | _architecture(model, sizes, problems)


def _architecture(model: Mapping[str, Any], sizes: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return what makes the model a Mistral (attention window), a Qwen2 (biases) or a LLaMA 3.1 (frequencies)."""
    customized = model.get("mcore_customization_config")
    if isinstance(customized, Mapping) and any(customized.values()):
        problems.append(f"model.mcore_customization_config {dict(customized)} is not supported: leave it out")
    window = model.get("window_size") or model.get("sliding_window_size")
    # NeMo's is [tokens before, tokens after], of which a causal model has the first.
    if isinstance(window, list):
        window = window[0]
    if window == -1:  # no bound
        window = None
    differences = {
        "an attention window": window is not None,
        "qkv_bias": bool(model.get("qkv_bias")),
        "scale_positional_embedding": bool(model.get("scale_positional_embedding")),
    }
    given = [name for name, is_given in differences.items() if is_given]
    if len(given) > 1:
        problems.append(f"model: {' with '.join(given)} is not supported: leave all but one of them out")
    if model.get("qkv_bias"):
        return {"model_type": "qwen2"}
    if window is not None:
        return {"model_type": "mistral", "sliding_window": window}
    if model.get("scale_positional_embedding"):
        theta = sizes.pop("rope_theta", 10000.0)
        return {"rope_parameters": LLAMA31_ROPE | {"rope_theta": theta}}
    return {}


def resolved(
    value: Any, values: Mapping[str, Any], place: str, problems: list[str], followed: Collection[str] = ()
) -> Any:
    """Return ``value``, of a mapping each value, with references of OmegaConf replaced by what they refer to.

    Args:
        value: a value, perhaps a reference ``${a.b}``, or ``${.b}`` to the same section.
        values: the configuration.
        place: where the value is, such as ``model.optim.lr``.
        problems: gets a text for each reference that cannot be resolved.
        followed: references that have led to this value.
    """
    if isinstance(value, Mapping):
        return {name: resolved(each, values, f"{place}.{name}", problems) for name, each in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value
    computed = _COMPUTED.search(value)
    if computed is not None:
        problems.append(f"{place} {value!r} is computed by {computed[1]!r}, which is not supported: write its value")
        return None
    match = _REFERENCE.fullmatch(value)
    found: Any = MISSING
    if match is not None:
        name = match[2]
        if match[1]:
            name = f"{place.rpartition('.')[0]}.{name}"
        found = _value_at(values, name)
    if found is MISSING or isinstance(found, Mapping | list):
        problems.append(f"{place} {value!r} refers to nothing in this file: write its value")
        return None
    if value in followed:
        problems.append(f"{place} {value!r} refers to itself: write its value")
        return None
    return resolved(found, values, place, problems, followed={*followed, value})


def _value_at(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a dotted name, or ``MISSING``."""
    found: Any = values
    for key in name.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return MISSING
        found = found[key]
    return found
