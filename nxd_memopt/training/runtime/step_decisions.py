"""Makes every rank stop and save after the same step: rank 0 decides, the others read its decisions from the store."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from nxd_memopt.parallel_layers.coordination import share_texts

CHECK_S = 0.5
MAX_POINTS = 16
"""Points between two decisions, at most: bounds how late a decision is when points become slower."""


@dataclass(frozen=True)
class Decision:
    """What all ranks do at one point between two steps or two evaluation batches.

    Args:
        signal: number of the signal that stops the run, or None.
        saves: whether a checkpoint is due by time.
        points: number of points until the next decision, which the ranks pass without asking.
    """

    signal: int | None = None
    saves: bool = False
    points: int = 1


class StepDecisions:
    """Decisions of rank 0 that every rank gets at the same point. Every rank makes the same calls.

    Ranks receive a signal at different moments, and their clocks differ. If each decided for
    itself, one rank would save while another one waits for it in the next step's collective.

    The ranks exchange the decisions through the key-value store of the rendezvous, on the host: no
    collective is added to the device's graph. A decision costs each rank two or three requests to
    the store, so points that follow each other within ``CHECK_S`` share one.

    Args:
        clock: monotonic time in seconds.
        store: key-value store of the ranks; default the one of the process group.
        rank: rank of this process in ``store``.
        world_size: number of processes in ``store``.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        store: Any = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._clock = clock
        self._store = store
        self._rank = rank
        self._world_size = world_size
        # A simulated world (backend "fake") has one process, which decides alone.
        if store is None and dist.is_initialized() and dist.get_backend() != "fake":
            self._store = dist.distributed_c10d._get_default_store()
            self._rank = dist.get_rank()
            self._world_size = dist.get_world_size()
        # One store may serve several runs after each other, whose keys must differ.
        self._prefix = f"nxd_memopt/decisions/{share_texts(secrets.token_hex(8))[0]}"
        self._number = 0
        self._is_reported = False
        self.restart()

    def restart(self) -> None:
        """Let the next point be one with a decision: call it where other work begins."""
        self._points_left = 0
        self._points = 1
        self._decided_s = self._clock()

    def next(self, signal: int | None, saves: Callable[[], bool], *, is_last: bool = False) -> Decision | None:
        """Pass a point; return the decision of all ranks, or None at a point without one.

        Args:
            signal: the signal that this rank has received, or None.
            saves: returns whether a checkpoint is due; called on rank 0 only.
            is_last: whether no point follows, so this one needs a decision.
        """
        self._points_left -= 1
        if self._points_left > 0 and not is_last:
            return None
        decision = self._agree(signal, saves)
        self._points_left = self._points = decision.points
        self._decided_s = self._clock()
        return decision

    def _agree(self, signal: int | None, saves: Callable[[], bool]) -> Decision:
        """Return rank 0's decision."""
        if self._world_size == 1:
            return Decision(signal, saves(), self._next_points())
        # A signal may reach one rank only: that rank tells rank 0, which reads it at this point or,
        # if it was faster, at the next one.
        received = f"{self._prefix}/received"
        if signal is not None and not self._is_reported:
            self._store.set(received, str(signal))
            self._is_reported = True
        key = f"{self._prefix}/{self._number}"
        self._number += 1
        if self._rank == 0:
            if signal is None and self._store.check([received]):
                signal = int(self._store.get(received))
            decision = Decision(signal, saves(), self._next_points())
            self._store.set(key, json.dumps(asdict(decision)))
            return decision
        decision = Decision(**json.loads(self._store.get(key)))
        # The last reader removes the keys, so the store does not grow over a long run.
        if self._store.add(f"{key}/readers", 1) == self._world_size - 1:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/readers")
        return decision

    def _next_points(self) -> int:
        """Return the number of points until the next decision, from the time of the last ones."""
        if self._world_size == 1:  # without a request to the store
            return 1
        point_s = (self._clock() - self._decided_s) / self._points
        if point_s * MAX_POINTS <= CHECK_S:
            return MAX_POINTS
        return max(1, int(CHECK_S / point_s))
