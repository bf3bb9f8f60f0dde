"""The rows of docs/benchmarks and the sections of docs/benchmarks.md that show them column by column."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
DEVICE = "NVIDIA H200"  # of the tables that compare ours with the best peer
OTHER_DEVICE = "NVIDIA H100 80GB HBM3"
SHARED_HOST = (
    "Rows of two GPUs of b5657f0 were measured on two of the four GPUs of a host, while the other two ran another "
    "benchmark."
)
Row = dict[str, str]
STATE_COLUMNS = {
    "device": "device",
    "model": "model",
    "tensor_parallel": "T",
    "variant": "variant",
    "tokens": "tokens",
    "accumulation": "micro-batches",
    "memory": "memory options",
    "states": "states",
    "fraction": "fraction",
    "cap_gib": "cap GiB",
    "document_tokens": "document",
    "step_ms": "ms",
    "floor_ms": "floor ms",
    "link_gb_per_s": "link GB/s",
    "tokens_per_s_per_device": "tokens/s/GPU",
    "peak_gib": "GiB",
    "host_gib": "GiB on the host",
    "failure": "failure",
    "commit": "commit",
}
SHARDED_COLUMNS = {
    "device": "device",
    "model": "model",
    "data_parallel": "D",
    "tensor_parallel": "T",
    "tokens": "tokens per sequence",
    "states": "states",
    "recompute": "recompute",
    "variant": "variant",
    "step_ms": "ms",
    "tokens_per_s_per_device": "tokens/s/GPU",
    "peak_gib": "GiB",
    "failure": "failure",
    "commit": "commit",
}
EXPERT_COLUMNS = {
    "shape": "shape",
    "routing": "routing",
    "variant": "variant",
    "ms": "ms",
    "over_floor": "x floor",
    "floor_ms": "floor ms",
    "batched_floor_ms": "batched floor ms",
    "peak_gib": "GiB",
    "failure": "failure",
    "commit": "commit",
}
MATMUL_COLUMNS = {
    "shape": "shape",
    "matmul": "matmul",
    "ours_ms": "ours ms",
    "torch_ms": "torch ms",
    "over_torch": "ours / torch",
    "tflops": "ours TFLOP/s",
    "commit": "commit",
}
PRECISION_COLUMNS = {
    "model": "model",
    "precision": "precision",
    "steps": "steps",
    "held_out_before": "before",
    "held_out_after": "after",
    "percent": "%",
    "tokens_per_s": "tokens/s",
    "commit": "commit",
}
PLANNED_ERRORS = {
    "allocated_error": "allocated",
    "reserved_error": "reserved",
    "host_error": "host",
    "step_error": "time",
    "host_limited_step_error": "time, host-limited",
}


def rows_of(name: str, device: str = DEVICE) -> list[Row]:
    """Return the rows of a benchmark on ``device``; an empty list without a file."""
    path = BENCHMARKS / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ValueError(f"{path}: row {number} has not the header's columns: mend or remove it")
    return [row for row in rows if row.get("device") == device]


def column_lines(rows: Sequence[Row], columns: Mapping[str, str]) -> list[str]:
    """Return a table of ``rows``, with the header ``columns[name]`` for the column ``name``."""
    lines = [f"| {' | '.join(columns.values())} |", "|---" * len(columns) + "|"]
    return lines + [f"| {' | '.join(row[name] for name in columns)} |" for row in rows]


def expert_parts() -> list[str]:
    """Return the sections of mixtures of experts."""
    parts: list[str] = []
    experts = rows_of("moe_layer")
    if experts:
        parts += [
            "## Experts of one layer",
            f"{DEVICE}, bf16, 16,384 tokens, forward and backward: milliseconds, multiple of the floor (six dense "
            "matmuls of the same work), GiB above weights and inputs ([rows](benchmarks/moe_layer.csv)). `hf`: "
            "transformers' experts with `grouped_mm`. Batched floor: as many batched matmuls as experts. `scattermoe` "
            "and `sonicmoe`: checkouts of the commits in their rows' commands. Rows of 949024d are timed after a "
            "pause, after which the GPU multiplies faster, the others after 0.7 s of the same work: compare multiples "
            "of the floor.",
            "\n".join(column_lines(experts, EXPERT_COLUMNS)),
        ]
    matmuls = rows_of("moe_matmuls")
    if matmuls:
        parts += [
            "## Matmuls of experts",
            f"{DEVICE}, bf16, 16,384 tokens. Ours gather the rows of tokens; torch's `grouped_mm` after `index_select` "
            "([rows](benchmarks/moe_matmuls.csv)).",
            "\n".join(column_lines(matmuls, MATMUL_COLUMNS)),
        ]
    return parts


def state_parts() -> list[str]:
    """Return the section of optimizer states on the host; nothing without rows."""
    rows = [row for device in (DEVICE, OTHER_DEVICE) for row in rows_of("state_offload", device)]
    if not rows:
        return []
    return [
        "## Optimizer states in host memory",
        "Hosts with 128 GiB per GPU, batch 1, bf16 weights, bf16 gradients unless `states` says otherwise, clipping by "
        "the global norm; ours with fp32 masters and moments (12 bytes per parameter), of which `fraction` is on the "
        "host. `floor ms`: the states once in each direction over the link, at the speed measured before the "
        "row. `cap GiB`: limit of the device memory. `document`: attention within documents of "
        "that many tokens, so the row shows memory only. A row without flash-attn-4 among its peers has cuDNN's "
        f"attention. {SHARED_HOST} ([rows](benchmarks/state_offload.csv)).",
        "\n".join(column_lines(rows, STATE_COLUMNS)),
    ]


def sharded_parts() -> list[str]:
    """Return the section of ZeRO-3; nothing without rows."""
    rows = [row for device in (DEVICE, OTHER_DEVICE) for row in rows_of("sharded_step", device)]
    if not rows:
        return []
    # Rows of earlier commits have no tensor parallelism.
    rows = [row | {"tensor_parallel": row.get("tensor_parallel") or "1"} for row in rows]
    return [
        "## ZeRO-3",
        "Ours and FSDP2 on transformers' model with Liger-Kernel, one model over D x T GPUs of a host, one sequence "
        "for each T of them, full steps with clipping. `states`: fp32 shards are masters, with fp32 moments and "
        "reductions (16 bytes per parameter over D x T); bf16 shards are weights, with bf16 moments and reductions "
        "(8 bytes) ([rows](benchmarks/sharded_step.csv)).",
        "\n".join(column_lines(rows, SHARDED_COLUMNS)),
    ]


def precision_parts() -> list[str]:
    """Return the section of precisions; nothing without rows."""
    rows = rows_of("precision")
    if not rows:
        return []
    return [
        "## Precisions",
        f"{DEVICE}, `nxd-memopt train` from the same weights, on the same data with the same schedule, held-out "
        "losses before and after; `%`: difference from the first row ([rows](benchmarks/precision.csv)).",
        "\n".join(column_lines(rows, PRECISION_COLUMNS)),
    ]


def planned_parts() -> list[str]:
    """Return the section of planned steps, one line for each commit of the planner; nothing without rows."""
    rows = [row for device in (DEVICE, OTHER_DEVICE) for row in rows_of("planned_memory", device)]
    if not rows:
        return []
    table: list[Row] = []
    for formulas, device in dict.fromkeys((row["formulas"], row["device"]) for row in rows):
        same = [row for row in rows if (row["formulas"], row["device"]) == (formulas, device)]
        line = {"device": device, "formulas": formulas, "rows": str(len(same))}
        line["drawn"] = str(sum(row["seed"] != "" for row in same))
        line["failed"] = str(sum(row["failure"] != "" for row in same))
        line |= {column: _errors(same, column) for column in PLANNED_ERRORS}
        table.append(line)
    headers = {"device": "device", "formulas": "planner's commit", "rows": "steps"}
    headers |= {name: name for name in ("drawn", "failed")}
    return [
        "## Planned against measured steps",
        "`planned / measured - 1` in percent: median of the magnitudes, and the ends. Each step runs as in "
        "`nxd-memopt train`. Reserved: what the allocator takes in a step that may take no more than planned; a step "
        "that needed more is a failure. Drawn: by a seed, after the planner's commit. Host-limited: steps that wait "
        "for the host's launches, which take 20 to 30 % more or less time from run to run; in lines without them they "
        "are among the others ([rows](benchmarks/planned_memory.csv)).",
        "\n".join(column_lines(table, headers | PLANNED_ERRORS)),
    ]


def choice_parts() -> list[str]:
    """Return the section of the planner's choices, one line for each problem and commit; nothing without rows."""
    rows = rows_of("planned_choice")
    if not rows:
        return []
    table: list[Row] = []
    for formulas, problem in dict.fromkeys((row["formulas"], row["problem"]) for row in rows):
        same = [row for row in rows if (row["formulas"], row["problem"]) == (formulas, problem)]
        measured = {int(row["rank"]): float(row["step_s"]) for row in same if not row["failure"]}
        best = min(measured, key=lambda rank: measured[rank])
        line = {"formulas": formulas, "problem": problem, "settings": str(len(measured))}
        line |= {"failed": str(len(same) - len(measured)), "best": f"{best} ({measured[best]:.4g} s)"}
        line |= {"chosen": "failed", "part": ""}
        if 0 in measured:
            line |= {"chosen": f"{measured[0]:.4g} s", "part": f"{measured[best] / measured[0]:.1%}"}
        table.append(line)
    headers = {"formulas": "planner's commit", "problem": "problem", "settings": "settings", "failed": "failed"}
    headers |= {"chosen": "chosen setting", "best": "fastest rank", "part": "part of the fastest's speed"}
    return [
        "## Chosen against measured settings",
        f"{DEVICE}: a step of the setting that `nxd-memopt plan` ranks first (rank 0), and the fastest of its first "
        "twelve and four drawn ones. Several problems ran on one host at the same time, so that their copies "
        "to the host shared its memory ([rows](benchmarks/planned_choice.csv)).",
        "\n".join(column_lines(table, headers)),
    ]


def _errors(rows: Sequence[Row], column: str) -> str:
    """Return median and ends of a column of errors."""
    values = [float(row[column]) for row in rows if row.get(column)]
    if not values:
        return ""
    median = statistics.median(abs(value) for value in values)
    return f"{median:.2f} ({min(values):+.2f} to {max(values):+.2f})"
