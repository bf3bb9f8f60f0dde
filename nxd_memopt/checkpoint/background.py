"""Writes training checkpoints while training goes on.

A save has two parts. The calling thread takes a snapshot (``snapshot.py``), which costs next to nothing when the save
begins. A thread of low priority writes the rank's file; on rank 0 it also waits until the other ranks' files are there,
looking at the shared directory, and completes the checkpoint. That thread runs no collective and asks no rank: ranks
agree on the outcome in ``poll`` and ``finish``, which every rank calls in its main thread.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint.logical import TrainingState, base_optimizer
from nxd_memopt.checkpoint.saving import RankSave
from nxd_memopt.checkpoint.snapshot import OWNER, Snapshot
from nxd_memopt.checkpoint.training import begin_save
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.checkpointing import raise_together, share_texts

STALL_S = 60.0
"""How long a program that ends waits for a save without progress, before the save is abandoned."""
_LOWEST_PRIORITY = 19
_BUSY, _DONE = "busy", "done"


class _AbandonedError(Exception):
    """The program ends: what is written is left incomplete, and the last complete checkpoint stays."""


class _Writer:
    """One save under way: the thread that writes it.

    Args:
        save: this rank's part.
        snapshot: the bytes to write.
    """

    def __init__(self, save: RankSave, snapshot: Snapshot) -> None:
        self.save, self.snapshot = save, snapshot
        self.error: Exception | None = None
        self.progress = 0
        self._stop = threading.Event()
        # A daemon: an interpreter that ends does not wait for it longer than ``BackgroundSaver.end`` does.
        self.thread = threading.Thread(target=self._run, name=f"save {save.target.name}", daemon=True)
        self.thread.start()

    def status(self) -> str:
        if self.thread.is_alive():
            return _BUSY
        return _DONE if self.error is None else f"{type(self.error).__name__}: {self.error}"

    def _run(self) -> None:
        _lower_priority()
        try:
            self.save.write(self._pieces_of)
            self.snapshot.close()
            if parallel_state.is_global_rank_zero():
                self.save.wait_for_ranks(self._heartbeat)
                self.save.complete()
        except Exception as error:
            self.error = error
            self._report(error)
        finally:
            self.snapshot.close()

    def _report(self, error: Exception) -> None:
        try:
            self.save.report_failure(str(error))
        except OSError as second:  # a full disk, mostly: the ranks learn of the failure in ``poll``
            error.add_note(f"rank 0 could not be told: {second}")

    def _pieces_of(self, index: int) -> Iterator[Tensor]:
        for piece in self.snapshot.pieces_of(index):
            self._heartbeat()
            self.progress += 1
            yield piece

    def _heartbeat(self) -> None:
        if self._stop.is_set():
            raise _AbandonedError("the program ended before the save was complete")

    def join(self) -> None:
        """Wait until the thread has ended; an interrupt (Ctrl-C) gets through."""
        while self.thread.is_alive():
            self.thread.join(timeout=1.0)

    def end(self, stall_s: float) -> None:
        """Wait while there is progress, then abandon the save."""
        before = -1
        while self.thread.is_alive() and self.progress != before:
            before = self.progress
            self.thread.join(timeout=stall_s)
        self._stop.set()
        self.thread.join(timeout=stall_s)


def _lower_priority() -> None:
    """Let the calling thread run where others leave a core idle; Linux has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


