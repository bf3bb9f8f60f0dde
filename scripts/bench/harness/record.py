"""The command line that benchmarks share, what every row says of its run, and the CSV files of rows."""

from __future__ import annotations

import argparse
import csv
import datetime
import fcntl
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from nxd_memopt._optional import installed, why_missing
from nxd_memopt.backends import backend

_WRITTEN = ("docs/benchmarks", "docs/numerics", "docs/numerics.md", "README.md")
_VARIABLES = (  # environment variables that change what is measured
    "CUBLAS_WORKSPACE_CONFIG",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NXD_MEMOPT_BACKEND",
    "NXD_MEMOPT_PEER_MEMORY",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_PACKAGES = ("liger-kernel", "cut-cross-entropy", "flash-attn-4", "deepspeed", "torchao")
_KERNELS = {"flash-attn-4": "flash_attn.cute.interface"}  # distributions that ours uses where they can be imported
ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "docs" / "benchmarks"


def cpu_name() -> str:
    """Return the processor's model and number of cores, or without /proc the architecture."""
    # /proc/cpuinfo has a section for each logical core; on Arm it has no line with the model.
    info = Path("/proc/cpuinfo")
    models: list[str] = []
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if not models:
        return platform.machine()
    return f"{models[0]}, {len(models)} cores"


def bench_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks; the rows of ``name`` are in ``NAME.csv``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / f"{name}.csv")
    parser.add_argument("--append", action="store_true", help="append the rows to --csv")
    return parser


def environment() -> dict[str, Any]:
    """Return the columns that every row has in addition to its figures."""
    device = cpu_name()
    if backend.name == "cuda":
        device = torch.cuda.get_device_name()
    return {
        "date": f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peers": ", ".join(usable_packages()),
        "commit": _commit(),
        "command": shlex.join([*_settings(), *_launcher(), "-m", _module(), *sys.argv[1:]]),
    }


def _module() -> str:
    """Return the name of the module that ``python -m`` runs."""
    specification = sys.modules["__main__"].__spec__
    return "unknown" if specification is None else specification.name


def usable_packages() -> list[str]:
    """Return ``name version`` of the installed peers and kernels.

    It is ``name unusable`` for kernels that cannot be imported: ours runs without them.
    """
    packages: list[str] = []
    for package in installed(*_PACKAGES):
        name = package.partition(" ")[0]
        is_unusable = name in _KERNELS and why_missing(_KERNELS[name]) is not None
        packages.append(f"{name} unusable" if is_unusable else package)
    return packages


def _commit() -> str:
    """Return the commit, with ``-dirty`` if files other than benchmark results have changed."""
    # Results are excluded: the rows of the previous benchmark of a series are not committed yet,
    # and they do not change what this one measures.
    commit = _git("rev-parse", "--short", "HEAD")
    excluded = [f":(exclude,top){name}" for name in _WRITTEN]
    changes = _git("status", "--porcelain", "--", ":/", *excluded)
    if not commit:
        return "unknown"
    if changes:
        return f"{commit}-dirty"
    return commit


def last_commit(path: str) -> str:
    """Return the last commit that changed ``path`` of the repository, or ``unknown`` outside of it."""
    return _git("log", "-1", "--format=%h", "--", f":(top){path}") or "unknown"


def _git(*arguments: str) -> str:
    """Return the output of a git command, or an empty text outside a repository."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _settings() -> list[str]:
    """Return the assignments of environment variables at the start of the command."""
    return [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]


def _launcher() -> list[str]:
    """Return the program at the start of the command."""
    # torchrun sets WORLD_SIZE for its ranks.
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return ["python"]
    return ["torchrun", "--nproc_per_node", size]


def append(rows: list[dict[str, Any]], path: Path) -> None:
    """Append ``rows`` to a CSV file and add columns that the file does not have.

    A lock on the folder admits one process at a time.
    """
    # The lock is on the folder because the file is replaced: a process that waits for a lock on the
    # old file would then append to a file that no longer has a name.
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _append(rows, path)
    finally:
        os.close(folder)  # releases the lock


def _append(rows: list[dict[str, Any]], path: Path) -> None:
    """Rewrite the file with ``rows`` appended; renaming makes it atomic."""
    recorded: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            recorded = list(csv.DictReader(file))
    # Columns in the order of their first appearance: the file's own first, then new ones. Rows
    # without a value for a column get an empty cell.
    names = list(dict.fromkeys(name for row in (*recorded, *rows) for name in row))
    incomplete = path.with_suffix(".incomplete")
    with incomplete.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*recorded, *rows])
    incomplete.replace(path)


def publish(rows: list[dict[str, Any]], columns: Sequence[str], title: str, args: argparse.Namespace) -> None:
    """Print ``columns`` of all rows; with ``args.append`` append them to ``args.csv``."""
    rows = [{name: row.get(name, "") for name in columns} for row in rows]
    print_table(rows, title)
    if args.append:
        append([row | environment() for row in rows], args.csv)


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """Print one line per row, of which there is at least one."""
    from rich.console import Console  # imported here: machines that only measure may not have it
    from rich.table import Table

    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=200).print(table)
