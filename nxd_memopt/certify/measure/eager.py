"""Measures an eager step: dispatched operations, saved tensors and collectives."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nxd_memopt.backends import backend
from nxd_memopt.certify.measure.measurement import LiveTensor, Measurement, largest_distinct
from nxd_memopt.planner.timing.collectives import Collective

MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""Names of ATen's matmuls. ``linear``, ``matmul`` and ``einsum`` decompose into them."""
_READS = frozenset({"item", "_local_scalar_dense"})
"""Names of operations that copy a tensor's value to the host."""
_COLLECTIVES = {
    "all_gather": "all_gather",
    "all_gather_async": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_async": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_async": "all_reduce",
    "all_to_all": "all_to_all",
}
"""Kind of collective by the name of the backend's method."""


def measure_eager(step: Callable[[], object]) -> Measurement:
    """Run ``step`` once and measure its operations, saved tensors and collectives.

    Works with real tensors and inside ``FakeTensorMode``. Gradients should be ``None`` before.

    Args:
        step: runs one forward and one backward pass.
    """
    recorder = _Recorder()
    collectives: Counter[Collective] = Counter()
    with ExitStack() as stack:
        stack.enter_context(recorder)
        stack.enter_context(_counted_collectives(collectives))
        # The unpack hook returns what the pack hook stored: tensors are observed, not changed.
        hooks = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor)
        stack.enter_context(hooks)
        result = step()
    recorder.fingerprint.update(repr(sorted(collectives.items())).encode())
    # ``result`` is alive until here: tensors that outlive the step, such as its results and
    # gradients, are not counted in the peak.
    del result
    return Measurement(
        matmuls=recorder.matmuls,
        traced_matmuls=recorder.matmuls,
        held_bytes=sum(recorder.saved.values()),
        peak_bytes=recorder.peak_bytes(),
        flops=recorder.flops,
        collectives=collectives,
        largest=largest_distinct(recorder.tensors),
        fingerprint=recorder.fingerprint.hexdigest()[:16],
    )


class _Recorder(TorchDispatchMode):
    """Dispatch mode that counts operations and records when each storage is allocated and freed.

    Every storage that the step allocates gets a serial number. Storages that existed before the
    step (parameters, inputs) have None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matmuls = 0
        self.flops = 0
        self.saved: dict[int, int] = {}  # serial -> bytes
        self.tensors: list[LiveTensor] = []
        self.fingerprint = hashlib.sha256()
        # Storages are identified by id(). An id is reused after the object is freed, so a weak
        # reference says whether an entry still is of the same object.
        self._serials: dict[int, int | None] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._events: list[tuple[int, int]] = []  # (serial, bytes allocated or -bytes freed)
        self._num_allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Register the arguments first: an unknown storage among them existed before the step, while
        # an unknown storage among the results is new.
        for tensor in _tensors((*args, *kwargs.values())):
            self._serial(tensor)
        if func.overloadpacket.__name__ in _READS and isinstance(args[0], FakeTensor):
            # A fake tensor has no value. The fake batch stands for zeros: all ids are in range and
            # no label is invalid, so 0 is the answer to every such question.
            return 0
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Add an operation to the counts and to the fingerprint, and register its results."""
        name = func.overloadpacket.__name__
        self.matmuls += name in MATMULS
        # PyTorch's registry has formulas for matmuls, convolutions and attention kernels; all other
        # operations count as 0 FLOPs.
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        # The fingerprint has operations and shapes but no values, so it is equal on ranks that run
        # the same program.
        outputs = _tensors(result)
        self.fingerprint.update(f"{func} {[(tuple(t.shape), t.dtype) for t in outputs]}".encode())
        for tensor in outputs:
            self._serial(tensor, made_by=name)

    def _serial(self, tensor: Tensor, made_by: str | None = None) -> int | None:
        """Return the serial number of a storage, or None if the step did not allocate it.

        An unknown storage is new if ``made_by`` names an operation; otherwise it existed before.
        """
        storage = tensor.untyped_storage()
        # Known, if the id is of the same storage and not of an earlier one that was freed.
        key = id(storage)
        if key in self._watchers and self._watchers[key]() is storage:
            return self._serials[key]
        self._serials[key] = None
        if made_by is not None:
            self._num_allocated += 1
            self._serials[key] = self._num_allocated
            nbytes = storage.nbytes()
            self._events.append((self._num_allocated, nbytes))
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.tensors.append(LiveTensor(dtype, tuple(tensor.shape), nbytes, made_by))
        # The callback runs when the last reference to the storage is gone, which is when its memory
        # would be freed.
        self._watchers[key] = weakref.ref(storage, self._end_of(self._serials[key]))
        return self._serials[key]

    def _end_of(self, serial: int | None) -> Callable[[Any], None] | None:
        """Return the callback that records when the storage of the last event is freed."""
        if serial is None:
            return None
        nbytes = self._events[-1][1]
        return lambda _: self._events.append((serial, -nbytes))

    def save(self, tensor: Tensor) -> Tensor:
        """Record a tensor saved for backward; the pack hook of ``saved_tensors_hooks``."""
        # By serial number, so that a storage saved by several operations, or through several views,
        # counts once. Parameters and inputs have none: they exist without the step.
        serial = self._serial(tensor)
        if serial is not None:
            self.saved[serial] = tensor.untyped_storage().nbytes()
        return tensor

    def peak_bytes(self) -> int:
        """Return the peak of allocated bytes, without storages that outlive the step.

        Gradients and the step's results outlive it: they are never freed, so they have no negative
        event.
        """
        # Replay allocations and frees in order. Storages without a free outlive the step.
        events = list(self._events)
        ended = {serial for serial, change in events if change < 0}
        alive = 0
        peak = 0
        for serial, change in events:
            if serial in ended:
                alive += change
                peak = max(peak, alive)
        return peak


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among the arguments or results of an operation, which may be in lists."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


@contextmanager
def _counted_collectives(found: Counter[Collective]) -> Iterator[None]:
    """Count the backend's collectives over more than one rank in the block.

    A collective that is implemented with another collective counts once: only the outermost call is
    counted.
    """
    target: Any = backend
    inside = False

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(target, name)

        def collective(tensor: Tensor, group: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            size = backend.group_size(group)
            if inside or size == 1:
                return original(tensor, group, *args, **kwargs)
            # Bytes are those of the full tensor. An all-gather's argument is one shard of it.
            kind = _COLLECTIVES[name]
            full_bytes = tensor.nbytes
            if kind == "all_gather":
                full_bytes *= size
            found[Collective(kind, full_bytes, size)] += 1
            inside = True
            try:
                return original(tensor, group, *args, **kwargs)
            finally:
                inside = False

        return collective

    wrapped = {name: counted(name) for name in _COLLECTIVES}
    vars(target).update(wrapped)  # attributes of the instance shadow the methods of the class
    try:
        yield
    finally:
        for name in wrapped:
            del vars(target)[name]
