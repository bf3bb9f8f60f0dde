"""Plans recorded steps again: the errors of today's formulas, without a GPU.

    python -m scripts.bench.planner.rows
    python -m scripts.bench.planner.rows --formulas b3d160d 0cffe7e --csv docs/benchmarks/planned_memory.csv
    python -m scripts.bench.planner.rows --beyond

Each row of ``planner.memory`` names its step in full. Printed are the errors of its allocated and reserved
bytes and of its time, ``planned / measured - 1``; ``--beyond`` prints the rows beyond the bounds of ``planner.memory``
alone. A row that code after it has changed, for example a fused kernel that keeps fewer tensors, is off for
that reason. Planned times have published rates.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_memopt.planner.hardware import device_named
from nxd_memopt.training.memory_plan import planned
from nxd_memopt.training.model import load_hf_config
from scripts.bench.planner.cells import DEVICE, Cell
from scripts.bench.planner.errors import WAITING_PART, is_beyond
from scripts.bench.planner.memory import CSV, waits_for_memory

_OPTION = re.compile(r"(\w+)=(\([^)]*\)|\S+)")
_SECTIONS = {
    "optimizer": ("optimizer_", "store_param_remainders", "overlap_grad_reduce"),
    "trainer": ("fp8",),
    "lora": ("lora_",),
}


def cell_of(row: Mapping[str, str]) -> Cell:
    """Return the step of a row."""
    options = {name: _value(text) for name, text in _OPTION.findall(row["options"])}
    # Rows of before 2026-11-28 name a switch and a number.
    options.pop("optimizer_cpu_offload", None)
    if "recompute_keep_core_attn_num_layers" in options:
        options["recompute_keep_core_attn"] = options.pop("recompute_keep_core_attn_num_layers")
    own = {name: options.pop(name) for name in ("T", "D", "P", "V", "sharding", "compile") if name in options}
    sections: dict[str, dict[str, Any]] = {}
    for section, starts in _SECTIONS.items():
        sections[section] = {name: options.pop(name) for name in list(options) if name.startswith(starts)}
    return Cell(
        name=row["cell"],
        model=row["model"],
        layers=int(row["layers"]),
        tokens=int(row["tokens"]),
        precision=row["precision"],
        memory=options,
        cuda_graph="cuda_graph" in row["options"].split(),
        micro_batch=int(row["micro_batch"]),
        accumulation=int(row["accumulation"]),
        compile=own.get("compile"),
        tensor_parallel=own.get("T", 1),
        data_parallel=own.get("D", 1),
        sharding=own.get("sharding", "none"),
        stages=(own.get("P", 1), own.get("V", 1)),
        **sections,
        seed=int(row["seed"]) if row["seed"] else None,
    )


def _value(text: str) -> Any:
    """Return a number, a boolean or a tuple of a row's options, or the word."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def errors_of(row: Mapping[str, str]) -> dict[str, float]:
    """Return the errors of today's plan in percent, by the columns of ``planner.memory``."""
    cell = cell_of(row)
    config = cell.config()
    hf_config = load_hf_config(config.model, config.moe)
    ranks = cell.tensor_parallel * cell.data_parallel * cell.stages[0]
    _, plan = planned(config, hf_config, device_named(DEVICE), ranks=ranks)
    memory = plan.memory
    sizes = {"allocated": memory.device_bytes, "reserved": memory.reserved_bytes, "host": memory.host_bytes}
    found: dict[str, float] = {}
    for name, size in sizes.items():
        measured = float(row[f"{name}_bytes"] or 0)
        if measured:
            found[f"{name}_error"] = 100 * (size / measured - 1)
    # Rows from before they were left out have what such a step took of the memory that was left.
    if waits_for_memory(config.memory):
        found.pop("allocated_error", None)
    waits = plan.time.uncertain_s / plan.time.step_s > WAITING_PART
    found["host_limited_step_error" if waits else "step_error"] = 100 * (plan.time.step_s / float(row["step_s"]) - 1)
    return found


def beyond(row: Mapping[str, str], errors: Mapping[str, float]) -> list[str]:
    """Return the errors that ``planner.memory`` names as beyond the bounds."""
    found: list[str] = []
    for error, value in errors.items():
        name = error.removesuffix("_error")
        if is_beyond(name, value, float(row.get(f"{name}_bytes") or 0)):
            found.append(f"{name} {value:+.2f} %")
    return found


def rows_of(path: Path, formulas: list[str] | None = None) -> list[dict[str, str]]:
    """Return the rows of steps that ran, of H200s and, if given, of these formulas."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not row["failure"] and row["device"] == "NVIDIA H200"]
    return [row for row in rows if formulas is None or row["formulas"] in formulas]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--formulas", nargs="+", help="commits of the rows, by default all")
    parser.add_argument("--beyond", action="store_true", help="print only the rows beyond the bounds")
    args = parser.parse_args()
    rows = rows_of(args.csv, args.formulas)
    if not rows:
        parser.error(f"{args.csv} has no step that ran with {args.formulas or 'any formulas'}")
    number = 0
    for row in rows:
        errors = errors_of(row)
        outside = beyond(row, errors)
        number += bool(outside)
        if outside or not args.beyond:
            shown = ", ".join(f"{name} {value:+.2f} %" for name, value in errors.items())
            print(f"{row['formulas']} {row['cell']} {row['seed']}: {shown}{'  BEYOND' if outside else ''}")
    print(f"{number} of {len(rows)} rows are beyond the bounds")


if __name__ == "__main__":
    main()
