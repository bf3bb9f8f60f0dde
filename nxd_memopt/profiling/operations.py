"""Reads the operations of a torch profile as a tree, and finds the module and pass that each belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

RANGE = "nxd_memopt: "
"""Start of the names of ranges that ``ranges.py`` records."""
MODULE = f"{RANGE}module "
STEP = f"{RANGE}step"
PART = f"{RANGE}part "
GRADIENT = f"{RANGE}gradient "
OUTSIDE = "outside of modules"
OPTIMIZER = "optimizer"
_BACKWARD = "autograd::engine::evaluate_function"
_ACCUMULATE = "AccumulateGrad"
_NO_SEQUENCE = -1


@dataclass
class Operation:
    """An operator, a range, a Python function or an allocation of a profile.

    Args:
        name: of an allocation ``""``.
        parent: the operation that contains it.
        thread: profiler's number of the thread.
        start_ns: start on the profiler's clock.
        end_ns: end; of an allocation its start.
        sequence: autograd's number of the operator; -1 without one.
        forward_thread: of a backward node, the thread whose numbers ``sequence`` is from.
        correlation: number by which device kernels name the operator that has launched them.
        is_python: whether it is a Python function.
        allocation: (address, bytes, total bytes of the allocator); negative bytes are freed.
        child_ns: nanoseconds of the operators inside it.
        after_parent_ns: nanoseconds by which it outlives the operator that contains it.
    """

    name: str
    parent: Operation | None
    thread: int
    start_ns: int
    end_ns: int
    sequence: int = _NO_SEQUENCE
    forward_thread: int = 0
    correlation: int = 0
    is_python: bool = False
    allocation: tuple[int, int, int] | None = None
    child_ns: int = field(default=0, repr=False)
    after_parent_ns: int = field(default=0, repr=False)

    @property
    def self_ns(self) -> int:
        """Nanoseconds outside of the operators inside it, until the operator that contains it ends."""
        return self.end_ns - self.start_ns - self.child_ns - self.after_parent_ns

    def ancestors(self) -> Iterator[Operation]:
        """Yield the operations that contain this one, from the inside out."""
        operation = self.parent
        while operation is not None:
            yield operation
            operation = operation.parent


def operations(profiler: Any, device_type: str = "", modules: Mapping[int, str] | None = None) -> list[Operation]:
    """Return the host's operations of a finished profile, in the order of their starts.

    Args:
        profiler: ``torch.profiler.profile``.
        device_type: device whose allocations are read; empty for none.
        modules: names of modules by ``id``. In a profile with stacks, calls of modules are Python
            functions; ranges would end with the function that has entered them.
    """
    # The tree has no field for it.
    forward_threads = {
        event.correlation_id(): event.fwd_thread_id()
        for event in profiler.profiler.kineto_results.events()
        if event.fwd_thread_id()
    }
    found: list[Operation] = []
    # Without recursion: Python's calls are nested deeper than the interpreter's limit.
    waiting: list[tuple[Any, Operation | None]] = [
        (event, None) for event in profiler.profiler.kineto_results.experimental_event_tree()
    ]
    while waiting:
        event, parent = waiting.pop()
        operation = _operation(event, parent, device_type, forward_threads, modules or {})
        if operation is not None:
            found.append(operation)
        waiting += [(child, operation or parent) for child in event.children]
    # The events of several threads are roots of their own, and the stack visits the last one first.
    found.sort(key=lambda operation: operation.start_ns)
    _subtract_children(found)
    return found


def _operation(
    event: Any,
    parent: Operation | None,
    device_type: str,
    forward_threads: Mapping[int, int],
    modules: Mapping[int, str],
) -> Operation | None:
    """Return an event of the profiler's tree; None for one that is not used."""
    tag = event.tag.name
    start, end = event.start_time_ns, event.start_time_ns + event.duration_time_ns
    fields = event.extra_fields
    if tag == "Allocation":
        if fields.device.type != device_type:
            return None
        allocation = (fields.ptr, fields.alloc_size, fields.total_allocated or 0)
        return Operation("", parent, event.start_tid, start, start, allocation=allocation)
    if tag == "TorchOp":
        return Operation(
            event.name,
            parent,
            event.start_tid,
            start,
            end,
            fields.sequence_number,
            forward_threads.get(event.correlation_id, 0),
            event.correlation_id,
        )
    # Names of C functions contain a representation of their object, which need not be UTF-8.
    if tag == "PyCall":
        name = event.name
        if fields.module is not None and fields.module.self_ptr in modules:
            name = MODULE + modules[fields.module.self_ptr]
        return Operation(name, parent, event.start_tid, start, end, is_python=True)
    return None


