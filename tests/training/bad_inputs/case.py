"""One case of test_bad_inputs.py: what the user gets wrong, and what the error line must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BadInput:
    """An input with which the training program must stop, with one line and exit status 2.

    Args:
        name: the test's id.
        prepare: writes the case's files into an empty directory and returns the YAML file.
        says: parts of the error line: the file or the value, and the remedy.
        options: options of the command line.
    """

    name: str
    prepare: Callable[[Path], Path]
    says: tuple[str, ...]
    options: tuple[str, ...] = ()
