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
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._reached: deque[torch.cuda.Event] = deque()

    def to_host(self, source: Tensor) -> tuple[Tensor, Transfer]:
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        # The copy waits for the work queued so far; the current stream does not wait for the copy.
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
        return host, _Recorded(self._out)

    def mark(self) -> Transfer:
        return _Recorded(torch.cuda.current_stream(self.device))

    def copy_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Transfer) -> Transfer:
        with torch.cuda.stream(self._out):
            after.wait()
            for host, source in pairs:
                host.copy_(source, non_blocking=True)
        return _Recorded(self._out)

    def to_device(self, host: Tensor, after: Transfer) -> tuple[Tensor, Transfer]:
        target = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
        # The block belongs to the current stream, but the copy on another stream writes it.
        target.record_stream(self._back)
        # its previous user may still run
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._back):
            after.wait()
            target.copy_(host, non_blocking=True)
        return target, _Recorded(self._back)

    def keep_pace(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._reached.append(event)
        # wait for the device to reach the call of _AHEAD calls ago
        if len(self._reached) > self._AHEAD:
            self._reached.popleft().synchronize()

    def free_bytes(self) -> int:
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused
