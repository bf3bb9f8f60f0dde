"""The cases of test_bad_inputs.py: each module lists those of one part of the program."""

from __future__ import annotations

from tests.training.bad_inputs import chat, configuration, exports, precision, resume, runs, sources
from tests.training.bad_inputs.case import BadInput

CASES: tuple[BadInput, ...] = (
    *chat.CASES,
    *configuration.CASES,
    *exports.CASES,
    *precision.CASES,
    *resume.CASES,
    *runs.CASES,
    *sources.CASES,
)
