"""Writes the adapters (LoRA) of a model in PEFT's format: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nxd_memopt.architectures.layers import fused_name
from nxd_memopt.checkpoint.directories import new_version, restore_interrupted
from nxd_memopt.checkpoint.files import write_safetensors
from nxd_memopt.checkpoint.full_tensors import FullTensors, is_writer
from nxd_memopt.checkpoint.huggingface.companions import copy_companions
from nxd_memopt.checkpoint.huggingface.exporting import copy_other_files, require_replaceable
from nxd_memopt.checkpoint.names import named_tensors
from nxd_memopt.lora_config import ADAPTER_CONFIG, LoraConfig, is_target
from nxd_memopt.modules.lora import adapted_layers, is_adapter, model_type_of
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.data_shards import model_dtype

ADAPTER_WEIGHTS = "adapter_model.safetensors"
# PEFT wraps a causal language model twice.
PEFT_PREFIX = "base_model.model."


def save_adapters(
    model: torch.nn.Module,
    directory: str | Path,
    config: LoraConfig,
    *,
    base_model: str | None,
    companions: str | Path | None = None,
    read: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Write the adapters of ``model`` for ``peft.PeftModel.from_pretrained``. Every rank calls.

    The directory appears with one rename, and replaces an earlier one of adapters.

    Args:
        model: a model with adapters.
        directory: must be absent, empty, or of adapters that this program wrote.
        config: the adapters' configuration.
        base_model: directory or name of the base model, which PEFT loads if it is asked to.
        companions: directory with the tokenizer and chat template that the adapters were trained with, which are
            copied; read by the writing rank.
        read: returns the full tensor of a parameter, of a model on the meta device; default gathers the parameter.

    Raises:
        ValueError: on every rank, if the model has no adapters or adapters of another configuration, or the
            directory cannot be replaced.
    """
    target = Path(directory).resolve()
    task = f"writing the adapters to {target}"
    writes = is_writer()
    full = FullTensors(model)
    layers = adapted_layers(full.model)
    with raise_together(task):
        if not layers:
            raise ValueError("the model has no adapters: call add_adapters first")
        for name, layer in layers.items():
            found = (layer.lora_A.weight.shape[0], layer.scale)
            if found != (config.lora_rank, config.scale):
                raise ValueError(
                    f"{name} has an adapter of rank and scale {found}, and config has "
                    f"{(config.lora_rank, config.scale)}: pass the configuration of add_adapters"
                )
        if writes:
            restore_interrupted(target)
            require_replaceable_adapters(target)
    tensors = _gather(full, read)
    with raise_together(task):
        if writes:
            with new_version(target) as incomplete:
                write_safetensors(incomplete / ADAPTER_WEIGHTS, tensors)
                content = _peft_config(target_modules(full.model), config, base_model)
                text = json.dumps(content, indent=2) + "\n"
                (incomplete / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
                has_own = companions is not None and copy_companions(Path(companions), incomplete)
                copy_other_files(target, incomplete, companions=not has_own)


def remove_adapters(target: Path) -> None:
    """Remove the files of ``save_adapters`` from the directory ``target``. Every rank calls."""
    with raise_together(f"removing the adapters in {target}"):
        if parallel_state.is_global_rank_zero():
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                (target / name).unlink(missing_ok=True)


def require_replaceable_adapters(target: Path) -> None:
    """Raise ``ValueError`` unless ``target`` is absent, empty, or a directory of adapters of this program."""
    require_replaceable(target, re.compile(re.escape(ADAPTER_WEIGHTS)))


def _gather(full: FullTensors, read: Callable[[torch.Tensor], torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return the full adapters by PEFT's names, on the writer."""
    model = full.model
    # Of a fused layer there is one A, and B has the rows of its parts one below the other, in the model's order.
    parts: dict[str, list[torch.Tensor]] = {}
    for entry in named_tensors(model):
        if not is_adapter(entry.names[0]):
            continue
        if read is not None:
            tensor = read(entry.tensor)
        else:
            tensor = full.gather(entry.names[0], entry.tensor, model_dtype(entry.tensor))
        if tensor is not None:
            layer, factor, kind = entry.names[0].rsplit(".", 2)
            name = f"{PEFT_PREFIX}{fused_name(model_type_of(model), layer)}.{factor}.{kind}"
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(each) for name, each in parts.items()}


def target_modules(model: torch.nn.Module) -> list[str]:
    """Return names by which PEFT finds the layers with adapters, and no others.

    Those are the last parts of the layers' names, such as ``q_proj``, or, if a layer without an adapter
    has such a name too, the full names.
    """
    model_type = model_type_of(model)
    layers = list(dict.fromkeys(fused_name(model_type, name) for name in adapted_layers(model)))
    short = sorted({name.rpartition(".")[2] for name in layers})
    modules = dict.fromkeys(fused_name(model_type, name) for name, _ in model.named_modules())
    found = [name for name in modules if is_target(name, short)]
    return short if found == layers else layers


def _peft_config(targets: list[str], config: LoraConfig, base_model: str | None) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "init_lora_weights": True if config.init_lora_weights == "default" else config.init_lora_weights,
        "target_modules": targets,
        "bias": config.bias,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
