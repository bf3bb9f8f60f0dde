"""Decides after each step, equally on every rank, whether the run saves by time and whether a signal stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.runtime.distributed import is_rank_zero, stop_time_file
from nxd_memopt.training.runtime.save_times import SaveTimes
from nxd_memopt.training.runtime.signals import Interrupted, Interrupts
from nxd_memopt.training.runtime.step_decisions import StepDecisions
from nxd_memopt.training.state import Saver, Training

LAST_SAVE = "last_save.json"
NO_CHECKPOINTS = "nothing was saved (trainer.save_interval is never), and the same command starts at step 0"


class _StoppedError(Exception):
    """A signal stops the run during an evaluation; raised on every rank before the same batch."""


def message_after_training(config: TrainConfig) -> str:
    """Return what the line of a run says that is stopped after its last step."""
    if not config.trainer.saves_checkpoints:
        return f"after training: {NO_CHECKPOINTS}"
    return "after training: the last step is saved; start the same command to evaluate and export"


class Stopping:
    """Saves and stops of a training loop. Every rank makes the same calls.

    Args:
        training: state of the run.
        config: configuration of the run.
        saver: writer of checkpoints.
        interrupts: signals that this process has received.
    """

    def __init__(
        self,
        training: Training,
        config: TrainConfig,
        saver: Saver,
        interrupts: Interrupts,
    ) -> None:
        self._training = training
        self._trainer = config.trainer
        self._directory = config.trainer.checkpoint_directory
        self._saver = saver
        self._interrupts = interrupts
        self._decisions = StepDecisions()
        self._is_saving = False
        self._signal: int | None = None
        self._written_s: float | None = None
        self._saved_step = training.step
        file = None
        if is_rank_zero() and config.trainer.saves_checkpoints:
            file = Path(config.trainer.output_dir) / LAST_SAVE
        self._times = SaveTimes(file)

    @property
    def stops(self) -> bool:
        """Whether the run stops after this step, because of a signal."""
        return self._signal is not None

    def after_step(self) -> bool:
        """Return whether a checkpoint is due, by time or because the run stops. Call after a step."""
        if self._is_saving and not self._saver.is_busy:
            self._finished_save()
        self._times.passed_step()
        is_last = self._training.step == self._trainer.max_steps
        saves = self._pass_point(self._is_due_by_time, is_last=is_last)
        self._write_stop_time()
        return saves or self.stops

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Let ``before_batch`` end the block if a signal stops the run."""
        # Batches take another time than steps: the interval between decisions is measured again.
        self._decisions.restart()
        try:
            yield
        except _StoppedError:
            pass
        finally:
            self._decisions.restart()

    def before_batch(self) -> None:
        """End the evaluation on every rank if a signal stops the run. Call before each batch."""
        self._pass_point(lambda: False)
        if self.stops:
            raise _StoppedError

    def save(self) -> None:
        """Save a checkpoint if the run has checkpoints, and measure its time."""
        if not self._trainer.saves_checkpoints:
            return
        # The saver runs one save at a time; here the time of the running one is measured too.
        if self._is_saving:
            self._saver.finish()
            self._finished_save()
        self._times.started_save()
        self._is_saving = True
        self._saved_step = self._training.step
        self._saver.save()
        if self.stops:
            self._saver.finish()
        if not self._saver.is_busy:
            self._finished_save()

    def stop_waiting(self, number: int) -> NoReturn:
        """Save the last step, if it is not saved, and raise ``Interrupted`` on every rank.

        Every rank calls, between two steps, with the signal that stops the run.
        """
        if not self._training.step:
            raise Interrupted(number, Interrupts().message, is_agreed=True)
        self._signal = number
        if self._training.step != self._saved_step:
            self.save()
        self._saver.finish()
        self.raise_if_stopped()
        raise AssertionError("a signal was set")

    def raise_if_stopped(self) -> None:
        """Raise ``Interrupted`` on every rank if the run stops. Call after ``save``."""
        if self._signal is None:
            return
        step = self._training.step
        message = f"after step {step}: {NO_CHECKPOINTS}"
        if self._trainer.saves_checkpoints:
            message = f"after step {step}: saved {self._directory}; start the same command to continue"
        raise Interrupted(self._signal, message, is_agreed=True)

    def _pass_point(self, saves: Callable[[], bool], *, is_last: bool = False) -> bool:
        """Take rank 0's decision, if there is one at this point; return whether a save is due."""
        decision = self._decisions.next(self._interrupts.first, saves, is_last=is_last)
        if decision is None:
            return False
        self._signal = decision.signal
        return decision.saves

    def _is_due_by_time(self) -> bool:
        return self._trainer.save_interval == "auto" and self._trainer.saves_checkpoints and self._times.is_due()

    def _finished_save(self) -> None:
        self._is_saving = False
        self._times.finished_save()
        self._write_stop_time()

    def _write_stop_time(self) -> None:
        """Tell the agent how long this run needs to stop, if that has changed by a tenth."""
        file = stop_time_file()
        seconds = self._times.stop_s(saves=self._trainer.saves_checkpoints)
        if file is None or seconds is None or not is_rank_zero():
            return
        if self._written_s is None or abs(seconds - self._written_s) > 0.1 * self._written_s:
            with suppress(OSError):  # the agent then waits as long as for a run without a save
                file.write_text(f"{seconds:.3f}", encoding="utf-8")
            self._written_s = seconds
