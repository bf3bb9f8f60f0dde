"""Draws the memory of several settings by term as a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nxd_memopt.files import complete_file
from nxd_memopt.planner.hardware import GIB
from nxd_memopt.planner.search.plan import Plan


def draw_plans(plans: Sequence[Plan], title: str, path: Path) -> None:
    """Draw a stacked bar for each setting, device memory by term with its margin, and the memory that there is.

    Host memory is part of the label of a setting.

    Args:
        plans: settings of one problem, at least one, the first one on top.
        title: of the plot.
        path: PNG file, which is replaced when it is complete.
    """
    # A figure without pyplot has no window and no global state. Imported here: plans need no matplotlib.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 + 0.35 * len(plans)), layout="constrained")
    axes = figure.add_subplot()
    labels = [_label(plan) for plan in plans]
    left = [0.0] * len(plans)
    terms = [{**plan.memory.device, "margin": plan.memory.margin_bytes} for plan in plans]
    for name in dict.fromkeys(name for each in terms for name in each):
        values = [each.get(name, 0) / GIB for each in terms]
        if any(values):
            axes.barh(labels, values, left=left, label=name)
            left = [start + value for start, value in zip(left, values, strict=True)]
    # Of each setting, because communicators take different parts of the memory.
    limits = [plan.usable_bytes / GIB for plan in plans]
    axes.scatter(limits, labels, marker="|", color="black", s=120, label="tensors can use")
    axes.invert_yaxis()
    axes.set_xlabel("GiB on each device, at the peak of a step")
    axes.set_title(title)
    axes.tick_params(axis="y", labelsize="small")
    figure.legend(loc="outside right upper", fontsize="small")
    with complete_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _label(plan: Plan) -> str:
    """Return a setting in words, with its speed and what it needs on the host."""
    host = ""
    if plan.memory.host_bytes:
        host = f", {plan.memory.host_bytes / GIB:.1f} GiB on the host"
    return f"{plan.setting.describe()}{host}: {plan.tokens_per_s:,.0f} tokens/s"
