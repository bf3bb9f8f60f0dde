"""Options of benchmarks for memory techniques and for a limit of the device's memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import yaml

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--memory`` and ``--cap-gib``."""
    parser.add_argument(
        "--memory",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="ours: an option of MemoryConfig with its YAML value, such as mlp_tile_tokens=auto; repeatable",
    )
    parser.add_argument("--cap-gib", type=float, help="limit of the device memory that tensors may use")


def with_options(memory: MemoryConfig, words: Sequence[str]) -> MemoryConfig:
    """Return ``memory`` with the options of ``words``, each ``OPTION=VALUE``.

    Raises:
        SystemExit: an option is unknown, or its value is invalid.
    """
    names = {field.name for field in fields(MemoryConfig)}
    options = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name not in names:
            raise SystemExit(f"error: --memory {word} is not OPTION=VALUE with one of {', '.join(sorted(names))}")
        options[name] = yaml.safe_load(value)
    try:
        return replace(memory, **options)
    except ValueError as error:
        raise SystemExit(f"error: --memory: {error}") from error


def limit_device_memory(cap_gib: float | None) -> None:
    """Let PyTorch's allocator use at most ``cap_gib`` GiB; None sets no limit."""
    if cap_gib is None:
        return
    if backend.name != "cuda":
        raise SystemExit(f"error: --cap-gib needs an NVIDIA GPU, the backend is {backend.name}")
    total = torch.cuda.get_device_properties(backend.device).total_memory
    torch.cuda.set_per_process_memory_fraction(cap_gib * 2**30 / total)
