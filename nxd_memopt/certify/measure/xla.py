"""Measures a step on XLA: traced, compiled for the CPU, parsed from the compiler's dumps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.backends.neuron import xla_inspect
from nxd_memopt.certify.measure import buffers, hlo
from nxd_memopt.certify.measure.measurement import Measurement, largest_distinct


def measure_outputs(outputs: Sequence[Tensor]) -> Measurement:
    """Compile the graph of ``outputs`` without running it, and return its measurement.

    Args:
        outputs: loss and gradients, traced but not computed.

    Raises:
        RuntimeError: see ``backends.neuron.xla_inspect.dump_directory``.
    """
    before = xla_inspect.dumped_modules()
    xla_inspect.compile_only([*outputs, _marker(before)])
    return _read_modules(xla_inspect.dumped_modules() - before)


def measure_step(step: Callable[[], object]) -> Measurement:
    """Run ``step`` and its pending operations, and return the measurement of the compiled graphs.

    Raises:
        RuntimeError: see ``backends.neuron.xla_inspect.dump_directory``.
    """
    before = xla_inspect.dumped_modules()
    backend.mark_step()  # operations that the caller left pending are not part of the step
    # The marker is alive during the step, so it is part of the step's graph.
    own = xla_inspect.dumped_modules()
    marker = _marker(own | before)
    result = step()
    backend.mark_step()
    del marker, result
    return _read_modules(xla_inspect.dumped_modules() - own)


def _marker(modules: set[str]) -> Tensor:
    """Return a tensor whose size depends on the number of modules compiled so far.

    It makes the graph unique. A graph that this process has compiled before would come from the
    cache, and nothing would be dumped.
    """
    return torch.arange(len(modules) + 2, device=backend.device) + 1


def _read_modules(names: set[str]) -> Measurement:
    """Return the measurement of a step of one or more compiled modules."""
    assert names, "XLA compiled nothing: the step left no tensor to compute"
    # A step that is cut by mark_step has several modules. Counts add up; scratch memory does not,
    # because a module frees its own before the next one runs.
    measured = [_read_module(xla_inspect.dump_directory(), name) for name in sorted(names)]
    return Measurement(
        matmuls=sum(m.matmuls for m in measured),
        traced_matmuls=sum(m.traced_matmuls for m in measured),
        held_bytes=max(m.held_bytes for m in measured),
        peak_bytes=max(m.held_bytes for m in measured),
        flops=None,
        collectives=sum((m.collectives for m in measured), start=type(measured[0].collectives)()),
        largest=largest_distinct(tensor for m in measured for tensor in m.largest),
        fingerprint="-".join(m.fingerprint for m in measured),
    )


def _read_module(directory: Path, name: str) -> Measurement:
    """Return the measurement of one module from its dumps."""
    # Matmuls are read before and after optimization, because common-subexpression elimination may
    # remove recomputation. Collectives are read before, as our code issued them: XLA combines
    # small ones.
    traced = (directory / f"{name}.before_optimizations.txt").read_text(encoding="utf-8")
    (optimized_file,) = directory.glob(f"{name}.*after_optimizations.txt")
    (assignment_file,) = directory.glob(f"{name}.*buffer-assignment.txt")
    optimized = optimized_file.read_text(encoding="utf-8")
    assignment = assignment_file.read_text(encoding="utf-8")
    # XLA plans memory at compile time. The peak of what is temporary also stands for what is saved
    # for backward, which HLO does not mark.
    temporary_bytes = buffers.temporary_bytes(assignment)
    return Measurement(
        matmuls=hlo.matmul_count(optimized),
        traced_matmuls=hlo.matmul_count(traced),
        held_bytes=temporary_bytes,
        peak_bytes=temporary_bytes,
        flops=None,
        collectives=hlo.collectives(traced),
        largest=buffers.largest_temporaries(assignment),
        fingerprint=hlo.fingerprint(traced),
    )
