"""Measures how long the phases of a start take, from the program's first line to the end of the first step."""

from __future__ import annotations

from time import perf_counter

FIRST_STEP = "first step"
"""The last phase: it compiles kernels, or loads them."""


class StartPhases:
    """Seconds of the phases of a start, in their order.

    Attributes:
        seconds: phase -> seconds.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def end(self, name: str) -> None:
        """End the phase ``name``, which began when the last one ended."""
        now = perf_counter()
        self.seconds[name] = now - self._last
        self._last = now
