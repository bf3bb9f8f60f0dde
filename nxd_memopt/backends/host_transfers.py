"""Owns copies between a device's memory and the host's that run beside the device's work."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Let the device's following work wait for it."""
        ...

    def is_done(self) -> bool: ...


class HostTransfers(Protocol):
    """Copies of one device; all tensors are 1-D of bytes."""

    def host_buffer(self, size_bytes: int) -> Tensor:
        """Host memory that the device can copy to and from by itself."""
        ...

    def to_host(self, source: Tensor, host: Tensor, after: Transfer | None) -> Transfer:
        """Copy when the work that makes ``source`` is done, and ``after`` too."""
        ...

    def to_device(self, host: Tensor, after: Transfer) -> tuple[Tensor, Transfer]:
        """A copy of ``host`` in the device's memory."""
        ...

    def keep_pace(self) -> None:
        """Let the host not run far ahead of the device: it then knows soon which copies are done."""
        ...

    def free_bytes(self) -> int:
        """What the device could still allocate."""
        ...


class _Recorded:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_done(self) -> bool:
        return self._event.query()


class CudaTransfers:
    """Pinned memory, and a stream each way: the copy engines work in both directions at once."""

    _AHEAD = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._reached: deque[torch.cuda.Event] = deque()

    def host_buffer(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def to_host(self, source: Tensor, host: Tensor, after: Transfer | None) -> Transfer:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            if after is not None:
                after.wait()
            host.copy_(source, non_blocking=True)
        return _Recorded(self._out)

    def to_device(self, host: Tensor, after: Transfer) -> tuple[Tensor, Transfer]:
        target = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
        target.record_stream(self._back)
        self._back.wait_stream(torch.cuda.current_stream(self._device))  # whoever had that memory may still use it
        with torch.cuda.stream(self._back):
            after.wait()
            target.copy_(host, non_blocking=True)
        return target, _Recorded(self._back)

    def keep_pace(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._reached.append(event)
        if len(self._reached) > self._AHEAD:
            self._reached.popleft().synchronize()

    def free_bytes(self) -> int:
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + unused
