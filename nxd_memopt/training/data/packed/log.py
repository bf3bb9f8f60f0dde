"""The log of a split's packed sequences: which rows of its file are complete, and what they contain."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nxd_memopt.checkpoint.directories import flush_to_disk
from nxd_memopt.checkpoint.sharded.index import checksum_of, read_checked_json, write_json
from nxd_memopt.training.data.packing import NOT_TRAINED, Tokens, documents_per_row
from nxd_memopt.training.data.tokenize.windows import Window

TOKEN_BYTES = 4


@dataclass(frozen=True)
class Entry:
    """What is known after a window; numbers are of all windows up to this one.

    Args:
        number: entries up to this one.
        rows: sequences.
        crc32: of this window's bytes.
        sha256: hash of all sequences: of the entry before, followed by this window's bytes.
        most_documents: the largest number of documents in a row.
        not_trained: tokens that are not trained, such as padding.
        documents: documents that were read for these rows.
        ended: whether the text has no more sequences.
        outcomes: conversations that were cut, dropped or skipped, of the documents.
    """

    number: int = 0
    rows: int = 0
    crc32: int = 0
    sha256: str = ""
    most_documents: int = 0
    not_trained: int = 0
    documents: int = 0
    ended: bool = False
    outcomes: Mapping[str, int] = field(default_factory=dict)

    def followed_by(self, window: Window) -> Entry:
        """Return the entry after ``window``."""
        data = window.rows.tobytes()
        return Entry(
            number=self.number + 1,
            rows=self.rows + len(window.rows),
            crc32=zlib.crc32(data),
            # An empty last window, of earlier versions, leaves the hash as it is.
            sha256=hashlib.sha256(self.sha256.encode() + data).hexdigest() if data else self.sha256,
            most_documents=max(self.most_documents, documents_per_row(window.rows)),
            not_trained=self.not_trained + int(np.count_nonzero(window.rows & NOT_TRAINED)),
            documents=window.documents,
            ended=window.ended,
            outcomes=window.outcomes,
        )


class TokenLog:
    """Entries of a split, read from ``NAME.jsonl`` as it grows.

    Args:
        directory: directory of the packed tokens.
        name: split.
        seq_length: S.
    """

    def __init__(self, directory: Path, name: str, seq_length: int) -> None:
        self.bin = directory / f"{name}.bin"
        self.entries: list[Entry] = []
        self._path = directory / f"{name}.jsonl"
        self._row_bytes = seq_length * TOKEN_BYTES
        self._read_bytes = 0
        self._ends: list[int] = []

    @property
    def last(self) -> Entry:
        """The newest entry; one without rows before the first."""
        return self.entries[-1] if self.entries else Entry()

    def has(self, rows: int) -> bool:
        """Return whether there are ``rows`` sequences, or the text has ended."""
        return self.last.ended or self.last.rows >= rows

    def refresh(self) -> None:
        """Read the entries that were added since the last call.

        Raises:
            ValueError: an entry was altered, or the file of the tokens is shorter than they say.
        """
        if not self._path.is_file():
            if self.entries:
                raise ValueError(f"{self._path} is missing: {self._remedy()}")
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        # A line without its end is being written, or was when its writer was killed.
        complete = data[: data.rfind(b"\n") + 1]
        for line in complete.splitlines():
            self.entries.append(self._entry(line))
            self._ends.append(self.last.rows)
        self._read_bytes += len(complete)
        if complete:
            self._require_length()

    def entry_at(self, row: int) -> int:
        """Return the index of the entry whose window has ``row``."""
        return bisect.bisect_right(self._ends, row)

    def window(self, index: int) -> range:
        """Return the rows of the window of an entry."""
        return range(self._ends[index - 1] if index else 0, self._ends[index])

    def require_intact(self, index: int, rows: Tokens) -> None:
        """Raise ``ValueError`` unless ``rows`` are those of the window of an entry, by their CRC-32."""
        if zlib.crc32(rows.tobytes()) != self.entries[index].crc32:
            recorded = self.entries[index].crc32
            raise ValueError(f"{self.bin} was altered, its CRC-32 is not the recorded {recorded}: {self._remedy()}")

    def _entry(self, line: bytes) -> Entry:
        """Return the entry of a line."""
        try:
            content = json.loads(line)
            recorded = content.pop("checksum", None)
            is_intact = recorded == checksum_of(content)
        except (ValueError, AttributeError):
            content, is_intact = {}, False
        if not is_intact or content["number"] != len(self.entries) + 1:
            raise ValueError(f"{self._path} was altered in line {len(self.entries) + 1}: {self._remedy()}")
        return Entry(**content)

    def _require_length(self) -> None:
        """Raise ``ValueError`` if the file of the tokens is shorter than the entries say."""
        size = None
        if self.bin.is_file():
            # Opened, not only asked for: NFS may keep an old size until a file is opened.
            with self.bin.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
        expected = self.last.rows * self._row_bytes
        # Longer only while the file grows: the window after the last entry is being written.
        if size is None or size < expected or (size > expected and self.last.ended):
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"{self.bin} {found}, {expected} were written: {self._remedy()}")

    def _remedy(self) -> str:
        return f"delete {self.bin.parent} to tokenize again"


class TokenWriter:
    """Appends windows to a split's file and log; one process at a time.

    ``NAME.next.json`` is written between the tokens and their entry, and replaced as a whole. It
    has the newest entry, and the state from which the text goes on. After a kill at any point,
    tokens without an entry are cut off, and an entry that was not appended is.

    Args:
        directory: directory of the packed tokens.
        name: split.
        seq_length: S.
    """

    def __init__(self, directory: Path, name: str, seq_length: int) -> None:
        self.log = TokenLog(directory, name, seq_length)
        self._next = directory / f"{name}.next.json"
        self._lines = directory / f"{name}.jsonl"
        self._row_bytes = seq_length * TOKEN_BYTES
        self.restart: dict[str, Any] | None = None
        self.log.refresh()
        if self._next.is_file():
            self._restore()
        elif self.log.entries:
            raise ValueError(f"{self._next} is missing: delete {directory} to tokenize again")

    def _restore(self) -> None:
        """Complete what a killed process has begun."""
        try:
            state = read_checked_json(self._next)
        except ValueError as error:
            raise ValueError(f"{error}; or delete {self._next.parent} to tokenize again") from error
        newest = Entry(**state["entry"])
        if newest != self.log.last:
            # Killed before the entry was appended: the log then ends with the entry before.
            if newest.number != len(self.log.entries) + 1:
                raise ValueError(
                    f"{self._lines} has {len(self.log.entries)} lines, and {self._next} was written after "
                    f"{newest.number - 1}: delete {self._next.parent} to tokenize again"
                )
            _truncate_line(self._lines)
            self._append(newest)
        self.restart = state["restart"]

    def commit(self, window: Window) -> None:
        """Write a window; when this function returns, it is on the disk."""
        entry = self.log.last.followed_by(window)
        with self.log.bin.open("r+b" if self.log.bin.exists() else "wb") as file:
            file.truncate(self.log.last.rows * self._row_bytes)
            file.seek(0, os.SEEK_END)
            file.write(window.rows.tobytes())
        flush_to_disk(self.log.bin)
        self.restart = dict(window.restart)
        write_json(self._next, {"entry": asdict(entry), "restart": self.restart})
        self._append(entry)

    def _append(self, entry: Entry) -> None:
        """Append an entry to the log."""
        content = asdict(entry)
        line = json.dumps({**content, "checksum": checksum_of(content)}) + "\n"
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(line)
        flush_to_disk(self._lines)
        self.log.refresh()


def _truncate_line(path: Path) -> None:
    """Cut an incomplete last line off a file."""
    if not path.is_file():
        return
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(data.rfind(b"\n") + 1)
