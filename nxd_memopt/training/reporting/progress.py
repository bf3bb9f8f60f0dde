"""Shows the progress of a run: lines that fit a terminal, and below them a line that counts the time left down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from nxd_memopt.training.reporting.step_metrics import StepMetrics

BAR_CHARACTERS = 12
GAP = "  "


class ProgressLines:
    """Lines of steps, and on a terminal a status line below them; a log file gets complete lines only.

    Args:
        console: where the lines go.
        max_steps: steps of the run.
        first_step: steps done before this process.
    """

    def __init__(self, console: Console, *, max_steps: int, first_step: int) -> None:
        self._console = console
        self._max_steps = max_steps
        self._row: StepMetrics | None = None
        self._end_s: float | None = None
        self._status = Progress(_Column(self._status_text), console=console, disable=not console.is_terminal)
        self._task = self._status.add_task("", total=max_steps, completed=first_step)

    def start(self) -> None:
        """Show the status line."""
        self._status.start()

    def stop(self) -> None:
        """Remove the status line's updates: what is printed next follows it."""
        self._status.stop()

    def show(self, row: StepMetrics, left: timedelta | None, *, prints: bool) -> None:
        """Update the status line with a step, and print the step's own line if ``prints``."""
        self._row = row
        self._end_s = None if left is None else time.monotonic() + left.total_seconds()
        self._status.update(self._task, completed=row.step)
        if prints:
            parts = row.parts(self._max_steps, None if left is None else str(left))
            width = self._console.width if self._console.is_terminal else None
            self._console.print(fitting(parts, width), markup=False)

    def _status_text(self, completed: int) -> str:
        """Return the status line of this moment."""
        width = self._console.width
        if self._row is None:
            return fitting([f"step {completed}/{self._max_steps}"], width)
        left = None
        if self._end_s is not None:
            left = str(timedelta(seconds=max(round(self._end_s - time.monotonic()), 0)))
        parts = self._row.parts(self._max_steps, left)
        # The bar is worth less than the loss and the time left, and more than the other metrics.
        done = round(BAR_CHARACTERS * completed / max(self._max_steps, 1))
        parts.insert(3 if left is None else 4, "━" * done + "╌" * (BAR_CHARACTERS - done))
        return fitting(parts, width)


class _Column(ProgressColumn):
    """The status line as the only column: rich would cut the last columns off, not leave out the least important."""

    max_refresh = 0.5

    def __init__(self, text: Callable[[int], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        """Return the line."""
        return Text(self._text(int(task.completed)), no_wrap=True)


def fitting(parts: Sequence[str], width: int | None) -> str:
    """Return the first ``parts`` that fit into ``width`` characters, in one line; None has room for all.

    The first part is always there.
    """
    line = parts[0]
    for part in parts[1:]:
        if width is not None and len(line) + len(GAP) + len(part) > width:
            break
        line += GAP + part
    return line
