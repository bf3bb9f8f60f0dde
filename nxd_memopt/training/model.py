"""Builds the model from a Hugging Face directory or a configuration alone, and loads its tokenizer."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from nxd_memopt.architectures.model_spec import shared_expert
from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import load_config, load_pretrained
from nxd_memopt.checkpoint.huggingface.tokenizers import load_tokenizer
from nxd_memopt.checkpoint.huggingface.upcycling import load_upcycled, upcycled_config
from nxd_memopt.models import model_class, require_supported
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.modules.fp8 import experts_in_bf16, float8_groups, use_fp8
from nxd_memopt.modules.moe.hf_options import with_shared_expert
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.ops.fp8 import Fp8Recipe
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.initialization import zeros_for_weights
from nxd_memopt.parallel_layers.utils import move_model_to_device
from nxd_memopt.training.config.moe import MoEOptions, has_experts, resolve_options
from nxd_memopt.training.config.nemo.model import VOCABULARY_OF_TOKENIZER
from nxd_memopt.training.config.train_config import ModelConfig, TrainConfig
from nxd_memopt.training.data.tokenize.special_tokens import special_tokens
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary, rows_for
from nxd_memopt.training.hf_overrides import config_from_overrides, override_config


def load_hf_config(config: ModelConfig, moe: MoEOptions | None = None) -> PretrainedConfig:
    """Return the Hugging Face configuration, updated with ``config_overrides``.

    If ``moe.num_moe_experts`` is set and the model is dense, the configuration of the upcycled model is
    returned. A model with experts gets a shared expert by ``moe.moe_shared_expert_intermediate_size``.

    Raises:
        ValueError: the directory does not exist, the model type is not supported, or cannot have
            experts.
    """
    hf_config = _hf_config_before_upcycling(config)
    if moe is None:
        return hf_config
    if moe.num_moe_experts is not None and not has_experts(hf_config):
        top_k = moe.moe_router_topk or MoEConfig.moe_router_topk
        hf_config = upcycled_config(hf_config, moe.num_moe_experts, top_k)
    width = moe.moe_shared_expert_intermediate_size
    if width is None or not has_experts(hf_config):
        return hf_config
    _, has_gate = shared_expert(hf_config)
    return with_shared_expert(hf_config, width, gate=has_gate)


def _hf_config_before_upcycling(config: ModelConfig) -> PretrainedConfig:
    """Return the configuration of the directory and the overrides, without added experts."""
    # The type is checked before transformers builds a configuration of it: transformers knows
    # hundreds of types, and the error must name the few that this library has.
    overrides = dict(config.config_overrides)
    if overrides.get("vocab_size") == VOCABULARY_OF_TOKENIZER:
        del overrides["vocab_size"]
        if config.pretrained is None:
            overrides["vocab_size"] = rows_for(_tokenizer(config))
    if config.pretrained is None:
        model_type = overrides.pop("model_type")
        require_supported(model_type)
        return _resized(config, config_from_overrides(model_type, overrides))
    hf_config = load_config(config.pretrained)
    require_supported(hf_config.model_type)
    # The directory decides the model type: an override with another type would be ignored.
    model_type = overrides.pop("model_type", hf_config.model_type)
    if model_type != hf_config.model_type:
        raise ValueError(
            f"model.config_overrides has model_type {model_type!r} and {config.pretrained} has "
            f"{hf_config.model_type!r}: leave model_type out, or leave model.pretrained out"
        )
    return _resized(config, override_config(hf_config, overrides))


def _resized(config: ModelConfig, hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return ``hf_config``; if ``resize_embedding`` is set, with a row of the embedding for each token."""
    if config.resize_embedding:
        rows = max(hf_config.vocab_size, rows_for(_tokenizer(config)))
        hf_config = override_config(hf_config, {"vocab_size": rows})
    return hf_config


def _tokenizer(config: ModelConfig) -> Any:
    """Return the run's tokenizer."""
    name = config.tokenizer or config.pretrained
    assert name is not None
    try:
        return load_tokenizer(name)
    except ValueError as error:
        raise ValueError(f"{error}: set model.tokenizer to a tokenizer's directory") from error


def load_vocabulary(config: ModelConfig, hf_config: PretrainedConfig, *, end_of_text: str | int = "auto") -> Vocabulary:
    """Return the vocabulary: the tokenizer, checked against the model.

    Args:
        config: names the tokenizer and the model.
        hf_config: the model's configuration.
        end_of_text: ``data.end_of_text``.

    Raises:
        ValueError: no tokenizer can be loaded, it has no end-of-text token or another one than
            the model, or a token of its base vocabulary has an id outside the model's vocabulary
            (added tokens may).
    """
    tokenizer = _tokenizer(config)
    special = special_tokens(config, hf_config, tokenizer, end_of_text)
    return Vocabulary(tokenizer, hf_config.vocab_size, special.end_of_text, special)


