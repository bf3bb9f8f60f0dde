"""Messages between ranks that are on their way: sends and receives that run as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

Message = tuple[Tensor, int]
"""A tensor, and the position in the group of the rank that it is sent to or received from."""


class PendingExchange(Protocol):
    """Messages between ranks that are on their way."""

    def wait(self) -> list[Tensor]:
        """Return the received tensors, in the order of ``receives``; call once. The sent tensors may change now."""
        ...


class Exchanged:
    """``PendingExchange`` that is over."""

    def __init__(self, received: list[Tensor]) -> None:
        self._received = received

    def wait(self) -> list[Tensor]:
        return self._received


class C10dExchange:
    """Started sends and receives. It keeps the sent tensors alive until they have been read."""

    def __init__(self, works: list[dist.Work], sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._works = works
        self._sends = sends
        self._received = [tensor for tensor, _ in receives]

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._received
