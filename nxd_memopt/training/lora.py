"""Adds the adapters of a run to its model, finds their base and writes them in PEFT's format."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_memopt.architectures.model_spec import rope_options
from nxd_memopt.training.model import is_upcycled
from nxd_memopt.training.reporting.summary import export

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig

    from nxd_memopt.modules.causal_lm import ParallelCausalLM
    from nxd_memopt.training.config.train_config import TrainConfig
    from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
    from nxd_memopt.training.state import Training

ADAPTER = "adapter"
# Options without effect on the values of the exported model: dropout is of training alone, and the row of
# pad_token_id is frozen like the others.
NOT_FUNCTION = ("attention_dropout", "hidden_dropout", "pad_token_id")
# Types of RoPE whose frequencies do not depend on max_position_embeddings.
LENGTH_INDEPENDENT = ("default", "linear", "llama3")
# B starts at 0, and AdamW moves an element by at most the learning rate in a step: at the rates of full fine-tuning,
# 1e-5 to 3e-5, adapters stay near 0.
LEAST_RATE = 5e-5


def apply_lora(model: ParallelCausalLM, config: TrainConfig) -> list[str]:
    """Add the adapters of the configuration; return the start report's lines about them. Every rank calls."""
    from nxd_memopt.modules.lora import add_adapters, whole_model
    from nxd_memopt.parallel_layers.resharding import full_shape

    lora_options = config.lora
    lora = lora_options.config()
    if lora is None:
        return []
    layers = add_adapters(model, lora)
    sizes = {True: 0, False: 0}
    for parameter in whole_model(model).parameters():
        sizes[parameter.requires_grad] += math.prod(full_shape(parameter))
    total = sum(sizes.values())
    lines = [
        f"LoRA: rank {lora.lora_rank}, scale {lora.scale:g}, in {len(layers)} layers; {sizes[True]:,} of {total:,} "
        f"parameters are trained ({sizes[True] / total:.2%})"
    ]
    if lora_options.base_dtype is not None:
        lines.append(
            "LoRA: frozen weights are stored in float8, and the adapters alone are exported; nxd-memopt convert --from "
            "checkpoint merges them with model.pretrained"
        )
    if config.optimizer.lr < LEAST_RATE:
        lines.append(f"LoRA: optimizer.lr is {config.optimizer.lr:g}; adapters usually need 1e-4 to 5e-4")
    return lines


def find_adapter_base(training: Training, hf_config: PretrainedConfig, vocabulary: Vocabulary) -> list[str]:
    """Set ``training.base`` and ``training.adapter_base``; return the start report's lines. Every rank calls.

    The base of the checkpoints has the weights. The base of the adapters for PEFT also computes what the model
    computes.
    """
    from nxd_memopt.parallel_layers.coordination import raise_together

    config = training.plan.config
    if config.lora.lora_rank is None:
        return []
    training.base, reason = _find_base(training, hf_config, vocabulary)
    if training.base is not None:
        directory = training.base["directory"]
        try:
            with raise_together(f"reading the configuration of {directory}"):
                require_function_of(directory, hf_config)
            training.adapter_base = directory
            return []
        except ValueError as error:
            reason = str(error)
    if config.lora.base_dtype is not None:
        raise ValueError(
            f"lora.base_dtype fp8 exports adapters alone, and model.pretrained is not their base: {reason}"
        )
    if not config.trainer.export:
        return []
    return [
        "LoRA: the export has the adapters merged; none are written for PEFT, because model.pretrained is not "
        f"their base: {reason}"
    ]


def _find_base(
    training: Training, hf_config: PretrainedConfig, vocabulary: Vocabulary
) -> tuple[Mapping[str, Any] | None, str]:
    """Return what checkpoints record of the weights that are not trained; None, and the reason, if they store them.

    It is ``model.pretrained`` if its files have the model's weights. Otherwise the weights are written once, next to
    the checkpoints, as a Hugging Face directory.
    """
    from nxd_memopt.checkpoint.huggingface.base import STORED, describe_base
    from nxd_memopt.modules.moe.hf_options import require_exportable

    plan = training.plan
    trainer, stored = plan.config.trainer, plan.stored
    recorded = stored and stored.base
    # The stored base of another run stays as it is, and this run writes its own.
    if recorded is not None and (plan.continues or not recorded["is_stored"]):
        return {**recorded, "directory": str(plan.base)}, ""
    try:
        directory = _directory_of_weights(training, hf_config)
        return describe_base(directory, is_stored=False), ""
    except ValueError as error:
        reason = str(error)
    if not trainer.saves_checkpoints or training.step == trainer.max_steps:
        return None, reason
    try:
        require_exportable(training.model)
    except ValueError:
        return None, reason
    assert training.files is not None
    target = trainer.checkpoint_directory / STORED
    export(training.model, vocabulary, target, training.files, merges_adapters=False)
    return describe_base(target, is_stored=True), ""


def _directory_of_weights(training: Training, hf_config: PretrainedConfig) -> Path:
    """Return ``model.pretrained`` if its files have the model's weights without adapters, bit by bit.

    Raises:
        ValueError: on every rank, if they have not.
    """
    from nxd_memopt.checkpoint.huggingface.importing import require_weights_of

    plan, model = training.plan, training.plan.config.model
    if model.pretrained is None:
        raise ValueError("model.pretrained is not set")
    is_from_checkpoint = plan.stored is not None or plan.warm_start is not None
    if is_from_checkpoint or model.random_init or is_upcycled(plan.config, hf_config):
        require_weights_of(training.model, model.pretrained)
    return Path(model.pretrained)


def require_function_of(directory: str, hf_config: PretrainedConfig) -> None:
    """Raise ``ValueError`` if the model with ``hf_config`` computes something else than the model of ``directory``."""
    from nxd_memopt.checkpoint import load_config
    from nxd_memopt.training.resume.changes import architecture

    before, after = architecture(load_config(directory)), architecture(hf_config)
    ignored: set[str] = {*NOT_FUNCTION}
    if rope_options(hf_config)["rope_type"] in LENGTH_INDEPENDENT:
        ignored.add("max_position_embeddings")
    for name in ("model_type", *sorted({*before, *after} - ignored)):
        old, new = before.get(name), after.get(name)
        if old != new:
            raise ValueError(f"{name} is {old!r} in {directory}, and {new!r} in this model")


def write_adapters(training: Training, config: TrainConfig) -> None:
    """Write the adapters in PEFT's format to ``output_dir/adapter``; nothing without. Every rank calls.

    Without ``training.adapter_base`` the adapters of an earlier end of the run are removed: its export has others.
    """
    from nxd_memopt.checkpoint.huggingface.adapters import remove_adapters, save_adapters

    lora = config.lora.config()
    if lora is None:
        return
    target = Path(config.trainer.output_dir) / ADAPTER
    if training.adapter_base is None:
        remove_adapters(target)
    else:
        # The path is absolute: PEFT takes a relative one that does not exist for a name on the hub.
        save_adapters(training.model, target, lora, base_model=training.adapter_base, companions=training.files)
