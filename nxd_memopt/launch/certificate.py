"""Puts a training configuration to ``nxd-memopt certify``, which needs no hardware."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from nxd_memopt.config import MemoryConfig
from nxd_memopt.training.config import TrainConfig

DEVICES = {
    "trn1": ("xla", "trn1"),
    "xla_cpu": ("xla", "trn1"),
    "trn2": ("cpu", "trn2"),
    "trn2-lnc1": ("cpu", "trn2-lnc1"),
    "trn2-3xlarge": ("cpu", "trn2"),
    "trn3": ("cpu", "trn3"),
}
"""Platform -> (backend on which certify measures the step, device whose memory must fit it)."""


def certify_command(
    config: TrainConfig, platform: str, *, world_size: int, device_memory_gib: float | None, directory: Path
) -> list[str]:
    """Return the ``nxd-memopt certify`` command for one micro-batch of the run on one rank.

    Args:
        config: configuration of the run.
        platform: a name from ``PLATFORMS``.
        world_size: number of ranks on all hosts.
        device_memory_gib: memory of one rank in GiB; ``None`` takes the platform's.
        directory: existing directory for the model's config.json, which is written if the
            configuration has no ``model.pretrained``.

    Raises:
        ValueError: the memory of one rank is not known, or the command is not installed.
    """
    backend, device = DEVICES.get(platform, ("cpu", None))
    if device is None and device_memory_gib is None:
        raise ValueError(f"--platform {platform} has devices of many sizes: pass --device-memory-gib for one rank's")
    # The command next to this interpreter comes first: the environment may not be activated.
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which("nxd-memopt", path=search_path)
    if program is None:
        raise ValueError("nxd-memopt is not installed for this Python: run pip install -e '.[train]' in the checkout")
    command = [program, "certify", *_model(config, directory), "--backend", backend]
    command += ["--device", device] if device else []
    command += ["--device-memory-gib", str(device_memory_gib)] if device_memory_gib is not None else []
    return [*command, *_step(config), *_memory(config), *_optimizer(config, world_size)]


def _model(config: TrainConfig, directory: Path) -> list[str]:
    """Return the options for the model; write a config.json if there is no pretrained directory."""
    overrides = config.model.config_overrides
    if config.model.pretrained is None:
        file = directory / "config.json"
        file.write_text(json.dumps(overrides), encoding="utf-8")
        return ["--model", str(file)]
    changes = [f"{name}={json.dumps(value)}" for name, value in overrides.items()]
    return ["--model", config.model.pretrained, *(["--override", *changes] if changes else [])]


def _step(config: TrainConfig) -> list[str]:
    """Return the options for parallelism, S, B and dtype."""
    parallel, data = config.parallel, config.data
    options = ["--tensor-model-parallel-size", str(parallel.tensor_model_parallel_size)]
    options += ["--sequence-parallel-enabled"] if parallel.sequence_parallel_enabled else []
    options += ["--reduce-dtype", parallel.reduce_dtype] if parallel.reduce_dtype else []
    options += ["--seq-length", str(data.seq_length), "--micro-batch-size", str(data.micro_batch_size)]
    return [*options, "--dtype", config.model.dtype]


def _memory(config: TrainConfig) -> list[str]:
    """Return the options for recompute and attention.

    Raises:
        ValueError: certify cannot measure one of the techniques, so its certificate would be of another step.
    """
    memory, options = config.memory, []
    defaults = MemoryConfig()
    for name in ("cpu_offloading_num_layers", "fused_linear_cross_entropy"):
        value, default = getattr(memory, name), getattr(defaults, name)
        if value != default:
            raise ValueError(f"certify has no option for memory.{name} {value}: set {default} for the dry run")
    for name in ("recompute_granularity", "recompute_method", "recompute_num_layers", "attention_backend"):
        if getattr(memory, name) is not None:
            options += [f"--{name.replace('_', '-')}", str(getattr(memory, name))]
    options += ["--recompute-keep-core-attn"] if memory.recompute_keep_core_attn else []
    return options + (["--recompute-modules", *memory.recompute_modules] if memory.recompute_modules else [])


def _optimizer(config: TrainConfig, world_size: int) -> list[str]:
    """Return the options for the memory of AdamW's states, which certify adds by arithmetic."""
    # fp32 parameters are their own master weights. D matters for ZeRO-1 only, which shards states.
    has_masters = config.model.dtype != "float32" and config.optimizer.master_weights
    replicas = config.data_parallel_size(world_size)
    options = ["--master-weights"] if has_masters else []
    return options + (["--zero1", "--data-parallel-size", str(replicas)] if config.optimizer.zero1 else [])
