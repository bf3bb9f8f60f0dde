"""The packed sequences of a split: windows in complete files, and the stream of rows that training reads from them."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from nxd_memopt.checkpoint.directories import flush_to_disk
from nxd_memopt.checkpoint.sharded.index import checksum_of
from nxd_memopt.files import complete_file
from nxd_memopt.training.data.mixture import Blend
from nxd_memopt.training.data.packing import NOT_TRAINED, Tokens, documents_per_row
from nxd_memopt.training.data.tokenize.windows import Window

FACTS = "nxd_memopt packed tokens, version 6"
"""Name of the facts in a file's metadata."""
OPEN_WINDOWS = 1024  # mapped into memory at a time: Linux allows a process 65,530 mappings


@dataclass(frozen=True)
class Facts:
    """What is known after a window; numbers are of all windows up to this one.

    Args:
        fingerprint: fingerprint of text, tokenizer and options.
        rows: sequences.
        sha256: hash of all sequences: of the window before, followed by this window's bytes.
        most_documents: the largest number of documents in a row.
        not_trained: tokens that are not trained, such as padding.
        documents: documents that were read for these rows.
        ended: whether the text has no more sequences.
        outcomes: conversations that were cut, dropped or skipped, of the documents.
    """

    fingerprint: str
    rows: int = 0
    sha256: str = ""
    most_documents: int = 0
    not_trained: int = 0
    documents: int = 0
    ended: bool = False
    outcomes: Mapping[str, int] = field(default_factory=dict)

    def followed_by(self, window: Window) -> Facts:
        """Return the facts after ``window``."""
        return Facts(
            fingerprint=self.fingerprint,
            rows=self.rows + len(window.rows),
            sha256=hashlib.sha256(self.sha256.encode() + window.rows.tobytes()).hexdigest(),
            most_documents=max(self.most_documents, documents_per_row(window.rows)),
            not_trained=self.not_trained + int(np.count_nonzero(window.rows & NOT_TRAINED)),
            documents=window.documents,
            ended=window.ended,
            outcomes=window.outcomes,
        )


