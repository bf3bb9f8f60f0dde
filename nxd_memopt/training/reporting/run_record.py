"""Writes what a run was started with next to its metrics: the resolved options and the versions."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from dataclasses import MISSING, asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from nxd_memopt.backends import backend
from nxd_memopt.files import write_text
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.runtime.distributed import world_size

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
PACKAGES = (
    "nxd_memopt",
    "torch",
    "torch_xla",
    "torch_neuronx",
    "neuronx-cc",
    "transformers",
    "datasets",
    "triton",
    "flash-attn-4",
)
VARIABLES = ("NEURON_", "NXD_MEMOPT_", "NCCL_", "PYTORCH_", "CUBLAS_", "CUDA_", "XLA_", "OMP_NUM_THREADS")
"""Beginnings of the names of environment variables that change how a run computes."""


def options_of(config: TrainConfig) -> dict[str, Any]:
    """Return the options by section, as plain values that YAML and JSON have."""
    # Through JSON: tuples are lists in YAML too.
    options = json.loads(json.dumps(asdict(config)))
    if options.pop("auto_memory"):
        options["memory"] = "auto"
    return options


def changed_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options that are not at their defaults, such as ``"data.seq_length"``, as plain values."""
    found: dict[str, Any] = {}
    for name, values in options_of(config).items():
        if not isinstance(values, dict):
            found[name] = values
            continue
        for each in fields(getattr(config, name)):
            default = each.default
            if each.default_factory is not MISSING:
                default = each.default_factory()
            # As plain values, like the options: tuples are lists there.
            value, key = values[each.name], f"{name}.{each.name}"
            if default is not MISSING and value == json.loads(json.dumps(default)):
                continue
            if isinstance(value, dict):
                found |= {f"{key}.{inner}": item for inner, item in value.items()}
            else:
                found[key] = value
    return found


def options_text(config: TrainConfig) -> str:
    """Return the options as YAML, which ``--config`` reads."""
    return yaml.safe_dump(options_of(config), sort_keys=False, allow_unicode=True, width=120)


def environment() -> dict[str, Any]:
    """Return versions, device, ranks, command and environment variables of this process."""
    return {
        "command": shlex.join(sys.orig_argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": backend.name,
        "device": backend.hardware_name(),
        "ranks": world_size(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }


def write_run_record(config: TrainConfig) -> None:
    """Write ``config.yaml`` and ``environment.json`` of the process that trains now. Rank 0 calls.

    Raises:
        OSError: a file cannot be written, because of a full disk perhaps.
    """
    directory = Path(config.trainer.output_dir)
    texts = {
        CONFIG: options_text(config),
        ENVIRONMENT: json.dumps(environment(), indent=2) + "\n",
    }
    for name, text in texts.items():
        try:
            write_text(directory / name, text)
        except OSError as error:
            raise OSError(f"could not write {directory / name}: {error}: free disk space and start again") from error


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
