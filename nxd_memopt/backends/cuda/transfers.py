"""Copies between GPU memory and pinned host memory, on dedicated streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from nxd_memopt.backends.host_transfers import Transfer


class _Recorded:
    """``Transfer`` that is done when ``stream`` reaches its present end."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_done(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaTransfers:
    """``HostTransfers`` with one stream per direction: copy engines work in both directions.

    Pinned memory comes from PyTorch's caching host allocator. The allocator waits for pending
    copies before it reuses a block, and rounds sizes up to powers of two.
    """

    _AHEAD = 2  # calls of keep_pace() that the host may run ahead of the device

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._to_host_stream = torch.cuda.Stream(device)
        self._to_device_stream = torch.cuda.Stream(device)
        self._pace_events: deque[torch.cuda.Event] = deque()

    def to_host(self, source: Tensor) -> tuple[Tensor, Transfer]:
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        # The copy waits for the work queued so far; the current stream does not wait for the
        # copy.
        self._to_host_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._to_host_stream):
            host.copy_(source, non_blocking=True)
        return host, _Recorded(self._to_host_stream)

    def mark(self) -> Transfer:
        return _Recorded(torch.cuda.current_stream(self.device))

    def copy_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Transfer) -> Transfer:
        with torch.cuda.stream(self._to_host_stream):
            after.wait()
            for host, source in pairs:
                host.copy_(source, non_blocking=True)
        return _Recorded(self._to_host_stream)

    def to_device(self, host: Tensor, after: Transfer) -> tuple[Tensor, Transfer]:
        target = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
        # The block belongs to the current stream, but the copy on another stream writes it. Without
        # record_stream the allocator could reuse a freed block before the copy has finished.
        target.record_stream(self._to_device_stream)
        # The allocator reuses blocks in the order of the current stream: work of the previous user
        # of the block may still be queued there.
        self._to_device_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._to_device_stream):
            after.wait()
            target.copy_(host, non_blocking=True)
        return target, _Recorded(self._to_device_stream)

    def keep_pace(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._pace_events.append(event)
        # wait for the device to reach the call of _AHEAD calls ago
        if len(self._pace_events) > self._AHEAD:
            self._pace_events.popleft().synchronize()

    def free_bytes(self) -> int:
        # Cached blocks without a tensor count as free, besides what the driver reports as free.
        cached = torch.cuda.memory_reserved(self.device)
        cached -= torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + cached
