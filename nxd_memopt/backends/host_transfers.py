"""Contract of copies between device and host memory that overlap with the device's work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """Copy in progress, or a point in the device's work."""

    def wait(self) -> None:
        """Make the device's subsequent work on the current stream wait for the transfer."""
        ...

    def is_done(self) -> bool:
        """Return whether the transfer has finished, without waiting."""
        ...

    def synchronize(self) -> None:
        """Make the host wait for the transfer."""
        ...


class HostTransfers(Protocol):
    """Copies between one device and its host. All tensors are 1-D and uint8."""

    device: torch.device
    needs_pinned_memory: bool
    """Whether host tensors must be page-locked for the copies to overlap."""

    def to_host(self, source: Tensor, pieces: Sequence[Tensor]) -> Transfer:
        """Start a copy of ``source`` to host memory, after the queued work that computes it.

        The caller keeps ``source`` and ``pieces`` alive, and writes to neither, until the transfer
        is done.

        Args:
            source: device tensor.
            pieces: host tensors that receive consecutive parts of ``source``; their sizes add up to
                the size of ``source``.
        """
        ...

    def mark(self) -> Transfer:
        """Return a transfer that is done when all work queued so far by this thread is done."""
        ...

    def copy_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Transfer) -> Transfer:
        """Copy each device tensor into the pinned host tensor of its pair, once ``after`` is done.

        Any thread may call. The caller keeps both tensors alive until the transfer is done.
        ``pairs`` may be a generator that runs device work; that work runs with the copies and
        overlaps with the device's other work.

        Args:
            pairs: ``(host, device)`` tensors.
            after: transfer to wait for.
        """
        ...

    def copy_in(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Transfer) -> Transfer:
        """Copy each pinned host tensor into the device tensor of its pair, once ``after`` is done.

        The caller keeps both tensors alive until the transfer is done, and lets no other work use
        the device tensor in the meantime.

        Args:
            pairs: ``(device, host)`` tensors.
            after: transfer to wait for.
        """
        ...

    def host_buffer(self, size_bytes: int) -> Tensor:
        """Return host memory that the device copies to and from asynchronously, uninitialized."""
        ...

    def to_device(self, pieces: Sequence[Tensor], after: Transfer) -> tuple[Tensor, Transfer]:
        """Start a copy of ``pieces`` to one device tensor, once ``after`` is done.

        The caller keeps ``pieces`` unchanged until the transfer is done. It keeps the returned
        tensor alive until the transfer is done, or until the current stream has waited for it.
        """
        ...

    def keep_pace(self) -> None:
        """Keep the host from running far ahead of the device.

        The host then learns soon which copies are done.
        """
        ...

    def free_bytes(self) -> int:
        """Return the bytes that the device could still allocate."""
        ...
