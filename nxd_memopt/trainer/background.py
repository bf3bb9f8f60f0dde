"""Writes tagged checkpoints while training goes on, from copies that are made on the host when a save begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nxd_memopt.checkpoint.markers import rank_file, report_failure, wait_for_ranks
from nxd_memopt.checkpoint.pickled import require_visible
from nxd_memopt.checkpoint.worker import Worker, lower_priority
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.utils import map_distinct_tensors

OWNER = "tagged checkpoint"
_WRITTEN = ".written"
Write = Callable[[str, Any], None]
"""Writes a state to the file of a name."""


class TagSave:
    """A tagged checkpoint that is being written.

    Args:
        target: the checkpoint's directory.
        incomplete: the directory that rank 0 has created to write into.
        states: this rank's files by name; copied to the host now.
        write: writes one of them.
        complete: makes the checkpoint complete; called on rank 0 when every rank's files are written.

    Raises:
        ValueError: on every rank, when a host has too little memory; names the required and the available bytes.
    """

    def __init__(
        self,
        target: Path,
        incomplete: Path,
        states: Mapping[str, Any],
        write: Write,
        complete: Callable[[], None],
    ) -> None:
        self._incomplete, self._write, self._complete = incomplete, write, complete
        self._rank, self._world_size = parallel_state.get_global_rank(), parallel_state.get_world_size()
        pool = HostPool()
        with raise_together(f"copying the state for {target}"):
            require_visible(incomplete)
            pool.claim(_size_bytes(states), OWNER)
            self._states = map_distinct_tensors(states, _copied)
        self._worker = Worker(target, self._work, lambda text: report_failure(incomplete, self._rank, text))

    def _work(self, worker: Worker) -> None:
        lower_priority()
        for name in list(self._states):
            worker.heartbeat()
            self._write(name, self._states.pop(name))  # each is freed when it has been written
        rank_file(self._incomplete, self._rank, _WRITTEN).touch()
        if self._rank == 0:
            wait_for_ranks(self._incomplete, self._world_size, _WRITTEN, worker.check_cancelled)
            for rank in range(self._world_size):
                rank_file(self._incomplete, rank, _WRITTEN).unlink()
            self._complete()

    def poll(self) -> None:
        """Look whether the save is done. Every rank calls.

        Raises:
            ValueError, OSError: on every rank, when the save failed on one.
        """
        if self._worker.poll():
            self._end()

    def finish(self) -> None:
        """Wait until the save is done. Every rank calls; raises as ``poll``."""
        self._worker.finish()
        self._end()

    def _end(self) -> None:
        parallel_state.SAVES_UNDER_WAY.remove(self)
        self._worker.raise_failure()


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the host that nothing else writes to, without the rest of the tensor's storage."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _size_bytes(value: Any) -> int:
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    map_distinct_tensors(value, count)
    return total


def poll_saves() -> None:
    """Report what became of a save under way; every rank calls, once a step. Costs nothing when there is none."""
    for save in list(parallel_state.SAVES_UNDER_WAY):
        save.poll()


def finish_saves() -> None:
    """Wait for a save under way. Every rank calls; raises on every rank when it failed on one."""
    for save in list(parallel_state.SAVES_UNDER_WAY):
        save.finish()