def build_model(config: TrainConfig, hf_config: PretrainedConfig) -> ParallelCausalLM:
    """Build this rank's shard of the model on the backend's device or on the host.

    The weights are random, or zeros where ``load_initial_weights`` loads all of them.

    With ``use_cpu_initialization`` the shard is initialized and loaded on the host in two cases. On
    XLA it is copied afterwards: initializing or loading it on the device, slice by slice, would
    compile another graph. At zero3 it stays there until ``shard_model`` copies one layer at a time,
    because the device need not have room for the model without its data-parallel sharding.
    """
    device = backend.device
    if config.parallel.use_cpu_initialization and (backend.name == "xla" or _is_sharded_later(config)):
        device = torch.device("cpu")
    if config.lora.base_dtype is not None:
        device = torch.device("meta")  # so that no weight exists in bf16 before it is rounded
    with zeros_for_weights() if _loads_all_weights(config, hf_config) else nullcontext():
        return model_class(hf_config.model_type)(
            hf_config,
            parallel=config.parallel,
            memory=config.memory,
            dtype=getattr(torch, config.dtype),
            device=device,
            **expert_options(config, hf_config),
        )


def _loads_all_weights(config: TrainConfig, hf_config: PretrainedConfig) -> bool:
    """Return whether no weight keeps its initial value: new rows and experts do, and those that no file has."""
    model = config.model
    is_loaded = model.pretrained is not None and not model.random_init
    return is_loaded and not model.resize_embedding and not is_upcycled(config, hf_config)


def _is_sharded_later(config: TrainConfig) -> bool:
    """Return whether ``parallelize`` shards the parameters."""
    return config.data_parallel.sharding == "zero3"


def load_initial_weights(
    model: ParallelCausalLM, config: TrainConfig, hf_config: PretrainedConfig, base: Path | None = None
) -> None:
    """Load pretrained weights into the model of ``build_model``, if the run has some, and move it to the device.

    Args:
        model: the model to fill.
        config: configuration of the run.
        hf_config: configuration of the model.
        base: Hugging Face directory whose weights are loaded, whatever the configuration says: a resumed run's
            base of adapters.
    """
    in_float8 = []
    if config.lora.base_dtype is not None:
        in_float8 = float8_groups(model, first_last_layers_bf16=config.trainer.first_last_layers_bf16)
    if base is not None:
        load_pretrained(model, base, in_float8=in_float8)
    elif config.model.pretrained is not None and not config.model.random_init:
        resizes = config.model.resize_embedding
        if is_upcycled(config, hf_config):
            load_upcycled(model, config.model.pretrained, seed=config.trainer.seed, resize_embedding=resizes)
        else:
            load_pretrained(model, config.model.pretrained, resize_embedding=resizes, in_float8=in_float8)
    if not _is_sharded_later(config) and model.any_weight().device.type != backend.device.type:
        move_model_to_device(model, backend.device)
    # On XLA the graph of initialization and loading ends here, or it would become part of the
    # first micro-batch's graph.
    backend.mark_step()


def apply_fp8(model: ParallelCausalLM, config: TrainConfig) -> list[str]:
    """Let the model's linear layers multiply in float8 if the run does; return the start report's lines about it."""
    trainer = config.trainer
    if trainer.fp8 is None:
        return []
    recipe = Fp8Recipe(trainer.fp8, trainer.fp8_recipe)
    tokens = config.data.micro_batch_size * config.data.seq_length if config.lora.base_dtype is None else None
    names = use_fp8(model, recipe, first_last_layers_bf16=trainer.first_last_layers_bf16, tokens=tokens)
    held = len(model.decoder_layers())
    stage = " of the first stage" if held < model.spec.num_layers else ""
    if not names:
        kept = f"the first and last {trainer.first_last_layers_bf16} stay as they are, " if stage else ""
        return [
            f"fp8: in no layer{stage}, because {kept}all are faster in {config.dtype} with {tokens} tokens in a "
            "micro-batch"
        ]
    kinds = sorted({name.rpartition(".")[2] for name in names})
    layers = {name.partition(".")[0] for name in names}
    others = "all else, and evaluation," if config.lora.base_dtype is None else "all else"
    reason = experts_in_bf16(model)
    return [
        f"fp8: {trainer.fp8}, {trainer.fp8_recipe}, in {', '.join(kinds)} of {len(layers)} of "
        f"{held} decoder layers{stage}; {others} in {config.dtype}",
        *([] if reason is None else [f"fp8: the experts in {config.dtype}: {reason}"]),
    ]


def expert_options(config: TrainConfig, hf_config: PretrainedConfig) -> dict[str, MoEConfig]:
    """Return the argument ``moe`` of a model with experts; none for a dense model.

    Raises:
        ValueError: options of the ``moe`` section contradict each other or the model.
    """
    moe = resolve_options(config.moe, hf_config)
    return {} if moe is None else {"moe": moe}


def is_upcycled(config: TrainConfig, hf_config: PretrainedConfig) -> bool:
    """Return whether experts, or a shared expert of another size, are added to the model at the start."""
    own = _hf_config_before_upcycling(config.model)
    adds_experts = has_experts(hf_config) and not has_experts(own)
    return adds_experts or shared_expert(hf_config)[0] != shared_expert(own)[0]


def require_fp16_range(model: ParallelCausalLM) -> None:
    """Raise ``ValueError`` on every rank if a weight of an fp16 model has become infinite or NaN."""
    if model.any_weight().dtype != torch.float16:
        return
    # Only the rank with the weight sees it; the other ranks would wait for it in the first step.
    with raise_together("loading the weights"):
        for name, parameter in model.named_parameters():
            if not bool(parameter.detach().isfinite().all()):
                raise ValueError(
                    f"{name} has a value that is not finite in fp16, whose largest number is 65504: "
                    "use trainer.precision bf16-mixed"
                )
