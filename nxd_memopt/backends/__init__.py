"""Selects the backend once, at import, and records why."""

from __future__ import annotations

import difflib
import os

from nxd_memopt.backends.base import Backend, Capture
from nxd_memopt.backends.collectives import ChunkedAllGather, ChunkedReduction, Completed
from nxd_memopt.backends.cpu import CpuBackend
from nxd_memopt.backends.cuda.backend import CudaBackend
from nxd_memopt.backends.host_transfers import HostTransfers, Transfer
from nxd_memopt.backends.neuron.native import NeuronBackend
from nxd_memopt.backends.neuron.xla import XlaBackend

BACKENDS: dict[str, type[Backend]] = {
    "neuron": NeuronBackend,
    "xla": XlaBackend,
    "cuda": CudaBackend,
    "cpu": CpuBackend,
}
"""Known backends, in order of preference."""
# Names of devices that people write for the backend.
_DEVICES = {"gpu": "cuda", "nvidia": "cuda", "trn1": "xla", "trn2": "neuron", "trn3": "neuron"}


def select_backend(requested: str | None = None) -> tuple[Backend, str]:
    """Return the backend and the reason for choosing it.

    Args:
        requested: a name from ``BACKENDS``, a device such as ``gpu`` or ``trn2``, or ``None`` for the first
            backend that this machine has.

    Raises:
        ValueError: the name is unknown, or this machine lacks the backend. There is no fallback.
    """
    if requested:
        return _described(_require_backend(requested), [f"NXD_MEMOPT_BACKEND={requested}"])
    # The reasons of skipped backends become part of the text: a user who expected a better backend
    # can read there why it was not chosen.
    skipped = []
    for name, backend_class in BACKENDS.items():
        reason = backend_class.passed_over_reason()
        if reason is None:
            return _described(backend_class(), [*skipped, f"{name} is the best available"])
        skipped.append(f"no {name}: {reason}")
    raise AssertionError("the CPU backend is always available")


def _described(chosen: Backend, reasons: list[str]) -> tuple[Backend, str]:
    return chosen, f"{'; '.join(reasons)} ({chosen.description()})"


def _require_backend(asked: str) -> Backend:
    name = _DEVICES.get(asked.lower(), asked.lower())
    if name not in BACKENDS:
        close = difflib.get_close_matches(name, [*BACKENDS, *_DEVICES], n=1)
        hint = f"known are {sorted(BACKENDS)}"
        if close:
            hint = f"did you mean {close[0]!r}?"
        raise ValueError(f"NXD_MEMOPT_BACKEND {asked!r} is not a backend: {hint}")
    reason = BACKENDS[name].unavailable_reason()
    if reason is not None:
        raise ValueError(
            f"NXD_MEMOPT_BACKEND={asked} cannot be met: {reason}; "
            "unset NXD_MEMOPT_BACKEND to use the best available backend"
        )
    return BACKENDS[name]()


backend, BACKEND_REASON = select_backend(os.environ.get("NXD_MEMOPT_BACKEND"))

__all__ = [
    "BACKENDS",
    "BACKEND_REASON",
    "Backend",
    "Capture",
    "ChunkedAllGather",
    "ChunkedReduction",
    "Completed",
    "HostTransfers",
    "Transfer",
    "backend",
    "select_backend",
]
