"""Writes training checkpoints while training goes on.

A save has two parts. The calling thread takes a snapshot (``snapshot.py``), which copies almost
nothing when the save begins. A low-priority thread writes the rank's file. On rank 0 the thread
also waits for the files of the other ranks by polling the shared directory, and then completes
the checkpoint. The thread runs no collectives: the ranks agree on the result in ``poll`` and
``finish``, which every rank calls in its main thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint.directories import require_visible
from nxd_memopt.checkpoint.sharded.logical import TrainingState
from nxd_memopt.checkpoint.sharded.saving import RankSave
from nxd_memopt.checkpoint.sharded.snapshot import OWNER, Snapshot
from nxd_memopt.checkpoint.sharded.stored_optimizer import StoredOptimizer
from nxd_memopt.checkpoint.sharded.training import begin_save
from nxd_memopt.checkpoint.sharded.worker import STALL_S, Worker, lower_priority
from nxd_memopt.memory.host_limits import require_host_memory
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.weight_offload import has_offloaded_weights
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together


class BackgroundSaver:
    """Context manager that saves training checkpoints while training goes on, one at a time.

        with BackgroundSaver(directory) as saver:
            for batch in batches:
                train_step(batch)
                saver.poll()
                if is_due:
                    saver.save(step, state, config)

    The checkpoint contains the state at the call of ``save``. Parameters must be updated by
    ``state.optimizer``, whose step first completes the snapshot. Any other write to the
    parameters makes the save fail, except a write through ``Tensor.data``, which is not detected:
    call ``before_update`` before it. If an exception leaves the block, the program waits for a
    running save as long as the save makes progress. A partial checkpoint never becomes visible.

    A save creates thousands of Python objects, after which the interpreter may start a full
    garbage collection (0.2 s for a 3B model). ``gc.freeze()`` before the first step prevents the
    pause; the training program calls it.

    Args:
        directory: directory of the run; all ranks must see it.
        keep: number of complete checkpoints to keep.
        pool: host memory for copies; default a pool without a limit, pinned on GPUs. A snapshot
            takes at most the bytes that this rank writes, and on a GPU all of them.
        stall_s: seconds without progress after which an ending program abandons the save.
    """

    def __init__(
        self, directory: str | Path, *, keep: int = 2, pool: HostPool | None = None, stall_s: float = STALL_S
    ) -> None:
        self._directory = Path(directory)
        self._keep = keep
        self._stall_s = stall_s
        # None on devices that cannot copy next to compute: the snapshot then copies
        # synchronously.
        self._transfers = backend.host_transfers()
        self.pool = pool or HostPool(pinned=self._transfers is not None)
        self._worker: Worker | None = None
        self._snapshot: Snapshot | None = None
        self._step_hooks: dict[int, tuple[torch.optim.Optimizer, Any]] = {}

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # After an exception the other ranks may not reach a collective: only wait for this
            # rank's thread.
            if error is None:
                self.finish()
            elif self._worker is not None:
                self._worker.end(self._stall_s, error)
        finally:
            self._remove_step_hooks()

    def reserve(self, state: TrainingState) -> None:
        """Allocate the host memory for a snapshot of ``state`` now instead of in the first step
        that saves.

        Raises:
            ValueError: on every rank, if one has too little memory; the message has the required
                and the available bytes.
        """
        task = "reserving host memory for checkpoints"
        size_bytes = 0
        with raise_together(task):
            self._require_resident(state)
            # Step and configuration do not matter: only the size of this rank's tensors is used.
            # Nothing is written or copied.
            size_bytes = RankSave(self._directory, 0, state, {}, self._keep).size_bytes
        require_host_memory(self.pool.missing_bytes(size_bytes, OWNER), OWNER)
        with raise_together(task):
            self.pool.reserve(size_bytes, OWNER)

    def _require_resident(self, state: TrainingState) -> None:
        # The next forward would free weights that the snapshot has not copied yet.
        if has_offloaded_weights(state.model.parameters()):
            raise ValueError(
                "background saves need weights that stay on the device: turn cpu_offloading_weights off, "
                "or save with save_training_state"
            )

    def save(self, step: int, state: TrainingState, config: Mapping[str, Any], *, keep_step: int | None = None) -> None:
        """Start a save after finishing the previous one. ``keep_step`` names another checkpoint to keep.

        Every rank calls, between two optimizer steps.

        Raises:
            ValueError, OSError: on every rank, if the previous save failed or this one cannot
                start.
        """
        self.finish()
        self._require_resident(state)
        # The ranks agree twice: after the directory is created, and after the snapshot is taken.
        # The writers start only if both succeeded on every rank, because rank 0's writer waits
        # for the files of all ranks.
        save = begin_save(self._directory, step, state, config, self._keep, keep_step)
        # A device's tensors are all copied; those on the host only where the writer is not done in time.
        if self._transfers is not None:
            require_host_memory(self.pool.missing_bytes(save.size_bytes, OWNER), OWNER)
        snapshot: Snapshot | None = None
        try:
            with raise_together(f"saving {save.target}"):
                require_visible(save.incomplete)
                self._register_step_hooks(state.optimizer)
                snapshot = Snapshot(save.sources, self.pool, self._transfers)
            self._worker = Worker(save.target, save.incomplete, partial(_write, save, snapshot))
        except BaseException:
            if snapshot is not None:
                snapshot.close()  # another rank has failed: return this rank's memory
            raise
        self._snapshot = snapshot

    def before_update(self) -> None:
        """Complete the snapshot.

        The optimizer's step calls it; call it before any other write to the state.
        """
        if self._snapshot is not None:
            self._snapshot.before_update()

    @property
    def is_busy(self) -> bool:
        """Whether a save is running.

        All ranks see the end of a save at the same ``poll`` or ``finish``.
        """
        return self._worker is not None

    def poll(self) -> None:
        """Check whether the running save is done.

        Every rank calls, once per step. Free if no save is running.

        Raises:
            ValueError, OSError: on every rank, if the save failed on one; earlier checkpoints
                stay complete.
        """
        if self._worker is not None and self._worker.poll():
            self._collect_result()

    def finish(self) -> None:
        """Wait until the running save is done. Every rank calls.

        Raises:
            ValueError, OSError: see ``poll``.
        """
        if self._worker is not None:
            self._worker.finish()
            self._collect_result()

    def _collect_result(self) -> None:
        """Release the ended save and raise its error, if it failed."""
        # Reset first: after an error the saver can be used for the next save.
        worker = self._worker
        self._worker = None
        self._snapshot = None
        assert worker is not None
        worker.raise_failure()

    def _register_step_hooks(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Complete the snapshot before each step of ``optimizer``.

        For ZeRO-1 the base optimizer gets the hook too, because its step makes the updates.
        """
        if optimizer is None:
            return
        # By id: the same optimizer is saved many times, and a hook must be registered once. The
        # entry keeps the optimizer alive, so its id is not reused by another object.
        for each in StoredOptimizer(optimizer).steps:
            if id(each) not in self._step_hooks:
                self._step_hooks[id(each)] = (each, each.register_step_pre_hook(self._before_step))

    def _before_step(self, *args: Any) -> None:
        del args
        self.before_update()

    def _remove_step_hooks(self) -> None:
        for _, handle in self._step_hooks.values():
            handle.remove()
        self._step_hooks.clear()


def _write(save: RankSave, snapshot: Snapshot, worker: Worker) -> None:
    """Write this rank's file, and on rank 0 complete the checkpoint.

    Runs in the worker's thread.
    """

    def chunks_of(index: int) -> Iterator[Tensor]:
        for chunk in snapshot.chunks_of(index):
            # One heartbeat per chunk (at most 32 MiB) tells ``Worker.end`` that the save makes
            # progress.
            worker.heartbeat()
            yield chunk

    try:
        snapshot.start_copies()
        # Lower the priority only now: the next update waits until the copies are launched, so
        # this thread must get the processor until then.
        lower_priority()
        save.write(chunks_of)
    finally:
        snapshot.close()
    # The snapshot's memory is returned before rank 0 waits for the other ranks. The wait polls
    # files: a collective in this thread could interleave with those of the training thread, in
    # an order that differs between ranks.
    if parallel_state.is_global_rank_zero():
        save.wait_for_ranks(worker.check_cancelled)
        save.complete()