def _subtract_children(found: list[Operation]) -> None:
    """Set ``child_ns`` and ``after_parent_ns``. Python functions are transparent: operators are their caller's."""
    inner: list[tuple[Operation, Operation]] = []
    for operation in found:
        if operation.is_python or operation.allocation is not None:
            continue
        parent = next((each for each in operation.ancestors() if not each.is_python), None)
        if parent is not None:
            inner.append((operation, parent))
    containers = {id(parent) for _, parent in inner}
    for operation, parent in inner:
        # A message is complete long after the operator that has started it. What contains operators is not one: it
        # may only seem to outlive its parent, whose range may be of another thread.
        if id(operation) not in containers and operation.start_ns < parent.end_ns:
            operation.after_parent_ns = max(0, operation.end_ns - parent.end_ns)
        parent.child_ns += operation.end_ns - operation.start_ns - operation.after_parent_ns


class Attribution:
    """The module and the pass of operations.

    In forward, the innermost module whose call is running. In backward, the module of the forward
    operator with autograd's number of the node. A module that is called inside backward is
    recomputed. In a range of ``ranges.part_of_step`` the range's title is the module.

    Args:
        found: operations of a profile, in the order of their starts.
    """

    def __init__(self, found: list[Operation]) -> None:
        self._cache: dict[int, tuple[str, str]] = {}
        self._forward: dict[tuple[int, int], str] = {}
        for operation in found:
            # An operator without a node has the number that the next node will get: the last one wins.
            if operation.sequence != _NO_SEQUENCE and not operation.name.startswith(_BACKWARD):
                module = _innermost_module(operation)
                if module is not None:
                    self._forward[operation.thread, operation.sequence] = module
        # The accumulation of a gradient has no forward operator. Autograd runs it right after the node that has
        # computed the gradient, before any other ready node: the two are of one module.
        last: dict[int, str] = {}
        for operation in found:
            if not operation.name.startswith(_BACKWARD):
                continue
            if operation.name.endswith(_ACCUMULATE):
                self._cache[id(operation)] = last.get(operation.thread, OUTSIDE), "backward"
            else:
                last[operation.thread] = self.of(operation)[0]

    def of(self, operation: Operation) -> tuple[str, str]:
        """Return the module, and ``forward``, ``backward``, ``recompute`` or ``other``."""
        # Without an entry of its own an operation asks its parent: cached, each link is followed once.
        key = id(operation)
        if key not in self._cache:
            self._cache[key] = self._find(operation)
        return self._cache[key]

    def _find(self, operation: Operation) -> tuple[str, str]:
        if operation.name.startswith(_BACKWARD):
            module = self._forward.get((operation.forward_thread, operation.sequence), OUTSIDE)
            return module, "backward"
        if operation.name.startswith(MODULE):
            is_backward = any(each.name.startswith(_BACKWARD) for each in operation.ancestors())
            return operation.name.removeprefix(MODULE), "recompute" if is_backward else "forward"
        if operation.name.startswith(PART):
            return operation.name.removeprefix(PART), "other"
        if operation.parent is None:
            return OUTSIDE, "other"
        return self.of(operation.parent)


def _innermost_module(operation: Operation) -> str | None:
    """Return the module whose call contains the operator most closely, or None."""
    for ancestor in operation.ancestors():
        if ancestor.name.startswith(MODULE):
            return ancestor.name.removeprefix(MODULE)
        # A node's own operators run for another module than the one that has called backward.
        if ancestor.name.startswith(_BACKWARD):
            return None
    return None


def is_backward(operation: Operation) -> bool:
    """Return whether the operation is a node of a backward pass."""
    return operation.name.startswith(_BACKWARD)


def device_events(profiler: Any) -> list[tuple[str, int, int, int]]:
    """Return (name, start, end, launching operator) of the device's kernels and copies, in nanoseconds."""
    from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]

    found: list[tuple[str, int, int, int]] = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CPU or event.name().startswith(RANGE):
            continue
        start = event.start_ns()
        found.append((event.name(), start, start + event.duration_ns(), event.linked_correlation_id()))
    return found
