"""Adds the adapters of a run to its model, finds their base and writes them in PEFT's format."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from nxd_memopt.architectures.model_spec import rope_options

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from nxd_memopt.modules.causal_lm import ParallelCausalLM
    from nxd_memopt.training.config.train_config import TrainConfig
    from nxd_memopt.training.state import Training

ADAPTER = "adapter"
# Options without effect on the values of the exported model: dropout is of training alone, and the row of
# pad_token_id is frozen like the others.
NOT_FUNCTION = ("attention_dropout", "hidden_dropout", "pad_token_id")
# Types of RoPE whose frequencies do not depend on max_position_embeddings.
LENGTH_INDEPENDENT = ("default", "linear", "llama3")


def apply_lora(model: ParallelCausalLM, config: TrainConfig) -> list[str]:
    """Add the adapters of the configuration; return the start report's line about them. Every rank calls."""
    from nxd_memopt.modules.lora import add_adapters
    from nxd_memopt.parallel_layers.resharding import full_shape

    lora = config.lora.config()
    if lora is None:
        return []
    layers = add_adapters(model, lora)
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += math.prod(full_shape(parameter))
    total = sum(sizes.values())
    return [
        f"LoRA: rank {lora.lora_rank}, scale {lora.scale:g}, in {len(layers)} layers; {sizes[True]:,} of {total:,} "
        f"parameters are trained ({sizes[True] / total:.2%})"
    ]


def find_adapter_base(training: Training, hf_config: PretrainedConfig) -> list[str]:
    """Set ``training.adapter_base``; return the start report's line if there is none. Every rank calls.

    The base is ``model.pretrained`` if its configuration and its weights are the model's. Weights that were
    not just loaded from there are compared with its files, bit by bit.
    """
    from nxd_memopt.checkpoint.huggingface.importing import require_weights_of
    from nxd_memopt.parallel_layers.coordination import raise_together

    config = training.plan.config
    directory = config.model.pretrained
    if config.lora.lora_rank is None or not config.trainer.export:
        return []
    try:
        if directory is None:
            raise ValueError("model.pretrained is not set")
        with raise_together(f"reading the configuration of {directory}"):
            _require_function_of(directory, hf_config)
        is_from_checkpoint = training.plan.stored is not None or training.plan.warm_start is not None
        if is_from_checkpoint or config.model.random_init:
            require_weights_of(training.model, directory)
    except ValueError as error:
        return [
            "LoRA: the export has the adapters merged; none are written for PEFT, because model.pretrained is not "
            f"their base: {error}"
        ]
    # Absolute: PEFT takes a relative path that does not exist for a name on the hub.
    training.adapter_base = str(Path(directory).resolve())
    return []


def _require_function_of(directory: str, hf_config: PretrainedConfig) -> None:
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


def write_adapters(model: nn.Module, config: TrainConfig, base: str | None) -> None:
    """Write the adapters in PEFT's format to ``output_dir/adapter``; nothing without. Every rank calls.

    Without a ``base`` the adapters of an earlier end of the run are removed: its export has others.
    """
    from nxd_memopt.checkpoint.huggingface.adapters import remove_adapters, save_adapters

    lora = config.lora.config()
    if lora is None:
        return
    target = Path(config.trainer.output_dir) / ADAPTER
    if base is None:
        remove_adapters(target)
    else:
        save_adapters(model, target, lora, base_model=base)