class WindowFiles:
    """The windows of a split, ``NAME.000000.safetensors`` and so on; a file is complete or absent.

    All windows but the last of the text have equally many rows, so a row's file follows from its number.
    Each file is compared with its checksums when it is first read.

    Args:
        directory: directory of the packed tokens.
        name: split.
        fingerprint: fingerprint of text, tokenizer and options.
    """

    def __init__(self, directory: Path, name: str, fingerprint: str) -> None:
        self.count = 0
        """Windows that are read; more may exist."""
        self._directory = directory
        self._name = name
        self._fingerprint = fingerprint
        self._facts: dict[int, Facts] = {}
        self._open = lru_cache(maxsize=OPEN_WINDOWS)(self._opened)

    @property
    def last(self) -> Facts:
        """The facts of the newest window; those of no rows before the first."""
        return self.facts(self.count - 1) if self.count else Facts(self._fingerprint)

    def path(self, number: int) -> Path:
        """Return the file of a window, from 0."""
        return self._directory / f"{self._name}.{number:06}.safetensors"

    def written(self) -> int:
        """Return the number of windows that exist."""
        # Windows are counted on from those that are known: a directory of thousands of files is listed once.
        count = self.count or len(list(self._directory.glob(f"{self._name}.*.safetensors")))
        while self.path(count).exists():
            count += 1
        return count

    def has(self, rows: int) -> bool:
        """Return whether there are ``rows`` sequences, or all of the text."""
        return self.last.ended or self.last.rows >= rows

    def facts(self, number: int) -> Facts:
        """Return the facts of a window."""
        self._open(number)
        return self._facts[number]

    def facts_at(self, rows: int) -> Facts:
        """Return the facts of the window with which there are ``rows`` sequences, or of the last one."""
        if not self.count:
            return self.last
        # Each window but the last one of the text has as many rows as the first one.
        number = max(-(-rows // self.facts(0).rows) - 1, 0)
        return self.facts(min(number, self.count - 1))

    def row(self, index: int) -> Tokens:
        """Return a row, ``[S]``, with the flags of ``packing``."""
        number, place = divmod(index, self.facts(0).rows)
        return self._open(number).get_slice("rows")[place]

    def restart(self) -> dict[str, Any] | None:
        """Return the ``Window.restart`` of the newest window."""
        if not self.count:
            return None
        return json.loads(self._open(self.count - 1).get_tensor("restart").tobytes())

    def write(self, window: Window) -> None:
        """Write the next window; when this function returns, it is on the disk."""
        facts = self.last.followed_by(window)
        # The state to go on from is in the same file as the rows: no kill can separate them.
        restart = np.frombuffer(json.dumps(window.restart).encode(), np.uint8)
        content = asdict(facts) | {"crc32": _crc32(window.rows, restart)}
        text = json.dumps(content | {"checksum": checksum_of(content)})
        data = save({"rows": window.rows, "restart": restart}, metadata={FACTS: text})
        with complete_file(self.path(self.count)) as path:
            path.write_bytes(data)
            # A crash of the host could otherwise leave a file without its content under the final name.
            flush_to_disk(path)
        self.count += 1

    def _opened(self, number: int) -> Any:
        """Return the file of a window, mapped into memory.

        Raises:
            ValueError: it is absent, was altered, or has other tokens.
        """
        path = self.path(number)
        remedy = f"delete {self._directory} to tokenize again"
        try:
            file = safe_open(path, framework="numpy")
            if number in self._facts:
                return file
            content = json.loads(file.metadata()[FACTS])
            recorded = content.pop("checksum")
            found = _crc32(file.get_tensor("rows"), file.get_tensor("restart"))
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is absent or was altered ({error}): {remedy}") from error
        if checksum_of(content) != recorded or content.pop("crc32") != found:
            raise ValueError(f"{path} was altered, its checksums are not the recorded ones: {remedy}")
        if content["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"{path} has fingerprint {content['fingerprint']}, this run's is {self._fingerprint}: {remedy}"
            )
        self._facts[number] = Facts(**content)
        return file


def _crc32(rows: Tokens, restart: NDArray[np.uint8]) -> int:
    return zlib.crc32(restart.tobytes(), zlib.crc32(rows.tobytes()))


class PackedSequences:
    """Packed sequences of one split, which may be written while they are read; the stream repeats them without end.

    Args:
        windows: windows of the split.
        seed: seed of the order of the second and later epochs; the first epoch has the files'
            order, which is shuffled already.
        wait: returns when so many sequences exist, or all of the text; every rank calls.
    """

    def __init__(self, windows: WindowFiles, *, seed: int, wait: Callable[[int], None]) -> None:
        wait(1)
        self.documents_per_row = 1
        """The largest number of documents in a row that was read, rounded up."""
        self._windows = windows
        self._seed = seed
        self._wait = wait
        self._order: tuple[int, NDArray[np.int64]] = (0, np.empty(0, np.int64))

    def __len__(self) -> int:
        return self._windows.last.rows

    def rows(self, positions: range) -> Tokens:
        """Return the rows at ``positions`` of the stream, ``[len(positions), S]``; wait until they exist.

        Raises:
            ValueError: a row's window was altered after it was written.
        """
        self._wait(positions.stop)
        indices = [self._row(position) for position in positions]
        # Every rank reads the same rows, so it is equal on all of them; powers of two, so that few
        # shapes of document bounds occur while the text is tokenized.
        most = max(self._windows.facts_at(index + 1).most_documents for index in indices)
        self.documents_per_row = max(self.documents_per_row, 1 << (most - 1).bit_length())
        return np.stack([self._windows.row(index) for index in indices])

    def epoch(self, position: int) -> tuple[int, int]:
        """Return the epoch of ``position``, from 0, and the sequences of an epoch that are known."""
        if not self._windows.last.ended:
            return 0, len(self)
        return position // len(self), len(self)

    def _row(self, position: int) -> int:
        """Return the row at ``position``; each epoch after the first has a permutation."""
        # The permutation is a function of seed and epoch, so a resumed run needs no data state
        # but the step. Only the last epoch's permutation is cached.
        epoch, row = divmod(position, len(self))
        if epoch == 0:
            return row
        if self._order[0] != epoch:
            generator = np.random.default_rng([self._seed, 2, epoch])
            self._order = (epoch, generator.permutation(len(self)))
        return int(self._order[1][row])


class MixedSequences:
    """Training sequences of all sources, in the order of a ``Blend``.

    Args:
        blend: says which source is next.
        open_source: returns the packed sequences of a source by its number, when it is first read.
    """

    def __init__(self, blend: Blend, open_source: Callable[[int], PackedSequences]) -> None:
        self._blend = blend
        self._open_source = open_source
        self._files: dict[int, PackedSequences] = {}

    @property
    def documents_per_row(self) -> int:
        """The largest number of documents in a row that was read."""
        return max(file.documents_per_row for file in self._files.values())

    def rows(self, positions: range) -> Tokens:
        """Return the rows at ``positions``, ``[len(positions), S]``; wait until they exist."""
        sources = self._blend.sources(positions)
        found: Tokens | None = None
        for source, indices in self._by_source(positions):
            rows = self._file(source).rows(indices)
            if found is None:
                found = np.empty((len(positions), rows.shape[1]), rows.dtype)
            found[sources == source] = rows
        assert found is not None
        return found

    def begun_epochs(self, positions: range) -> list[str]:
        """Return in words which epochs begin at ``positions``, without the first ones."""
        lines = []
        for source, indices in self._by_source(positions):
            file = self._file(source)
            epoch, length = file.epoch(indices.stop - 1)
            if epoch > max(0, file.epoch(indices.start - 1)[0]):
                of_source = f" of {self._blend.names[source]}" if len(self._blend.names) > 1 else ""
                lines.append(f"epoch {epoch + 1} of {length:,} sequences{of_source}")
        return lines

    def _by_source(self, positions: range) -> list[tuple[int, range]]:
        """Return the sources at ``positions``, each with its own sequences there."""
        # A source has read as many sequences as the positions before say. Its next ones follow in its own order, so no
        # state of it is recorded.
        before = self._blend.counts(positions.start)
        after = self._blend.counts(positions.stop)
        ranges = [range(start, stop) for start, stop in zip(before, after, strict=True)]
        return [(source, indices) for source, indices in enumerate(ranges) if indices]

    def _file(self, source: int) -> PackedSequences:
        if source not in self._files:
            self._files[source] = self._open_source(source)
        return self._files[source]
