"""An encoder for tests of processes, which import nothing but this file for it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Encoded(NamedTuple):
    """As ``chat.Encoded``."""

    tokens: Any
    outcome: str = "complete"


class NumberingEncoder:
    """The tokens of a document are its first word, a number, and the process that has read it."""

    def encode(self, documents: Sequence[str]) -> list[Encoded]:
        numbers = [document.split()[0] for document in documents]
        for number in numbers:
            if not number.isdecimal():
                raise ValueError(f"no number in {number!r}")
        time.sleep(0.1 * (1 - int(numbers[0]) % 2))
        return [Encoded(np.array([int(number), os.getpid()])) for number in numbers]
