"""Copies between a host and a device whose memory is the host's, done as late as a GPU might do them, or lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Deferred:
    """A transfer that runs, with all earlier ones of its stream, when somebody waits for it."""

    def __init__(self, stream: deque[Callable[[], None]], after: Deferred | None = None) -> None:
        self._stream = stream
        self._after = after
        self._is_done = False
        stream.append(self._finish)

    def _finish(self) -> None:
        self._is_done = True

    def wait(self) -> None:
        while not self._is_done:
            self._stream.popleft()()

    def synchronize(self) -> None:
        self.wait()

    def is_done(self) -> bool:
        return self._is_done


class DeferredTransfers:
    """``HostTransfers`` of a simulated device: each direction is a stream whose copies run only when waited for.

    A device buffer is overwritten with NaN when a copy into it begins, so that a use before its end, or a use of a
    buffer that was given away, gives NaN.
    """

    device = torch.device("cpu")
    needs_pinned_memory = False

    def __init__(self, available_bytes: int = 2**40) -> None:
        self.out: deque[Callable[[], None]] = deque()
        self.into: deque[Callable[[], None]] = deque()
        self.bytes_out = self.bytes_in = 0
        self.paces = 0
        self._available_bytes = available_bytes

    def keep_pace(self) -> None:
        self.paces += 1

    def host_buffer(self, size_bytes: int) -> Tensor:
        if size_bytes > self._available_bytes:
            raise RuntimeError(f"{size_bytes} bytes cannot be locked")
        return torch.full((size_bytes,), 255, dtype=torch.uint8)  # NaN in every floating-point dtype

    def mark(self) -> Deferred:
        transfer = Deferred(deque())
        transfer.wait()  # the host's own work is done when it is queued
        return transfer

    def copy_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Deferred) -> Deferred:
        return self._copy(self.out, list(pairs), after)

    def copy_in(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Deferred) -> Deferred:
        return self._copy(self.into, list(pairs), after)

    def _copy(self, stream: deque[Callable[[], None]], pairs: list[tuple[Tensor, Tensor]], after: Deferred) -> Deferred:
        def copy() -> None:
            after.wait()
            for target, source in pairs:
                target.data.copy_(source)
                source_is_device = stream is self.out
                if source_is_device:
                    source.data.fill_(255)  # NaN: whoever reads the buffer now reads what it no longer has

        for _, source in pairs:
            if stream is self.into:
                self.bytes_in += source.nbytes
            else:
                self.bytes_out += source.nbytes
        stream.append(copy)
        return Deferred(stream)

    def free_bytes(self) -> int:
        return self._available_bytes
