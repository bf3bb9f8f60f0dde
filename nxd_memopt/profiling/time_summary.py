"""Time of profiled steps by class of kernels and by module, and the communication that nothing hides."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from nxd_memopt.pipeline.runner import WAITING
from nxd_memopt.profiling.exposure import COMMUNICATION, exposure, is_communication
from nxd_memopt.profiling.operations import (
    OPTIMIZER,
    OUTSIDE,
    STEP,
    Attribution,
    Operation,
    device_events,
    operations,
)

_CLASSES = (
    ("communication", (*COMMUNICATION, "c10d::", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")),
    ("attention", ("scaled_dot_product", "flash", "fmha", "attention")),
    ("softmax and cross entropy", ("softmax", "cross_entropy", "nll_loss", "logsumexp")),
    # of cuBLAS for operands in e4m3 (q) and e5m2 (r), of CUTLASS with a scale for each row, and on a CPU
    ("float8 matmul", ("scaled_mm", "nvjet_qq", "nvjet_qr", "nvjet_rq", "f8f8", "e4m3", "e5m2")),
    ("matmul", ("aten::mm", "addmm", "bmm", "aten::_grouped_mm", "gemm", "cutlass", "nvjet", "xmma", "mkldnn_linear")),
    (OPTIMIZER, ("adam", "foreach")),
    ("norm", ("norm", "aten::rsqrt")),
    ("copy", ("copy", "memcpy", "memset", "aten::cat", "aten::clone", "fill_", "zero_")),
)
_FLOAT8_CASTS = ("largest", "cast", "transpose")  # the full names of the kernels of ``ops/cuda/fp8_kernels.py``
_OTHER = "elementwise and other"
_HOST = "Python, dispatch and waiting"
PASSES = ("forward", "backward", "recompute", "other")


def kernel_class(name: str) -> str:
    """Return the class of an operator of the host or a kernel of a device, by its name."""
    # The first class that fits: names of attention kernels contain softmax or gemm too.
    lowered = name.lower()
    if lowered in _FLOAT8_CASTS:
        return "float8 casts"
    for title, words in _CLASSES:
        if any(word in lowered for word in words):
            return title
    return _OTHER


def time_summary(profiler: Any, num_steps: int, device: str) -> dict[str, Any]:
    """Return the mean times of a step in seconds.

    Args:
        profiler: finished profile of steps in ranges of the name ``operations.STEP``.
        num_steps: number of steps.
        device: ``cuda`` reads the device's kernels; otherwise the host's operators are what there is.

    Returns:
        ``clock``: what was timed. ``classes``: class -> seconds. ``modules``: module -> pass ->
        seconds. ``communication``: see ``exposure``. ``waiting_for_stages_s``: seconds of sends, receives and waiting
        for the neighbors in a pipeline during which nothing is computed.
    """
    found = operations(profiler)
    inside = [operation for operation in found if _is_in_step(operation)]
    attribution = Attribution(found)
    classes: dict[str, float] = defaultdict(float)
    modules: dict[str, dict[str, float]] = {}
    if device == "cuda":
        kernels = device_events(profiler)
        launched = {operation.correlation: operation for operation in found if operation.correlation}
        timed = [(name, (end - start) / 1e9, launched.get(correlation)) for name, start, end, correlation in kernels]
        streams = [(name, start, end) for name, start, end, _ in kernels]
        # A kernel that receives runs until the sender is ready: its time is the waiting.
        messages = [each for each in kernels if _is_message(each[0], launched.get(each[3]))]
        others = [each[:3] for each in kernels if not is_communication(each[0])]
        waiting_ns = exposure([*others, *(each[:3] for each in messages)])["exposed_communication"]
        clock = "kernels and copies of the device"
    else:
        timed = [(_host_name(each), each.self_ns / 1e9, each) for each in inside]
        streams = _host_streams(found, inside)
        waiting_ns = sum(each.end_ns - each.start_ns for each in inside if each.name == WAITING)
        clock = "operators of the host"
    for name, seconds, operation in timed:
        title = _HOST
        if name != _HOST:
            title = kernel_class(name)
        classes[title] += seconds / num_steps
        module, stage = OUTSIDE, "other"
        if operation is not None:
            module, stage = attribution.of(operation)
        # Kernels that no operator of PyTorch has launched belong to no range of the host.
        if module == OUTSIDE and title == OPTIMIZER:
            module = OPTIMIZER
        times = modules.setdefault(module, dict.fromkeys(PASSES, 0.0))
        times[stage] += seconds / num_steps
    return {
        "clock": clock,
        "classes": dict(sorted(classes.items(), key=lambda item: -item[1])),
        "modules": modules,
        # In nanoseconds as integers: seconds since 1970 would be rounded to 0.2 microseconds.
        "communication": {name: ns / 1e9 / num_steps for name, ns in exposure(streams).items()},
        "waiting_for_stages_s": waiting_ns / 1e9 / num_steps,
    }


def _is_in_step(operation: Operation) -> bool:
    """Return whether the operation is, or is inside, a step's range, or a backward node of one."""
    return operation.name == STEP or any(each.name == STEP for each in operation.ancestors())


def _is_message(name: str, launcher: Operation | None) -> bool:
    """Return whether a kernel sends or receives between stages."""
    # NCCL may launch a group of messages outside of every operator.
    if launcher is None:
        return "sendrecv" in name.lower()
    return any(each.name == WAITING for each in (launcher, *launcher.ancestors()))


def _host_name(operation: Operation) -> str:
    """Return the name by which the time outside of inner operators is classed."""
    # Ranges and autograd functions have no kernel of their own: what is left is Python.
    is_operator = re.match(r"\w+::\w", operation.name) is not None and not operation.name.startswith("autograd::")
    if is_operator:
        return operation.name
    return _HOST


def _host_streams(found: Sequence[Operation], inside: Sequence[Operation]) -> list[tuple[str, int, int]]:
    """Return the computation and the communication of a host, as ``exposure`` takes them.

    Args:
        found: all operations. gloo runs its collectives in threads of its own, outside of the steps' ranges.
        inside: operations of the steps. An operator that no other operator contains counts with the dispatch in it.
    """
    streams: list[tuple[str, int, int]] = []
    for each in inside:
        if _computes(each) and not (each.parent and _computes(each.parent)):
            streams.append((each.name, each.start_ns, each.end_ns))
    for each in found:
        if each.name.startswith("gloo:"):
            streams.append((each.name, each.start_ns, each.end_ns))
    return streams


def _computes(operation: Operation) -> bool:
    return _host_name(operation) != _HOST and kernel_class(operation.name) != "communication"


def by_kind_of_module(modules: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the times with the decoder layers added up, ``*`` in place of their numbers, the slowest first."""
    sums: dict[str, dict[str, float]] = {}
    for module, times in modules.items():
        kind = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)
        total = sums.setdefault(kind, dict.fromkeys(PASSES, 0.0))
        for stage, seconds in times.items():
            total[stage] += seconds
    return dict(sorted(sums.items(), key=lambda item: -sum(item[1].values())))
