"""Shows the progress of tokenizing all text: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from nxd_memopt.training.data.packed.writer import Progress

PROGRESS_S = 10.0


class Display:
    """Shows what is tokenized, with the share that is done, the rate and the time left, and never asks for a pause.

    A bar on a terminal; elsewhere a line every 10 s.
    """

    def __init__(self) -> None:
        console = Console()
        # A name may have brackets, which are no markup.
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=16), TaskProgressColumn())
        rate = TextColumn("{task.fields[rate]}", markup=False)
        self._bar = Bar(
            *columns, rate, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._started_s = self._printed_s = time.monotonic()
        self._tokens = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def of(self, name: str) -> Callable[[Progress], bool]:
        """Return a function that shows the progress of a source."""
        splits: dict[str, _Split] = {}

        def show(progress: Progress) -> bool:
            label = f"{name}{', held-out text' if progress.name == 'held_out' else ''}"
            if progress.name not in splits:
                for finished in self._bar.task_ids:
                    self._bar.remove_task(finished)
                splits[progress.name] = _Split(self._bar.add_task(label, total=1.0, rate=""), progress)
            split = splits[progress.name]
            self._tokens += progress.tokens - split.tokens
            split.tokens = progress.tokens
            self._bar.update(split.task, completed=progress.share, rate=split.rate(progress))
            # Several windows are written each second: a line for each would hide what matters.
            if self._bar.disable and time.monotonic() - self._printed_s >= PROGRESS_S:
                parts = (f"{progress.share:.1%} done", split.rate(progress), split.left(progress))
                print(f"{label}: {', '.join(part for part in parts if part)}", flush=True)
                self._printed_s = time.monotonic()
            return False

        return show

    def totals(self) -> str:
        """Return the line of the end."""
        seconds = time.monotonic() - self._started_s
        return (
            f"tokenized {self._tokens:,} tokens in {seconds:,.0f} s ({self._tokens / max(seconds, 1e-9):,.0f} tokens/s)"
        )


class _Split:
    """A split that is tokenized.

    Args:
        task: its bar.
        first: its first progress: a command that goes on begins with a share.
    """

    def __init__(self, task: Any, first: Progress) -> None:
        self.task = task
        self.tokens = 0
        self._first = first
        self._started_s = time.monotonic()

    def rate(self, progress: Progress) -> str:
        """Return the tokens per second in words; nothing before the second call."""
        seconds = time.monotonic() - self._started_s
        tokens = progress.tokens - self._first.tokens
        if not tokens or not seconds:
            return ""
        return f"{tokens / seconds:,.0f} tokens/s"

    def left(self, progress: Progress) -> str:
        """Return the time left in words, at the rate of all of this split; nothing while that is not known."""
        done = progress.share - self._first.share
        if done <= 0:
            return ""
        seconds = (time.monotonic() - self._started_s) * (1 - progress.share) / done
        return f"about {datetime.timedelta(seconds=round(seconds))} left"
