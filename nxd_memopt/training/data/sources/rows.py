"""Reads the document of a row; a row without one is an error, or left out and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from nxd_memopt.training.config.data import DataConfig, columns_by_field
from nxd_memopt.training.data.sources.conversations import conversation_text, type_of

REMEDY = "correct it, or set data.on_bad_rows to skip to leave such rows out"


class Shard(Protocol):
    """A part of a corpus that is read in order."""

    @property
    def identity(self) -> list[Any]:
        """What distinguishes the shard's content from that of others, as JSON values."""
        ...

    def read(self, start: int) -> Iterator[tuple[str, int]]:
        """Yield the texts from position ``start`` on, each with the position after it; 0 is the beginning."""
        ...

    def place_of(self, position: int) -> str:
        """Return the file, and the line or row, of the document that ends at a position."""
        ...

    def share_of(self, position: int) -> float:
        """Return the part of the shard before a position; 0 if its size is not known."""
        ...


class Place(NamedTuple):
    """Where a document is; its name is made when a message needs it: the number of a line is counted then."""

    shard: Shard
    position: int

    def __str__(self) -> str:
        return self.shard.place_of(self.position)


class BadRowError(ValueError):
    """A row has no document.

    Args:
        kind: under which such rows are counted.
        message: what the row is or has, after its place.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class BadRows:
    """What happens to rows without a document: ``data.on_bad_rows``.

    Args:
        config: the policy, and the name of the dataset for messages.
    """

    def __init__(self, config: DataConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config

    def __str__(self) -> str:
        return ", ".join(f"{number:,} {kind}" for kind, number in sorted(self.counts.items()))

    def leave_out(self, kind: str, description: str) -> None:
        """Count a bad row; print a line for the first of its kind, the 10th, the 100th and so on.

        Raises:
            ValueError: the policy is ``error``.
        """
        # What a message quotes of the file may have no UTF-8 form.
        description = description.encode(errors="replace").decode()
        if self._config.on_bad_rows == "error":
            # An error by default: text that is left out without a word would change what a model learns.
            raise ValueError(f"{description}: {REMEDY}")
        self.counts[kind] += 1
        if str(self.counts[kind]).strip("0") == "1":
            rows = f"{self.counts.total():,} rows of {self._config.dataset!r} so far ({self})"
            print(f"data.on_bad_rows skip: left out {rows}, the last: {description}", flush=True)


class RowReader:
    """Reads rows: a text in one column, or a conversation.

    Args:
        config: format, columns and the policy for bad rows.
    """

    def __init__(self, config: DataConfig) -> None:
        self.bad_rows = BadRows(config)
        self._reported: dict[Shard, int] = {}
        self._config = config
        form = config.format if config.has_conversations else "text"
        required, optional = columns_by_field(form, config.columns)
        self.required, self.optional = tuple(required.values()), tuple(optional.values())
        # The same column in another field is another document.
        self.identity = ["rows", form, sorted({**required, **optional}.items())]
        self._option = "data.columns"
        if config.has_conversations:
            self._option = f"data.format {form}"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read: those that a row must have, and those that it may have."""
        return (*self.required, *self.optional)

    def require_columns(self, place: str, names: Sequence[str]) -> None:
        """Raise ``ValueError`` unless a table has the columns that a row must have."""
        for name in self.required:
            if name not in names:
                raise ValueError(f"{name!r} ({self._option}) is not in {place}: its columns are {list(names)}")

    def read(self, load: Callable[[], Any], place: Place) -> str | None:
        """Return the document of a row, or None if it is left out.

        Args:
            load: returns the row, or raises what the file's format raises for a damaged one.
            place: where the row is.

        Raises:
            ValueError: it has no document, and ``data.on_bad_rows`` is ``error``.
        """
        return self.checked(lambda: self._document(load()), place)

    def checked(self, document: Callable[[], str], place: Place) -> str | None:
        """Return a document that is a text with a UTF-8 form, as ``read``."""
        try:
            text = document()
            text.encode()  # half of a surrogate pair, which the json module accepts, has no UTF-8 form
            return text
        except UnicodeError as error:
            kind, problem = "not UTF-8", f"is not UTF-8 ({error})"
        except BadRowError as error:
            kind, problem = error.kind, str(error)
        except (ValueError, RecursionError) as error:
            kind, problem = "not JSON", f"is not JSON ({error})"
        # Both splits read all rows, and so does the search for held-out text: a row counts once.
        if place.position > self._reported.get(place.shard, 0):
            self.bad_rows.leave_out(kind, f"{place} {problem}")
            self._reported[place.shard] = place.position
        return None

    def _document(self, row: Any) -> str:
        if not isinstance(row, dict):
            raise BadRowError("not a JSON object", f"is {type_of(row)}, not a JSON object")
        for name in self.required:
            if name not in row:
                message = f"has no {name!r} ({self._option}): its columns are {list(row)}"
                raise BadRowError("without the column", message)
        if self._config.has_conversations:
            try:
                return conversation_text(row, self._config.format, self._config.columns)
            except ValueError as error:
                raise BadRowError("not a conversation", f"{error} ({self._option})") from error
        (column,) = self.required
        text = row[column]
        if not isinstance(text, str):
            kind = "null" if text is None else "not text"
            raise BadRowError(kind, f"has {type_of(text)} in column {column!r} ({self._option}), not text")
        return text


class RowShard:
    """Rows that are read in order; positions are numbers of rows.

    Args:
        open_rows: yields, from a number of rows on, what loads each row.
        name: the file or the dataset, for messages.
        identity: what distinguishes its content from that of others, as JSON values.
        reader: reads the document of a row.
        first: number of rows before the shard, for messages.
        count: returns the number of rows; None if only reading all of them would tell.
    """

    def __init__(
        self,
        open_rows: Callable[[int], Iterator[Callable[[], Any]]],
        name: str,
        identity: list[Any],
        reader: RowReader,
        *,
        first: int = 0,
        count: Callable[[], int] | None = None,
    ) -> None:
        self._count = count
        self.identity = identity
        self._open_rows = open_rows
        self._name = name
        self._reader = reader
        self._first = first
        self._reading: tuple[int, Iterator[Callable[[], Any]]] | None = None

    def read(self, start: int) -> Iterator[tuple[str, int]]:
        """Yield the documents of the rows from ``start`` on, each with the number of rows up to it."""
        # The caller stops at the end of a window of documents and calls again for the next one. Without the
        # iterator of the last call, a file would be downloaded or decoded again up to this row.
        reading, self._reading = self._reading, None
        rows = reading[1] if reading is not None and reading[0] == start else self._open_rows(start)
        for position, load in enumerate(rows, start=start + 1):
            self._reading = (position, rows)
            text = self._reader.read(load, Place(self, position))
            if text is not None:
                yield text, position

    def place_of(self, position: int) -> str:
        """Return the name and the number of a row, from 1."""
        return f"{self._name} row {self._first + position}"

    def share_of(self, position: int) -> float:
        """Return the part of the rows before a position; 0 if their number is not known."""
        if self._count is None:
            return 0.0
        return position / max(self._count(), 1)
