"""Writes tagged checkpoints while training goes on, from copies that are made on the host when a save begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nxd_memopt.checkpoint.directories import require_visible
from nxd_memopt.checkpoint.sharded.markers import rank_file, wait_for_ranks
from nxd_memopt.checkpoint.sharded.worker import Worker, lower_priority
from nxd_memopt.memory.host_limits import require_host_memory
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together
from nxd_memopt.parallel_layers.utils import map_distinct_tensors

OWNER = "tagged checkpoint"
_WRITTEN = ".written"
Write = Callable[[str, Any], None]
"""Writes a state to the file with a given name."""


class TagSave:
    """A running save of a tagged checkpoint.

    Args:
        target: directory of the checkpoint.
        incomplete: the directory to write into, created by rank 0.
        states: this rank's states by file name; copied to the host in the constructor.
        write: writes one state to its file.
        complete: makes the checkpoint complete; called on rank 0 when the files of all ranks are
            written.

    Raises:
        ValueError: on every rank, if a host has too little memory; the message has the required
            and the available bytes.
    """

    def __init__(
        self, target: Path, incomplete: Path, states: Mapping[str, Any], write: Write, complete: Callable[[], None]
    ) -> None:
        self._incomplete = incomplete
        self._write = write
        self._complete = complete
        self._rank = parallel_state.get_global_rank()
        self._world_size = parallel_state.get_world_size()
        # Fail before the copy if the host has too little memory for the copies of all its ranks.
        require_host_memory(_size_bytes(states), OWNER)
        with raise_together(f"copying the state for {target}"):
            require_visible(incomplete)
            # Tensors that occur several times are copied once, which keeps ties and memory.
            self._states = map_distinct_tensors(states, _copied)
        self._worker = Worker(target, incomplete, self._work)

    def _work(self, worker: Worker) -> None:
        """Write this rank's files; on rank 0 wait for the other ranks and complete the
        checkpoint.
        """
        lower_priority()
        for name in list(self._states):
            worker.heartbeat()
            self._write(name, self._states.pop(name))  # frees the copy after it is written
        # A marker file per rank replaces a barrier, which the thread must not run: its collective
        # would interleave with those of the training thread.
        rank_file(self._incomplete, self._rank, _WRITTEN).touch()
        if self._rank == 0:
            wait_for_ranks(self._incomplete, self._world_size, _WRITTEN, worker.check_cancelled)
            for rank in range(self._world_size):
                rank_file(self._incomplete, rank, _WRITTEN).unlink()
            self._complete()

    def poll(self) -> None:
        """Check whether the save is done. Every rank calls.

        Raises:
            ValueError, OSError: on every rank, if the save failed on one.
        """
        if self._worker.poll():
            self._end()

    def finish(self) -> None:
        """Wait until the save is done. Every rank calls.

        Raises:
            ValueError, OSError: see ``poll``.
        """
        self._worker.finish()
        self._end()

    def _end(self) -> None:
        """Unregister the save and raise its error, if it failed."""
        parallel_state.UNFINISHED_SAVES.remove(self)
        self._worker.raise_failure()


def _copied(tensor: Tensor) -> Tensor:
    """Return a host copy that shares no memory with ``tensor`` and does not include the rest of
    its storage.
    """
    tensor = tensor.detach()
    # ``cpu()`` returns a host tensor itself, which training would go on changing.
    if tensor.device.type == "cpu":
        return tensor.clone()
    return tensor.cpu()


def _size_bytes(value: Any) -> int:
    """Return the bytes of all distinct tensors in ``value``."""
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    # Tied tensors count once, as they are copied once.
    map_distinct_tensors(value, count)
    return total


def poll_saves() -> None:
    """Check the running save. Every rank calls, once per step. Free if no save is running."""
    for save in list(parallel_state.UNFINISHED_SAVES):
        save.poll()


def finish_saves() -> None:
    """Wait for the running save.

    Every rank calls; raises on every rank if the save failed on one.
    """
    for save in list(parallel_state.UNFINISHED_SAVES):
        save.finish()
