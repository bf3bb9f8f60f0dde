"""Files of one JSON object per step, such as metrics.jsonl, which a resumed run continues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nxd_memopt.files import complete_file

ROW_START = b'{"step": '
METRICS = "metrics.jsonl"
EVALUATION = "evaluation.jsonl"
SAMPLES = "samples.jsonl"
# Numbers besides the step that a resumed run reads from the rows of earlier processes.
READ_AGAIN = {METRICS: (), EVALUATION: ("held_out_loss",), SAMPLES: ()}


class Rows:
    """JSONL file with one row per step, which a resumed run continues.

    The first row creates the file. Rows after ``last_step`` are removed, because the resumed run
    repeats their steps. An incomplete row, left by a process that was killed while writing, is
    removed too.

    Attributes:
        rows: the rows without lists, such as the tokens of each expert.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if not path.is_file():
            return
        # A process that is killed here loses no row.
        with complete_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for row in _complete_rows(path):
                if row["step"] <= last_step:
                    file.write(f"{json.dumps(row)}\n")
                    self._keep(row)

    def _keep(self, row: dict[str, Any]) -> None:
        # Without lists: the tokens of each expert, of 48 layers of 128 experts, are 239 KiB a step.
        self.rows.append({name: value for name, value in row.items() if not isinstance(value, list)})

    def append(self, row: dict[str, Any]) -> None:
        """Add ``row`` to ``rows`` and to the file.

        Raises:
            OSError: the file cannot be written, because of a full disk perhaps.
        """
        self._keep(row)
        # Opened and closed for each row, so every complete row survives a killed process.
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(row)}\n")
        except OSError as error:
            raise OSError(
                f"could not write {self._path}: {error}: free disk space and start the same command again"
            ) from error


def require_readable_records(directory: Path) -> None:
    """Raise ``ValueError`` if the records of earlier steps in ``directory`` cannot be continued."""
    for name in READ_AGAIN:
        for _ in _complete_rows(directory / name):
            pass


def _complete_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of ``path``; none if the file does not exist.

    Raises:
        ValueError: a line is not a row of a step.
    """
    if not path.is_file():
        return
    numbers = READ_AGAIN.get(path.name, ())
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            # A killed process leaves at most one incomplete line, the last one, without a newline.
            if not line.endswith(b"\n") and _is_cut_off(line):
                return
            if not _is_row(line, numbers):
                content = " and ".join(f"a {name}" for name in ("step", *numbers))
                raise ValueError(
                    f"{path} line {number} is not a row with {content}: it was altered, or another program wrote the "
                    "file: correct the line or rename the file; the run then records into a new one"
                )
            yield json.loads(line)


def _is_cut_off(line: bytes) -> bool:
    """Return whether a line without a newline is the beginning of a row, or empty."""
    # A host that lost power may leave zero bytes.
    start = line.strip(b"\0")
    return not _is_row(line) and start[: len(ROW_START)] == ROW_START[: len(start)]


def _is_row(line: bytes, numbers: Sequence[str] = ()) -> bool:
    """Return whether a line is a JSON object with the number of a step, and with all ``numbers``."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return False
    return all(type(row.get(name)) in (int, float) for name in numbers)