class BackgroundSaver:
    """Saves training checkpoints while training goes on, one at a time. Use it as a context manager.

        with BackgroundSaver(directory) as saver:
            for batch in batches:
                train_step(batch)
                saver.poll()
                if is_due:
                    saver.save(step, state, config)

    The checkpoint holds the state as it is when ``save`` is called. Parameters must be updated by ``state.optimizer``,
    whose step first completes the snapshot; another write to them is an error of the save. A program that leaves the
    block by an exception waits for a save under way as long as it makes progress, and never leaves half a checkpoint.

    Args:
        directory: of the run; all ranks must see it.
        keep: complete checkpoints to leave.
        pool: host memory for copies; default one without a limit, pinned on GPUs. A snapshot takes at most what this
            rank writes, on a GPU all of it.
        stall_s: seconds without progress after which a program that ends abandons the save.
    """

    def __init__(
        self, directory: str | Path, *, keep: int = 2, pool: HostPool | None = None, stall_s: float = STALL_S
    ) -> None:
        self._directory, self._keep, self._stall_s = Path(directory), keep, stall_s
        self._transfers = backend.host_transfers()
        self.pool = pool or HostPool(pinned=self._transfers is not None)
        self._writer: _Writer | None = None
        self._hooked: dict[int, tuple[torch.optim.Optimizer, Any]] = {}
        atexit.register(self._at_exit)

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
            else:
                self._end(error)
        finally:
            self._close()

    def reserve(self, state: TrainingState) -> None:
        """Allocate the host memory of a snapshot of ``state`` now, rather than in the step that saves first.

        Raises:
            ValueError: on every rank, when one has too little; names the required and the available bytes.
        """
        with raise_together("reserving host memory for checkpoints"):
            save = RankSave(self._directory, 0, state, {}, self._keep)
            self.pool.reserve(save.size_bytes, OWNER)

    def save(self, step: int, state: TrainingState, config: Mapping[str, Any]) -> None:
        """Begin to save; an earlier save is finished first. Every rank calls, between two optimizer steps.

        Raises:
            ValueError, OSError: on every rank, when the earlier save failed or this one cannot begin.
        """
        self.finish()
        save = begin_save(self._directory, step, state, config, self._keep)
        with raise_together(f"saving {save.target}"):
            snapshot = Snapshot(save.sources, self.pool, self._transfers)
            self._hook(state.optimizer)
            self._writer = _Writer(save, snapshot)

    def before_update(self) -> None:
        """Complete the snapshot. The optimizer's step calls it; call it before any other write to the state."""
        if self._writer is not None:
            self._writer.snapshot.before_update()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way; ``poll`` and ``finish`` find it done, on all ranks at the same call."""
        return self._writer is not None

    def poll(self) -> None:
        """Look whether the save under way is done. Every rank calls, once a step; costs nothing when there is none.

        Raises:
            ValueError, OSError: on every rank, when the save failed on one; the checkpoints before it are complete.
        """
        if self._writer is not None:
            self._agree(self._writer)

    def finish(self) -> None:
        """Wait until the save under way is done. Every rank calls.

        Raises:
            ValueError, OSError: as of ``poll``.
        """
        if self._writer is not None:
            self._writer.join()
            self._agree(self._writer)

    def _agree(self, writer: _Writer) -> None:
        reports = share_texts(writer.status())
        if _BUSY in reports:
            return
        self._writer = None
        if writer.error is not None:
            raise writer.error
        for rank, report in enumerate(reports):
            if report != _DONE:
                raise ValueError(f"saving {writer.save.target} failed on rank {rank}: {report}")

    def _hook(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Let every step of ``optimizer`` complete the snapshot first; the one inside of ZeRO-1 makes the updates."""
        for each in () if optimizer is None else (optimizer, base_optimizer(optimizer)):
            if id(each) not in self._hooked:
                self._hooked[id(each)] = (each, each.register_step_pre_hook(self._before_step))

    def _before_step(self, *args: Any) -> None:
        del args
        self.before_update()

    def _end(self, error: BaseException) -> None:
        """Bring the save to an end without asking other ranks, which may not answer any more."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        writer.end(self._stall_s)
        if writer.status() != _DONE:
            error.add_note(f"the save of {writer.save.target} under way did not complete: {writer.status()}")

    def _at_exit(self) -> None:
        if self._writer is not None:
            self._writer.end(self._stall_s)

    def _close(self) -> None:
        atexit.unregister(self._at_exit)
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
