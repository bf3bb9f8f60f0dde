"""Memory of a profiled step by category: a timeline, the peak, activations by layer, the largest tensors."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_memopt.profiling.operations import GRADIENT, MODULE, Attribution, Operation, is_backward

CATEGORIES = ("weights", "optimizer states", "gradients", "activations", "recomputed activations", "temporary", "other")
"""Categories of memory.

- ``activations``: allocated in a forward and alive when the backward that follows begins.
- ``recomputed activations``: allocated by a module that backward has called, and used after that call.
- ``temporary``: all else that a step allocates.
- ``other``: what the device had before the step besides weights, states and gradients.
"""
LARGEST = 10
TIMELINE_POINTS = 1500
_STACK_FRAMES = 12
_RUNNER = "nxd_memopt/pipeline/runner.py("
_INTERNAL = ("torch/", "nn.Module: ", MODULE, "nxd_memopt/profiling/", "contextlib.py", "<string>")


@dataclass
class Allocation:
    """A block of memory of the step.

    Args:
        address: address of the block.
        size: bytes.
        start_ns: time of the allocation; 0 for one from before the step.
        end_ns: time at which it is freed; None for one that outlives the step.
        category: see ``CATEGORIES``.
        module: module that has allocated it.
        stage: pass in which it was allocated.
        operator: operator that has allocated it.
        stack: Python functions, from the inside out.
    """

    address: int
    size: int
    start_ns: int
    end_ns: int | None
    category: str
    module: str = ""
    stage: str = ""
    operator: str = ""
    stack: tuple[str, ...] = ()


Blocks = Mapping[int, tuple[int, str]]
"""Address -> bytes and category of blocks that are known by their tensors."""


def allocations(found: Sequence[Operation], before: Blocks, after: Blocks, other_bytes: int) -> list[Allocation]:
    """Return the blocks of memory that existed in a step.

    Args:
        found: operations of the step, with its allocations.
        before: blocks that existed before.
        after: blocks that outlive the step.
        other_bytes: bytes before the step that no tensor of ``before`` accounts for.
    """
    attribution = Attribution(list(found))
    live = {address: Allocation(address, size, 0, None, category) for address, (size, category) in before.items()}
    blocks = list(live.values())
    if other_bytes > 0:
        blocks.append(Allocation(0, other_bytes, 0, None, "other"))
    gradients: set[int] = set()
    for operation in found:
        if operation.name.startswith(GRADIENT):
            block = live.get(int(operation.name.removeprefix(GRADIENT)))
            # The gradient of a tied weight, say, is a part of a larger block at its start.
            if block is not None and block.category not in ("weights", "optimizer states"):
                gradients.add(id(block))
        if operation.allocation is None:
            continue
        address, size, _ = operation.allocation
        # An address is used again after its block is freed, so that live has one block for each address.
        if size < 0:
            block = live.pop(address, None)
            if block is not None:
                block.end_ns = operation.start_ns
            continue
        module, stage = attribution.of(operation)
        block = Allocation(address, size, operation.start_ns, None, "temporary", module, stage)
        block.operator = next((each.name for each in operation.ancestors() if not each.is_python), "")
        block.stack = _stack(operation)
        live[address] = block
        blocks.append(block)
    _classify(blocks, found)
    for block in blocks:
        if id(block) in gradients:
            block.category = "gradients"
        elif block.end_ns is None and block.address in after and block.category != "other":
            block.category = after[block.address][1]
    return blocks


def _classify(blocks: list[Allocation], found: Sequence[Operation]) -> None:
    """Set the category of what the passes have allocated and still use after them."""
    backward_starts = [operation.start_ns for operation in found if is_backward(operation)]
    calls = [operation for operation in found if operation.name.startswith(MODULE)]
    # Spans in which a forward builds a graph: from a call of the outermost module to the first
    # backward node after it.
    forward_starts: list[int] = []
    recomputed: list[tuple[int, int]] = []
    for call in calls:
        around = list(call.ancestors())
        # A module that a backward node calls is recomputed: it builds no graph of the step's forward.
        if any(is_backward(each) for each in around):
            recomputed.append((call.start_ns, call.end_ns))
        elif not any(each.name.startswith(MODULE) for each in around):
            forward_starts.append(call.start_ns)
    forward_starts.sort()
    recomputed.sort()
    for block in blocks:
        if block.start_ns == 0:
            continue
        end = block.end_ns or float("inf")
        started = bisect.bisect_right(forward_starts, block.start_ns)
        following = bisect.bisect_right(backward_starts, block.start_ns)
        before = -1
        if started:
            before = bisect.bisect_right(backward_starts, forward_starts[started - 1])
        # The runner of a pipeline allocates the gradients that it receives; the inputs of a forward its caller does.
        is_received_gradient = _RUNNER in next(iter(block.stack), "")
        # No backward node has run since the forward began, and the block exists when the first one does.
        if not is_received_gradient and before == following < len(backward_starts) and end > backward_starts[following]:
            block.category = "activations"
        elif block.stage == "recompute":
            index = bisect.bisect_right(recomputed, (block.start_ns, float("inf"))) - 1
            # Calls are nested: the last one that began may have ended already, and an outer one still run.
            while index >= 0 and recomputed[index][1] < block.start_ns:
                index -= 1
            if index >= 0 and end > recomputed[index][1]:
                block.category = "recomputed activations"


def _stack(operation: Operation) -> tuple[str, ...]:
    """Return the Python functions that have led to an allocation, without the functions of PyTorch."""
    frames: list[str] = []
    for each in operation.ancestors():
        if each.is_python and not each.name.startswith(_INTERNAL) and "site-packages" not in each.name:
            frames.append(each.name)
    return tuple(frames[:_STACK_FRAMES])


def memory_summary(blocks: Sequence[Allocation], allocator_peak_bytes: int | None, source: str) -> dict[str, Any]:
    """Return the step's memory as values of JSON.

    Args:
        blocks: see ``allocations``.
        allocator_peak_bytes: the peak that the device's allocator reports, None if it has none.
        source: what was counted, in words.

    Returns:
        ``peak_bytes``; ``at_peak``: category -> bytes; ``kept_by_layer``: layer -> bytes at the end of a
        forward, with gradients that it has computed; ``largest``: tensors at the peak; ``timeline``:
        ``time_s`` and the bytes of each category, at most ``TIMELINE_POINTS`` points, of which one is the peak.
    """
    changes: list[tuple[int, int, Allocation]] = []
    for block in blocks:
        changes.append((block.start_ns, block.size, block))
        if block.end_ns is not None:
            changes.append((block.end_ns, -block.size, block))
    # At one time, what is freed goes first: its memory is what the next block gets.
    changes.sort(key=lambda change: change[:2])
    current: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    points: list[tuple[int, dict[str, int]]] = []
    # The running sums by category; what existed before the step has time 0 and adds no point.
    for time_ns, size, block in changes:
        current[block.category] += size
        if time_ns:
            points.append((time_ns, dict(current)))
    if not points:
        points = [(0, dict(current))]
    peak_ns, at_peak = max(points, key=_total)
    # The last such time: a gradient that forward computes is not among the activations.
    forward_end_ns, _ = max(reversed(points), key=lambda point: point[1]["activations"])
    # The block of what no tensor accounts for has no address, and is not one tensor.
    largest = sorted((block for block in _alive(blocks, peak_ns) if block.address), key=lambda block: -block.size)
    kept = _thinned(points)
    return {
        "source": source,
        "peak_bytes": sum(at_peak.values()),
        "allocator_peak_bytes": allocator_peak_bytes,
        "peak_time_s": (peak_ns - points[0][0]) / 1e9,
        "at_peak": at_peak,
        "kept_by_layer": _by_layer(_alive(blocks, forward_end_ns)),
        "largest": [_described(block) for block in largest[:LARGEST]],
        "timeline": {
            "time_s": [(time_ns - points[0][0]) / 1e9 for time_ns, _ in kept],
            "bytes": {name: [values[name] for _, values in kept] for name in CATEGORIES},
        },
    }


def _alive(blocks: Sequence[Allocation], time_ns: int) -> list[Allocation]:
    """Return the blocks that exist at a time."""
    return [each for each in blocks if each.start_ns <= time_ns < (each.end_ns or float("inf"))]


def _thinned(points: list[tuple[int, dict[str, int]]]) -> list[tuple[int, dict[str, int]]]:
    """Return the highest of each group of consecutive points."""
    # The highest point and not the mean: the peak of the step must stay in the timeline.
    group = -(-len(points) // TIMELINE_POINTS)
    highest: list[tuple[int, dict[str, int]]] = []
    for start in range(0, len(points), group):
        highest.append(max(points[start : start + group], key=_total))
    return highest


def _total(point: tuple[int, dict[str, int]]) -> int:
    """Return the bytes of all categories at a point of the timeline."""
    return sum(point[1].values())


def layer_of(module: str) -> str:
    """Return the name up to the number of the decoder layer; of other modules their own name."""
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return module


def _by_layer(blocks: Sequence[Allocation]) -> dict[str, int]:
    """Return the bytes that forward keeps by decoder layer, or module outside of them, in the order of forward."""
    sums: dict[str, int] = defaultdict(int)
    has_begun = False
    for block in sorted(blocks, key=lambda block: block.start_ns):
        is_activation = block.category == "activations"
        has_begun = has_begun or is_activation
        # Gradients from before the first activation are sums of earlier micro-batches. In a pipeline, backwards of
        # other micro-batches make gradients between the forwards.
        is_gradient = block.category == "gradients" and block.stage == "forward"
        if is_activation or (has_begun and is_gradient):
            sums[layer_of(block.module)] += block.size
    return {name: sums[name] for name in in_layer_order(sums)}


def in_layer_order(names: Iterable[str]) -> list[str]:
    """Return modules in their order, except that decoder layers are in the order of their numbers."""
    first: dict[str, int] = {}
    keys: dict[str, tuple[int, int]] = {}
    for name in names:
        prefix, _, number = name.rpartition(".")
        index = 0
        # Layers take the place of the first of them.
        if number.isdigit():
            index = int(number)
        else:
            prefix = name
        keys[name] = (first.setdefault(prefix, len(first)), index)
    return sorted(keys, key=lambda name: keys[name])


def _described(block: Allocation) -> dict[str, Any]:
    """Return a block as values of JSON."""
    return {
        "bytes": block.size,
        "category": block.category,
        "module": block.module or "before the step",
        "pass": block.stage,
        "operator": block.operator,
        "stack": list(block.stack),
    }


def snapshot(blocks: Sequence[Allocation]) -> list[dict[str, Any]]:
    """Return all blocks with their times in nanoseconds, for the file of the memory snapshot."""
    return [
        {"address": block.address, "start_ns": block.start_ns, "end_ns": block.end_ns} | _described(block)
        for block in blocks
    ]
