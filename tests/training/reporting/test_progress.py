"""Tests the lines of progress: complete in a log file, the most important metrics on a narrow terminal."""

from __future__ import annotations

import io
from datetime import timedelta

import pytest
from rich.console import Console

from nxd_memopt.training.reporting.progress import ProgressLines
from nxd_memopt.training.reporting.step_metrics import StepMetrics

ROW = StepMetrics(
    step=40,
    time="2026-01-02T03:04:05.678+00:00",
    tokens=1000,
    loss=2.34567,
    grad_norm=1.5,
    lr=1e-4,
    tokens_per_s=12345.6,
    peak_memory_bytes=2**30,
    mfu=0.25,
)
COMPLETE = (
    "step 40/100  loss 2.3457  12,346 tokens/s  0:01:00 left  lr 1.00e-04  grad norm 1.500  1.00 GiB peak  MFU 25.0 %"
)
SHORT = "step 40/100  loss 2.3457  12,346 tokens/s  0:01:00 left"


@pytest.mark.parametrize(
    ("width", "line", "status"),
    [
        (200, COMPLETE, "0:01:00 left  ━━━━━╌╌╌╌╌╌╌  lr 1.00e-04"),
        (80, SHORT + "  lr 1.00e-04", SHORT + "  ━━━━━╌╌╌╌╌╌╌"),
        (60, SHORT, SHORT),
        (40, "step 40/100  loss 2.3457", "step 40/100  loss 2.3457"),
    ],
)
def test_a_narrow_terminal_keeps_step_loss_speed_and_time_left(width: int, line: str, status: str) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, soft_wrap=True, color_system=None, highlight=False)
    lines = ProgressLines(console, max_steps=100, first_step=0)
    lines.start()
    lines.show(ROW, timedelta(seconds=60), prints=True)
    lines.stop()
    # A step's own line stays in the scrollback, and the status line is the last one.
    printed = [part for text in output.getvalue().split("\n") for part in text.split("\r")]
    assert line in [part.split("\x1b[2K")[-1].rstrip() for part in printed]
    assert status in printed[-2].rstrip() if width == 200 else printed[-2].rstrip().endswith(status)


def test_a_log_file_has_all_metrics_in_one_line_a_step() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=False, width=80, soft_wrap=True)
    lines = ProgressLines(console, max_steps=100, first_step=0)
    lines.start()
    for prints in (True, False):
        lines.show(ROW, timedelta(seconds=60), prints=prints)
    lines.stop()
    assert output.getvalue() == f"{COMPLETE}\n"
