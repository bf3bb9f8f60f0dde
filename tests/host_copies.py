"""Copies between device and host memory for tests on a CPU: plain copies that run when somebody waits for them."""

from __future__ import annotations

import torch


class Copy:
    """Bytes that arrive when somebody waits for them."""

    def __init__(self, copy) -> None:
        self._copy = copy

    def wait(self) -> None:
        if self._copy is not None:
            self._copy()
            self._copy = None

    synchronize = wait

    def is_done(self) -> bool:
        self.wait()
        return True


class SlowCopy(Copy):
    def is_done(self) -> bool:
        return self._copy is None


def in_parts(pieces, tensor):
    return zip(pieces, tensor.split([piece.numel() for piece in pieces]), strict=True)


class HostOnly:
    """Transfers of a device whose memory is the host's, with a record of them."""

    needs_pinned_memory = False

    def __init__(self, free_bytes: int = 2**40, copy=Copy) -> None:
        self.events: list[str] = []
        self._free_bytes, self._copy = free_bytes, copy

    def to_host(self, source, pieces):
        self.events.append("out")
        assert sum(piece.numel() for piece in pieces) == source.numel()
        copy = source.clone()
        for piece in pieces:
            piece.fill_(255)
        return self._copy(lambda: [piece.copy_(part) for piece, part in in_parts(pieces, copy)])

    def to_device(self, pieces, after):
        self.events.append("back")
        after.wait()
        target = torch.full((sum(piece.numel() for piece in pieces),), 255, dtype=torch.uint8)
        return target, self._copy(lambda: [part.copy_(piece) for piece, part in in_parts(pieces, target)])

    def keep_pace(self) -> None:
        self.events.append("pace")

    def free_bytes(self) -> int:
        return self._free_bytes
