"""What a check is, how it ends, and the record that a rank writes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

PASSED = "passed"
FAILED = "failed"
ABSENT = "absent"
STARTED = "started"
State = Literal["started", "passed", "failed", "absent"]


class CheckError(Exception):
    """The figures of a check are outside their bounds; all ranks can go on with the next check."""


class AbsentError(Exception):
    """The check does not apply to this device or number of ranks; the message says why."""


@dataclass(frozen=True)
class Check:
    """One line of the results.

    Args:
        name: what is checked.
        run: returns the figures; raises ``CheckError``, ``AbsentError`` or any error of the code that it calls.
        instead: what to turn off, or use, while the check fails.
        tensor_model_parallel_size: T of the process groups while it runs.
    """

    name: str
    run: Callable[[], str]
    instead: str
    tensor_model_parallel_size: int = 1


@dataclass(frozen=True)
class Record:
    """What a rank says about a check.

    Args:
        index: number of the check.
        name: its name.
        instead: see ``Check``.
        state: ``started``, or how the check ended.
        text: figures, or what is wrong.
        time_s: time of the record, seconds since the epoch.
    """

    index: int
    name: str
    instead: str
    state: State
    text: str
    time_s: float

    def to_line(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self)) + "\n"
