"""Runs the training program with stages on two ranks; one of them fails at a chosen event.

``python -m tests.pipeline.failing_program RANK EVENT NUMBER ACTION --config FILE``: before event ``NUMBER`` of the
kind ``EVENT`` rank ``RANK`` does ``ACTION``: ``kill`` ends it with SIGKILL, ``raise`` raises an error, and a number is
how many seconds it waits.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from typing import Any

from nxd_memopt.backends import backend
from nxd_memopt.launch.agent import Agent
from nxd_memopt.pipeline.runner import PipelineRunner
from nxd_memopt.training.__main__ import main
from nxd_memopt.training.runtime.signals import final_status

EVENTS: dict[str, tuple[Any, str]] = {
    "forward": (PipelineRunner, "_forward"),
    "backward": (PipelineRunner, "_backward"),
    "evaluation": (PipelineRunner, "evaluate"),
    "exchange": (type(backend), "exchange"),
    "save": (os, "fsync"),
    "rename": (os, "replace"),
}


def fail(action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "raise":
        raise RuntimeError("the planted error")
    time.sleep(float(action))


def run(kind: str, number: int, action: str, arguments: list[str]) -> int:
    """Train, and fail before event ``number`` of ``kind``."""
    owner, name = EVENTS[kind]
    original, count = getattr(owner, name), itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(count) == number:
            fail(action)
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    return main(arguments)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(Agent([sys.executable, "-m", "tests.pipeline.failing_program", *sys.argv[1:]], 2, os.environ).run())
    victim, event, place, what = sys.argv[1:5]
    at = int(place) if victim == os.environ["RANK"] else 0
    sys.exit(final_status(run(event, at, what, sys.argv[5:])))
