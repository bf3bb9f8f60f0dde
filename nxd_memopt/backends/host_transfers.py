"""Contract of copies between device and host memory that overlap with the device's work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Let the device's following work wait for it."""
        ...

    def is_done(self) -> bool: ...

    def synchronize(self) -> None:
        """Let the host wait for it."""
        ...


class HostTransfers(Protocol):
    """Copies of one device; all tensors are 1-D of bytes."""

    device: torch.device

    def to_host(self, source: Tensor) -> tuple[Tensor, Transfer]:
        """A copy of ``source`` in host memory, made when the work that makes ``source`` is done."""
        ...

    def mark(self) -> Transfer:
        """The point that the device's work has reached when it has done what the calling thread has queued so far."""
        ...

    def copy_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Transfer) -> Transfer:
        """Copy to each pinned host tensor the device's tensor next to it, when ``after`` is done; any thread may call.

        The caller keeps both alive until the transfer is done. ``pairs`` may be a generator that runs device work: it
        belongs to the copies, next to the device's other work.
        """
        ...

    def to_device(self, host: Tensor, after: Transfer) -> tuple[Tensor, Transfer]:
        """A copy of ``host`` in the device's memory, made when ``after`` is done."""
        ...

    def keep_pace(self) -> None:
        """Let the host not run far ahead of the device: it then knows soon which copies are done."""
        ...

    def free_bytes(self) -> int:
        """What the device could still allocate."""
        ...
