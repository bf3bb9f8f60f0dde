"""Shows and records a run on rank 0: progress, metrics.jsonl, evaluation.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table

from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.reporting.boards import Boards
from nxd_memopt.training.reporting.loss_plot import LOSS_PLOT, draw_losses
from nxd_memopt.training.reporting.progress import ProgressLines
from nxd_memopt.training.reporting.records import EVALUATION, METRICS, SAMPLES, Rows
from nxd_memopt.training.reporting.run_record import options_of, options_text, write_run_record
from nxd_memopt.training.reporting.step_metrics import HeldOut, StepMetrics, printable


class Reporter:
    """Display and record of a run; a context manager.

    Args:
        config: options of the run, which are recorded too.
        enabled: False on all ranks but one: the reporter then does nothing.
        first_step: optimizer steps done before this process; records of later steps are removed.
        continues: whether these steps are of this output directory; other records are those of another run and
            are removed.
        planned_memory_bytes: planned peak of this rank, which every row of metrics.jsonl has next
            to the measured one; None if it is not planned.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        enabled: bool,
        first_step: int,
        continues: bool = True,
        planned_memory_bytes: int | None = None,
    ) -> None:
        self._planned_memory_bytes = planned_memory_bytes
        self._config = config.trainer
        self._enabled = enabled
        self._first_step = first_step
        self.tokens_per_step: int | None = None
        """Set by the loop: with it, lines of progress say how much time is left."""
        # soft_wrap: a line of a log file is not broken at the width of a terminal that is not
        # there. quiet: other ranks call say and show too, and print nothing.
        # Text such as :100: stays as it is.
        self.console = Console(soft_wrap=True, quiet=not enabled, highlight=False, emoji=False)
        # The attributes below exist on rank 0 only, so that one process writes each file.
        if enabled:
            directory = Path(config.trainer.output_dir)
            last_step = first_step if continues else -1
            self._metrics = Rows(directory / METRICS, last_step)
            self._evaluations = Rows(directory / EVALUATION, last_step)
            if config.data.has_conversations:
                self._samples = Rows(directory / SAMPLES, last_step)
            write_run_record(config)
            self._boards = Boards(directory, first_step=first_step, wandb_project=config.trainer.wandb_project)
            self._boards.options(options_text(config), options_of(config))
            self._progress = ProgressLines(self.console, max_steps=self._config.max_steps, first_step=first_step)

    def __enter__(self) -> Reporter:
        if self._enabled and self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._enabled:
            self._progress.stop()
            self._boards.close(exit_code=0 if kind is None else 1)
            self._draw()

    def _draw(self) -> None:
        """Draw the losses of all steps, those of earlier processes too; a failure is a line."""
        if not self._metrics.rows:
            return
        # The picture is an extra: whatever fails, also in a library, must not fail a run that is complete, or hide the
        # error with which it ends. It comes last, because matplotlib's first start takes seconds.
        path = Path(self._config.output_dir) / LOSS_PLOT
        try:
            draw_losses(path, self._metrics.rows, self._evaluations.rows)
        except Exception as error:
            self.say(f"{path} is not drawn: {type(error).__name__}: {error}")

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self.console.print(text, markup=False)

    def show(self, table: Table) -> None:
        """Stop the progress bar and print ``table`` below it, as the last output of the run."""
        if self._enabled:
            self._progress.stop()
        self.console.print(table)

    def step(self, row: StepMetrics) -> None:
        """Record a step in metrics.jsonl and on the boards, and show its progress."""
        if not self._enabled:
            return
        values = row.row() | {"planned_memory_bytes": self._planned_memory_bytes}
        self._metrics.append(values)
        self._boards.scalars(
            {f"train/{name}": value for name, value in values.items() if name not in ("step", "time")}, row.step
        )
        self._show(row)

    def _show(self, row: StepMetrics) -> None:
        """Show the progress, with a line of its own every ``log_every_n_steps``."""
        remaining = self._config.max_steps - row.step
        left: timedelta | None = None
        if self.tokens_per_step is not None and remaining:
            left = timedelta(seconds=round(remaining * self.tokens_per_step / row.tokens_per_s))
        is_logged = row.step % self._config.log_every_n_steps == 0 or not remaining
        self._progress.show(row, left, prints=is_logged)
        # Once, after the second step, because the first one is a warm-up.
        if left is not None and row.step - self._first_step == 2:
            end = datetime.now().astimezone() + left
            self.say(f"expected end of training: {end:%Y-%m-%d %H:%M %Z}, without evaluations and saves")

    def evaluated_same_tokens(self, first: int, last: int) -> bool:
        """Return whether the losses recorded for two steps are of the same tokens, as far as their rows say."""
        if not self._enabled:
            return True
        digests = {row["step"]: row.get("digest") for row in self._evaluations.rows}
        return None in (digests.get(first), digests.get(last)) or digests[first] == digests[last]

    def recorded_evaluation(self, step: int) -> float | None:
        """Return the recorded held-out loss of ``step``, or None without a record."""
        if not self._enabled:
            return None
        # The last one, where other tokens were evaluated later.
        losses = [row["held_out_loss"] for row in self._evaluations.rows if row["step"] == step]
        return losses[-1] if losses else None

    def best_evaluation(self, steps: Collection[int], text: HeldOut | None) -> tuple[int, float] | None:
        """Return the one of ``steps`` with the lowest recorded loss of this held-out text, and the loss; None without.

        Losses of other text, as options of the data give, are not compared; a line then says so.
        """
        if not self._enabled:
            return None
        rows = [row for row in self._evaluations.rows if row["step"] in steps]
        same = [row for row in rows if text is not None and row.get("digest") == text.digest]
        if rows and not same:
            self.say("trainer.keep_best: the held-out text has changed, and the best checkpoint is chosen anew")
        losses = [(row["held_out_loss"], row["step"]) for row in same if math.isfinite(row["held_out_loss"])]
        if not losses:
            return None
        loss, step = min(losses)
        return step, loss

    def evaluation(self, step: int, held_out_loss: float, text: HeldOut) -> None:
        """Record the held-out loss after ``step`` in evaluation.jsonl and on the boards; print it.

        Args:
            step: number of the step.
            held_out_loss: mean over the held-out tokens.
            text: what was evaluated, which changes with the options of the data.
        """
        if not self._enabled:
            return
        # A finished run that is started again evaluates its last step again: one row is enough.
        same = [known for known in self._evaluations.rows if known["step"] == step]
        if not any(known.get("digest") == text.digest for known in same):
            self._evaluations.append({"step": step, "held_out_loss": held_out_loss, **asdict(text)})
        self._boards.scalars({"held_out/loss": held_out_loss}, step)
        self.say(f"step {step}/{self._config.max_steps}  held-out loss {held_out_loss:.4f} ({text})")

    def answer(self, step: int, values: Mapping[str, Any]) -> None:
        """Record an answer of the model after ``step`` in samples.jsonl: ``prompt``, ``answer`` and more values."""
        # A finished run that is started again generates its last answers again: one row is enough.
        if self._enabled and self._answer(step, values["prompt"]) is None:
            self._samples.append({"step": step, **values})

    def show_answers(self, step: int, prompts: Sequence[str], seconds: float) -> None:
        """Print the recorded answers to ``prompts`` at step 0, if there are any, and after ``step``."""
        if not self._enabled:
            return
        self.say(f"answers to questions of held-out conversations, generated in {seconds:.1f} s:")
        for prompt in prompts:
            texts = {"question": prompt, "before": self._answer(0, prompt), f"step {step}": self._answer(step, prompt)}
            for name, text in texts.items():
                if text is not None:
                    lines = f"\n{'':<12}| ".join(printable(text.strip()).split("\n"))
                    self.say(f"  {name:<10}| {lines}")

    def _answer(self, step: int, prompt: str) -> str | None:
        """Return the recorded answer to ``prompt`` after ``step``, or None."""
        for row in self._samples.rows:
            if (row["step"], row.get("prompt")) == (step, prompt):
                return row.get("answer")
        return None

    def mean_tokens_per_s(self) -> float | None:
        """Return the mean tokens per second of this process's steps, or None without steps.

        The first step is left out as warm-up if there are others.
        """
        # Every step has the same number of tokens, so the mean rate over time is the harmonic
        # mean.
        rates = [row["tokens_per_s"] for row in self._metrics.rows if row["step"] > self._first_step]
        rates = rates[1:] or rates
        if not rates:
            return None
        return len(rates) / sum(1 / rate for rate in rates)
