"""Measures a step on XLA: traced, compiled for the CPU, parsed from the compiler's dumps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.backends.neuron import xla_inspect
from nxd_memopt.certify.measure import hlo
from nxd_memopt.certify.measure.measurement import Measurement, largest_distinct


def measure_outputs(outputs: Sequence[Tensor]) -> Measurement:
    """Compile the graph of ``outputs`` (loss and gradients) without running it, and read the result.

    Raises:
        RuntimeError: see ``backends.xla_inspect.dump_directory``.
    """
    before = xla_inspect.dumped_modules()
    xla_inspect.compile_only([*outputs, _marker(before)])
    return _read_modules(xla_inspect.dumped_modules() - before)


def measure_step(step: Callable[[], object]) -> Measurement:
    """Run ``step`` and all that it leaves pending, and read what was compiled for it.

    Raises:
        RuntimeError: see ``backends.xla_inspect.dump_directory``.
    """
    before = xla_inspect.dumped_modules()
    backend.mark_step()  # what the caller left pending is not the step's
    own = xla_inspect.dumped_modules()
    marker = _marker(own | before)
    result = step()
    backend.mark_step()
    del marker, result
    return _read_modules(xla_inspect.dumped_modules() - own)


def _marker(modules: set[str]) -> Tensor:
    """A tensor of a size of its own: a graph that this process has compiled before would not be compiled again."""
    return torch.arange(len(modules) + 2, device=backend.device) + 1


def _read_modules(names: set[str]) -> Measurement:
    assert names, "XLA compiled nothing: the step left no tensor to compute"
    measured = [_read_module(xla_inspect.dump_directory(), name) for name in sorted(names)]
    return Measurement(
        matmuls=sum(m.matmuls for m in measured),
        traced_matmuls=sum(m.traced_matmuls for m in measured),
        held_bytes=max(m.held_bytes for m in measured),  # modules run one after the other
        peak_bytes=max(m.held_bytes for m in measured),
        flops=None,
        collectives=sum((m.collectives for m in measured), start=type(measured[0].collectives)()),
        largest=largest_distinct(tensor for m in measured for tensor in m.largest),
        fingerprint="-".join(m.fingerprint for m in measured),
    )


def _read_module(directory: Path, name: str) -> Measurement:
    traced = (directory / f"{name}.before_optimizations.txt").read_text(encoding="utf-8")
    (optimized_file,) = directory.glob(f"{name}.*after_optimizations.txt")
    (assignment_file,) = directory.glob(f"{name}.*buffer-assignment.txt")
    optimized, assignment = (file.read_text(encoding="utf-8") for file in (optimized_file, assignment_file))
    return Measurement(
        matmuls=hlo.matmul_count(optimized),
        traced_matmuls=hlo.matmul_count(traced),
        held_bytes=hlo.temporary_bytes(assignment),
        peak_bytes=hlo.temporary_bytes(assignment),
        flops=None,
        collectives=hlo.collectives(traced),
        largest=hlo.largest_temporaries(assignment),
        fingerprint=hlo.fingerprint(traced),
    )
