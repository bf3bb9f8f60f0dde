"""Chooses the memory techniques of a run whose other options and device are given."""

from __future__ import annotations

from dataclasses import replace

from nxd_memopt.planner.search.candidates import memories_with_stages
from nxd_memopt.planner.search.plan import Plan, evaluate
from nxd_memopt.planner.search.problem import Problem, Setting


def choose_memory(problem: Problem, setting: Setting) -> Plan:
    """Return the fastest memory techniques that fit, with all else as in ``setting``.

    Args:
        problem: model, device and batch.
        setting: parallel sizes and the optimizer's options. Attention's implementation and the
            kind of loss in its ``memory`` stay.

    Raises:
        ValueError: nothing fits; the message has the setting that exceeds the memory least, and where.
    """
    chosen: list[Plan] = []
    for memory in memories_with_stages(problem, setting):
        # A graph has no host code between its kernels, which copies to the host need.
        as_graph = setting.cuda_graph and not memory.offloads
        chosen.append(evaluate(problem, replace(setting, memory=memory, cuda_graph=as_graph)))
    # A range of seconds counts by its slow end.
    fitting = [plan for plan in chosen if plan.fits]
    if fitting:
        return max(fitting, key=lambda plan: plan.least_tokens_per_s)
    smallest = min(chosen, key=lambda plan: plan.excess_bytes)
    needs = " and ".join(each.describe() for each in smallest.shortages)
    raise ValueError(
        f"memory: auto finds nothing that fits: the smallest setting, {smallest.setting.describe()}, needs {needs}: "
        "use more ranks, a smaller micro-batch or shorter sequences; nxd-memopt plan shows which"
    )
