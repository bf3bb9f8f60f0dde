"""Profiles a few steps of a training loop and writes what they did, for each rank; other steps run as without it."""

from __future__ import annotations

import gzip
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from nxd_memopt.backends import backend
from nxd_memopt.files import complete_file, write_text
from nxd_memopt.profiling.memory_summary import allocations, memory_summary, snapshot
from nxd_memopt.profiling.operations import STEP, operations
from nxd_memopt.profiling.ranges import gradient_ranges, module_names, module_ranges
from nxd_memopt.profiling.tensors import owned_blocks, owned_bytes
from nxd_memopt.profiling.time_summary import time_summary

_DEVICE_SOURCE = "blocks of the device's caching allocator"
_HOST_SOURCE = (
    "blocks of PyTorch's allocator of host memory, which keeps no total: weights, gradients and optimizer states from "
    "before the step are counted by their storages"
)
_RECORDED_GRAPHS = "times are the host's, which records operators into graphs; the counters have the graphs' seconds"
FORMAT = 2
"""Version of the files. ``report.py`` reads this one."""


@dataclass(frozen=True)
class ProfileRequest:
    """Which steps are profiled, and where the files go.

    Args:
        directory: directory of the files.
        skip: steps before the first profiled one, which contains warm-up with fewer than 2.
        steps: steps whose time is profiled. Memory is profiled in one more step.
        stop: the training program ends after the last profiled step, without saving.

    Raises:
        ValueError: a number is too small.
    """

    directory: str
    skip: int = 3
    steps: int = 3
    stop: bool = False

    def __post_init__(self) -> None:
        for name, least in (("skip", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def total_steps(self) -> int:
        """Steps that a run needs at least."""
        return self.skip + self.steps + 1

    def to_json(self) -> str:
        """Return the request as a text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ProfileRequest:
        """Return the request of a text of ``to_json``."""
        return ProfileRequest(**json.loads(text))


class StepProfiler:
    """Profiles the steps that a request names.

    Time and memory are profiled in different steps, because recording Python's stacks slows a step.

    Example:
        >>> profiler = StepProfiler(ProfileRequest("profile"), model, optimizer)
        >>> for batch in batches:
        ...     with profiler.step():
        ...         train_step(batch)

    Args:
        request: which steps, and where the files go.
        model: its modules are named in the files.
        optimizer: its tensors are optimizer states; None if it is not known.
        notes: lines for the report.
        facts: what else the report shows of the run, as values of JSON (``tables.py``): ``options`` that are not at
            their defaults, ``versions``, ``start_s`` by phase, ``planned`` memory, ``tokens_per_step`` and
            ``utilization_per_token``. They are read when the timed steps end.
    """

    def __init__(
        self,
        request: ProfileRequest,
        model: nn.Module,
        optimizer: object = None,
        notes: tuple[str, ...] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.request = request
        self._model = model
        self._optimizer = optimizer
        self._notes = notes
        self._facts = facts or {}
        self._step = 0
        self._stack = ExitStack()
        self._profile: Any = None
        self._step_s: list[float] = []
        self._result: dict[str, Any] = {}
        self._counters: Mapping[str, float] = {}

    @property
    def is_done(self) -> bool:
        """Whether all files are written."""
        return self._step >= self.request.total_steps

    def step(self) -> AbstractContextManager[None]:
        """Return the context of one optimizer step. Every rank calls it for each step."""
        number, self._step = self._step, self._step + 1
        first_timed = self.request.skip
        if number < first_timed or number >= self.request.total_steps:
            return nullcontext()
        if number < first_timed + self.request.steps:
            return self._timed(number - first_timed)
        return self._memory()

    @contextmanager
    def _timed(self, index: int) -> Iterator[None]:
        """Profile the time of a step; the last one writes the summary of all."""
        if index == 0:
            backend.synchronize()
            self._counters = backend.step_counters()
            # The host's allocator reports that a block is freed only if it has reported the block:
            # these steps allocate the gradients that the step for memory may free.
            on_host = backend.device.type == "cpu"
            self._profile = self._stack.enter_context(profile(activities=profiled_activities(), profile_memory=on_host))
            self._stack.enter_context(module_ranges(self._model))
        try:
            start = perf_counter()
            with record_function(STEP):
                yield
            backend.synchronize()
            self._step_s.append(perf_counter() - start)
        # A failed step leaves neither a running profiler nor a replaced nn.Module.__call__ behind.
        except BaseException:
            self._stack.close()
            raise
        if index == self.request.steps - 1:
            self._stack.close()
            self._write_time()

    def _write_time(self) -> None:
        """Write the trace and summarize the timed steps."""
        # Counters run from the start of the process: the profiled steps' part is a difference.
        counters = {name: value - self._counters[name] for name, value in backend.step_counters().items()}
        # A path that ends in .gz is compressed.
        with complete_file(self._path("trace.json.gz")) as file:
            self._profile.export_chrome_trace(str(file))
        self._result = {
            "format": FORMAT,
            "rank": _rank(),
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "backend": backend.name,
            "device": backend.description(),
            "torch": torch.__version__,
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join(sys.orig_argv),
            "model": type(self._model).__name__,
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "steps": [self.request.skip + 1, self.request.skip + self.request.steps],
            "step_s": self._step_s,
            "counters": {name: value / self.request.steps for name, value in counters.items()},
            "time": time_summary(self._profile, self.request.steps, backend.device.type),
            "notes": list(self._notes),
            **self._facts,
        }
        if counters:
            self._result["notes"].append(_RECORDED_GRAPHS)
        self._profile = None

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Profile the memory of a step and write the rank's file."""
        refusal = backend.allocations_refusal()
        if refusal is not None:
            yield
            self._result["memory"] = None
            self._result["memory_refusal"] = refusal
            self._result["owned_bytes"] = owned_bytes(self._model, self._optimizer)
            self._write_result()
            return
        kind = backend.device.type
        backend.synchronize()
        before = owned_blocks(self._model, self._optimizer, kind)
        # Without an allocator that counts, what is not a tensor of the run is not known.
        other, source = 0, _HOST_SOURCE
        if kind != "cpu":
            source = _DEVICE_SOURCE
            other = (backend.memory_allocated() or 0) - sum(size for size, _ in before.values())
        backend.reset_peak_memory_stats()
        with ExitStack() as stack:
            stack.enter_context(backend.memory_history(self._path("allocator.pickle")))
            recorded = stack.enter_context(
                profile(activities=profiled_activities(), profile_memory=True, with_stack=True)
            )
            stack.enter_context(gradient_ranges(self._model))
            yield
            backend.synchronize()
        peak = None
        if kind != "cpu":
            peak = backend.max_memory_allocated()
        after = owned_blocks(self._model, self._optimizer, kind)
        found = operations(recorded, kind, module_names(self._model))
        blocks = allocations(found, before, after, other)
        self._result["memory"] = memory_summary(blocks, peak, source)
        content = json.dumps(snapshot(blocks)).encode()
        with complete_file(self._path("memory.json.gz")) as file:
            file.write_bytes(gzip.compress(content, 5))
        self._write_result()

    def add(self, name: str, value: Any) -> None:
        """Add a value of JSON to the rank's file, after the last profiled step."""
        self._result[name] = value
        self._write_result()

    def _write_result(self) -> None:
        write_text(self._path("json"), json.dumps(self._result, indent=1))

    def _path(self, suffix: str) -> Path:
        directory = Path(self.request.directory)
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"rank{_rank()}.{suffix}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def profiled_activities() -> list[ProfilerActivity]:
    """Return what the profiler records: the host, and the device's kernels if it has some."""
    kinds = [ProfilerActivity.CPU]
    if backend.device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    return kinds
