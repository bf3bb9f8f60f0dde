"""Inspects XLA graphs: acts as a rank of a larger world, traces, compiles without running, dumps."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

DISABLED_PASS = "cse_barrier_expander"
"""XLA:CPU pass that removes optimization barriers before the last CSE pass."""


def dump_flags(directory: Path) -> str:
    """Return ``XLA_FLAGS`` that make XLA:CPU keep barriers and dump HLO text to ``directory``."""
    return f"--xla_dump_to={directory} --xla_dump_hlo_as_text --xla_disable_hlo_passes={DISABLED_PASS}"


def dump_directory() -> Path:
    """Return the directory to which XLA dumps the modules that it compiles.

    Raises:
        RuntimeError: ``XLA_FLAGS`` lacks one of ``dump_flags``. XLA reads the variable once, when
            torch_xla is imported.
    """
    found = os.environ.get("XLA_FLAGS", "")
    flags: dict[str, str] = {}
    for word in shlex.split(found):
        name, _, value = word.partition("=")
        flags[name] = value
    disabled = flags.get("--xla_disable_hlo_passes", "").split(",")
    dump_to = flags.get("--xla_dump_to")
    if not dump_to or "--xla_dump_hlo_as_text" not in flags or DISABLED_PASS not in disabled:
        raise RuntimeError(
            "the compiled step can only be read when XLA dumps it and keeps its barriers; before "
            f"Python starts, set XLA_FLAGS={shlex.quote(dump_flags(Path('DIRECTORY')))} "
            f"(found {found!r})"
        )
    return Path(dump_to)


def dumped_modules() -> set[str]:
    """Return the names of the modules that XLA has compiled and dumped.

    Modules of other processes with the same directory are included.
    """
    suffix = ".before_optimizations.txt"
    return {file.name.removesuffix(suffix) for file in dump_directory().glob(f"*{suffix}")}


@contextmanager
def pretended_rank(world_size: int, rank: int) -> Iterator[None]:
    """Trace as ``rank`` of ``world_size`` would. The graphs can be compiled but not run."""
    import torch_xla  # pyright: ignore[reportMissingImports]
    import torch_xla.runtime as xr  # pyright: ignore[reportMissingImports]

    # torch_xla caches both numbers here; while they are set it does not ask the runtime.
    world_size_before = xr._WORLD_SIZE
    rank_before = xr._ORDINAL
    xr._WORLD_SIZE = world_size
    xr._ORDINAL = rank
    try:
        yield
    finally:
        xr._WORLD_SIZE = world_size_before
        xr._ORDINAL = rank_before
        # torch_xla chains collectives through a token: reset it, so that the next graph starts a
        # new chain
        torch_xla._XLAC._set_all_reduce_token(str(torch_xla.device()), None)


def traced_hlo(outputs: Sequence[Tensor]) -> str:
    """Return the graph of ``outputs`` as HLO text, without compiling it."""
    import torch_xla  # pyright: ignore[reportMissingImports]

    return torch_xla._XLAC._get_xla_tensors_hlo(list(outputs))


def compile_only(outputs: Sequence[Tensor]) -> None:
    """Compile the graph of ``outputs`` without running it."""
    import torch_xla  # pyright: ignore[reportMissingImports]

    torch_xla._XLAC._xla_warm_up_cache(list(outputs), [])
