"""Copies between GPU memory and pinned host memory, on dedicated streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from nxd_memopt.backends.cuda.registered_memory import registered_buffer
from nxd_memopt.backends.host_transfers import Transfer


def _in_parts(tensor: Tensor, pieces: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield consecutive parts of ``tensor``, each as long as its piece, with the pieces."""
    start = 0
    for piece in pieces:
        yield tensor.narrow(0, start, piece.numel()), piece
        start += piece.numel()


def _require_no_capture() -> None:
    # The host asks whether copies are done, and chooses their buffers by the answers.
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("activation offload cannot be part of a CUDA graph: turn off one of them")


class _Recorded:
    """``Transfer`` that is done when ``stream`` reaches its present end."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_done(self) -> bool:
        _require_no_capture()
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaTransfers:
    """``HostTransfers`` with one stream per direction: copy engines work in both directions."""

    needs_pinned_memory = True
    _AHEAD = 2  # calls of keep_pace() that the host may run ahead of the device

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._to_host_stream = torch.cuda.Stream(device)
        self._to_device_stream = torch.cuda.Stream(device)
        self._pace_events: deque[torch.cuda.Event] = deque()

    def to_host(self, source: Tensor, pieces: Sequence[Tensor]) -> Transfer:
        _require_no_capture()
        # The copy waits for the work queued so far; the current stream does not wait for the
        # copy.
        self._to_host_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._to_host_stream):
            for part, piece in _in_parts(source, pieces):
                piece.copy_(part, non_blocking=True)
        return _Recorded(self._to_host_stream)

    def mark(self) -> Transfer:
        return _Recorded(torch.cuda.current_stream(self.device))

    def copy_out(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Transfer) -> Transfer:
        with torch.cuda.stream(self._to_host_stream):
            after.wait()
            for host, source in pairs:
                host.copy_(source, non_blocking=True)
        return _Recorded(self._to_host_stream)

    def copy_in(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Transfer) -> Transfer:
        with torch.cuda.stream(self._to_device_stream):
            after.wait()
            for target, host in pairs:
                target.copy_(host, non_blocking=True)
        return _Recorded(self._to_device_stream)

    def host_buffer(self, size_bytes: int) -> Tensor:
        return registered_buffer(size_bytes)

    def to_device(self, pieces: Sequence[Tensor], after: Transfer) -> tuple[Tensor, Transfer]:
        # The block belongs to the current stream, but the copy on another stream writes it. The
        # contract's lifetime replaces record_stream, with which a freed block stays unusable until
        # the host sees that the device has passed that point: a host that runs ahead through
        # backward would allocate a new block for every layer.
        size_bytes = sum(piece.numel() for piece in pieces)
        target = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        # The allocator reuses blocks in the order of the current stream: work of the previous user
        # of the block may still be queued there.
        self._to_device_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._to_device_stream):
            after.wait()
            for part, piece in _in_parts(target, pieces):
                part.copy_(piece, non_blocking=True)
        return target, _Recorded(self._to_device_stream)

    def keep_pace(self) -> None:
        # Waiting is not allowed in a capture, and not needed: a graph is one launch.
        if torch.cuda.is_current_stream_capturing():
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._pace_events.append(event)
        # wait for the device to reach the call of _AHEAD calls ago
        if len(self._pace_events) > self._AHEAD:
            self._pace_events.popleft().synchronize()

    def free_bytes(self) -> int:
        # Cached blocks without a tensor count as free, besides what the driver reports as free, of
        # which set_per_process_memory_fraction may allow a part only.
        reserved = torch.cuda.memory_reserved(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.device) * total) - reserved
        return max(0, min(free, allowed)) + reserved - torch.cuda.memory_allocated(self.device)
