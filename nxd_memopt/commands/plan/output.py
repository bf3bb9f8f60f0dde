"""Shows planned settings: as lines of text with what their figures assume, as a plot, and as values of JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxd_memopt._optional import require_installed
from nxd_memopt.architectures.experts import BALANCED_ROUTING
from nxd_memopt.planner.hardware import GIB, NOT_MODELLED
from nxd_memopt.planner.search.plan import Plan
from nxd_memopt.planner.search.problem import Problem, attention_notes
from nxd_memopt.planner.timing.step_time import StepTime, rates_of


def header(name: str, problem: Problem, best: Plan, *, is_default_batch: bool) -> str:
    """Return the line about what was planned."""
    device = problem.device
    batch = f"{problem.global_batch_size:,} sequences"
    if is_default_batch:
        batch += " (by default about 4M tokens)"
    # A calibrated device has as many ranks on a host as were measured.
    hosts = -(-problem.devices // device.ranks_per_host)
    shown = ""
    if hosts > 1:
        shown = f" on {hosts} hosts of {device.ranks_per_host}"
    return (
        f"{name} on {problem.devices} x {device.name}{shown}, {problem.sequence_length:,} tokens, "
        f"global batch {batch}, {problem.precision}; {max(0, best.usable_bytes) / GIB:.1f} of "
        f"{device.memory_gib:g} GiB for tensors"
    )


def assumptions(problem: Problem, best: Plan, shown: Sequence[Plan]) -> list[str]:
    """Return the lines about what the figures of the shown settings assume."""
    device = problem.device
    lines: list[str] = []
    # Rates of data sheets or of this machine's matmuls alone: nobody has compared a step with them.
    if not rates_of(device).is_calibrated:
        known = "come from measured rates, and no step was compared" if device.measured else "are not calibrated"
        lines.append(f"Times on {device.name} {known}: they order the settings, no more. docs/planner.md")
    if NOT_MODELLED[device.kind]:
        lines.append(f"Only hardware shows: {'; '.join(NOT_MODELLED[device.kind])}.")
    lines += [f"{note[0].upper()}{note[1:]}." for note in attention_notes(problem, best.setting)]
    if any(plan.setting.expert_model_parallel_size > 1 for plan in shown):
        lines.append(f"With EP above 1 the figures assume {BALANCED_ROUTING}.")
    if problem.moe is not None and problem.moe.moe_expert_block_size is not None:
        block = problem.moe.moe_expert_block_size
        lines.append(f"Experts in blocks of {block} rows, of fixed shapes (moe.moe_expert_block_size).")
    return lines


def missing_memory(problem: Problem, smallest: Plan, changes: Sequence[str]) -> list[str]:
    """Return the lines about how much is missing in the setting that exceeds the memory least, and what would help."""
    memory = smallest.memory
    line = (
        f"Nothing fits. The smallest setting, {smallest.setting.describe()}, needs "
        f"{memory.reserved_bytes / GIB:.1f} GiB with margin and {memory.host_bytes / GIB:.1f} GiB of "
        f"host memory, of which a rank can use {problem.usable_host_bytes / GIB:.1f}."
    )
    if not changes:
        return [line, "Use a larger device."]
    return [line, "Change one:", *(f"  {text}" for text in changes)]


def table(problem: Problem, shown: Sequence[Plan], count: int) -> list[str]:
    """Return the table of the first settings; ``count`` is the number of all that fit."""
    # Offload is limited by a rank's share; people know the memory of the host.
    ranks = min(problem.devices, problem.device.ranks_per_host)
    host = f"host of {ranks * problem.usable_host_bytes / GIB:,.0f}"
    columns = f"{'row':>3}  {'tokens/s':>10}  {'step s':>11}  {'GiB':>6}  {'with margin':>11}"
    lines = [f"{columns}  {host}  {'limit':<28} setting"]
    for row, plan in enumerate(shown, start=1):
        memory = plan.memory
        lines.append(
            f"{row:>3}  {plan.tokens_per_s:>10,.0f}  {_seconds(plan.time):>11}  {memory.device_bytes / GIB:>6.1f}  "
            f"{memory.reserved_bytes / GIB:>11.1f}  {ranks * memory.host_bytes / GIB:>{len(host)},.1f}  "
            f"{plan.time.limit:<28} {plan.setting.describe()}"
        )
    if count > len(shown):
        lines.append(f"and {count - len(shown)} slower ones: --show {count}")
    return lines


def memory_line(row: int, plan: Plan) -> str:
    """Return the line about the terms of the memory of a row of the table."""
    memory = plan.memory
    # A small model on a CPU would have terms of 0.00 GiB only.
    unit, name_of_unit = GIB, "GiB"
    if memory.device_bytes < GIB:
        unit, name_of_unit = GIB >> 10, "MiB"
    terms = ", ".join(f"{name} {size / unit:.2f}" for name, size in memory.device.items() if size >= unit // 100)
    return f"Memory of row {row}, in {name_of_unit}, at its peak ({memory.moment}): {terms}"


def _seconds(time: StepTime) -> str:
    """Return the time of a step, or its range if the step may wait for the host."""
    # Copies to and from the host may be hidden by the step or not: known on the hardware only.
    if not time.uncertain_s:
        return f"{time.step_s:.2f}"
    return f"{time.step_s:.2f}-{time.most_s:.2f}"


def draw(file: Path, name: str, problem: Problem, found: Sequence[Plan]) -> None:
    """Write the plot of ``--plot``."""
    require_installed("nxd-memopt plan --plot", "matplotlib", extra="train")
    from nxd_memopt.planner.search.plot import draw_plans

    title = f"{name} on {problem.devices} x {problem.device.name}, {problem.sequence_length:,} tokens"
    draw_plans(found, title, file)
    print(f"wrote {file}", file=sys.stderr)


def document(problem: Problem, found: Sequence[Plan], changes: Sequence[str]) -> dict[str, Any]:
    """Return all figures as values of JSON."""
    # Bytes and seconds, unrounded: the table's GiB hide differences of some MiB between settings.
    return {
        "device": problem.device.name,
        "devices": problem.devices,
        "sequence_length": problem.sequence_length,
        "global_batch_size": problem.global_batch_size,
        "precision": problem.precision,
        "usable_bytes": problem.usable_bytes,
        "usable_host_bytes": problem.usable_host_bytes,
        "only_hardware_shows": NOT_MODELLED[problem.device.kind],
        "notes": attention_notes(problem, found[0].setting) if found else [],
        "remedies": list(changes),
        "plans": [
            {
                "setting": dataclasses.asdict(plan.setting),
                # Without a global batch it differs with the data-parallel size.
                "sequences_per_step": round(plan.tokens_per_s * plan.time.step_s / problem.sequence_length),
                "tokens_per_s": plan.tokens_per_s,
                "step_s": plan.time.step_s,
                "most_step_s": plan.time.most_s,
                "limit": plan.time.limit,
                "seconds": plan.time.terms,
                "peak": plan.memory.moment,
                "usable_bytes": plan.usable_bytes,
                "device_bytes": plan.memory.device,
                "with_margin_bytes": plan.memory.reserved_bytes,
                "host_bytes": plan.memory.host,
            }
            for plan in found
        ],
    }
