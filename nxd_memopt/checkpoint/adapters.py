"""Writes the adapters (LoRA) of a model in PEFT's format: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from nxd_memopt.checkpoint.directories import incomplete_path, replace_directory, restore_interrupted
from nxd_memopt.checkpoint.files import write_safetensors
from nxd_memopt.checkpoint.names import named_tensors
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.modules.lora import adapted_layers, is_adapter
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.checkpointing import is_model_replica_zero
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.data_shards import gather_rows
from nxd_memopt.parallel_layers.resharding import gather_full_tensor

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# PEFT wraps a causal language model twice.
PEFT_PREFIX = "base_model.model."


def save_adapters(model: torch.nn.Module, directory: str | Path, config: LoraConfig, *, base_model: str | None) -> None:
    """Write the adapters of ``model`` for ``peft.PeftModel.from_pretrained``. Every rank calls.

    The directory appears with one rename, and replaces an earlier one of adapters.

    Args:
        model: a model with adapters.
        directory: must be absent, empty, or have an ``adapter_config.json``.
        config: the adapters' configuration.
        base_model: directory or name of the base model, which PEFT loads if it is asked to.

    Raises:
        ValueError: on every rank, if the model has no adapters or the directory cannot be replaced.
    """
    target = Path(directory).resolve()
    task = f"writing the adapters to {target}"
    writes = is_model_replica_zero() and parallel_state.get_tensor_model_parallel_rank() == 0
    layers = list(adapted_layers(model))
    with raise_together(task):
        if not layers:
            raise ValueError("the model has no adapters: call add_adapters first")
        if writes:
            restore_interrupted(target)
            require_replaceable_adapters(target)
    tensors = _gather(model)
    with raise_together(task):
        if writes:
            incomplete = incomplete_path(target)
            try:
                incomplete.mkdir(parents=True)
                write_safetensors(incomplete / ADAPTER_WEIGHTS, tensors)
                text = json.dumps(_peft_config(layers, config, base_model), indent=2) + "\n"
                (incomplete / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
                replace_directory(incomplete, target)
            finally:
                shutil.rmtree(incomplete, ignore_errors=True)


def require_replaceable_adapters(target: Path) -> None:
    """Raise ``ValueError`` unless ``target`` is absent, empty, or a directory of adapters."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file, and adapters are a directory: choose another one")
    if target.is_dir() and any(target.iterdir()) and not (target / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{target} is neither empty nor of adapters (no {ADAPTER_CONFIG}): choose another directory")


def _gather(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the full adapters by PEFT's names, on tensor-parallel rank 0 of the first replica."""
    tensors: dict[str, torch.Tensor] = {}
    for entry in named_tensors(model):
        if not is_adapter(entry.names[0]):
            continue
        # Rows that are sharded over data-parallel ranks (zero3) need the ranks of all replicas.
        rows = gather_rows(entry.tensor)
        if is_model_replica_zero():
            full = gather_full_tensor(rows)
            if full is not None:
                tensors[PEFT_PREFIX + entry.names[0]] = full
    return tensors


def _peft_config(layers: list[str], config: LoraConfig, base_model: str | None) -> dict[str, Any]:
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
        # The layers that have adapters: a name of them may stand for others in another model.
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "bias": config.bias,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
