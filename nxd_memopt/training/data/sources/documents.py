"""Reads all documents of a small corpus, and splits them into training and held-out."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from dataclasses import dataclass

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.rows import Place, RowReader, Shard
from nxd_memopt.training.data.sources.shards import find_shards

SPOOL_BYTES = 2**26  # 64 MiB of text in memory; a longer one is in a temporary file


@dataclass(frozen=True)
class Part:
    """Range of one document, from ``start`` to ``stop`` as fractions of its characters."""

    index: int
    start: float = 0.0
    stop: float = 1.0


@dataclass(frozen=True)
class Documents:
    """Training and held-out documents, read one at a time.

    Args:
        texts: the text of each document.
        train: parts of documents for training.
        held_out: parts of documents for evaluation.
        fingerprint: hash that changes if the documents or the split change.
    """

    texts: StoredTexts
    train: list[Part]
    held_out: list[Part]
    fingerprint: str

    @property
    def are_cut(self) -> bool:
        """Whether the end of each document is held out, not some documents."""
        return any(part.start for part in self.held_out)

    def text(self, part: Part) -> str:
        """Return the text of ``part``."""
        text = self.texts.read(part.index)
        return text[int(part.start * len(text)) : int(part.stop * len(text))]


class StoredTexts:
    """Texts that are written one after another and read in any order, with their places."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 (removed with its last reader)
        self._bounds = array("q", [0])
        self._shards: list[Shard] = []
        self._positions = array("q")

    def __len__(self) -> int:
        return len(self._shards)

    def add(self, text: str, shard: Shard, position: int) -> None:
        """Write the next text."""
        # A file that is read in between would not be written at its end.
        self._file.seek(self._bounds[-1])
        self._bounds.append(self._bounds[-1] + self._file.write(text.encode()))
        self._shards.append(shard)
        self._positions.append(position)

    def read(self, index: int) -> str:
        """Return a text by its number."""
        begin, end = self._bounds[index], self._bounds[index + 1]
        self._file.seek(begin)
        return self._file.read(end - begin).decode()

    def place(self, index: int) -> Place:
        """Return where a text is in the data."""
        return Place(self._shards[index], self._positions[index])


def open_documents(config: DataConfig) -> Documents:
    """Read and split the documents of ``config.source``: JSON lines at about 100 MB a second.

    Raises:
        ValueError: for a missing file, column, dataset or split, for an empty dataset, and for a
            row without text unless ``config.on_bad_rows`` is ``skip``.
    """
    reader, texts = RowReader(config), StoredTexts()
    digests: list[str] = []
    for shard in find_shards(config, reader, streamed=False):
        for text, position in shard.read(0):
            texts.add(text, shard, position)
            digests.append(text_digest(text))
    if bad := reader.bad_rows.counts.total():
        skipped = f"{bad:,} of the {bad + len(digests):,} rows of {config.source!r} ({reader.bad_rows})"
        if not digests:
            raise ValueError(f"data.on_bad_rows skip leaves no row: {skipped}")
        print(f"data.on_bad_rows skip: left out {skipped}", flush=True)
    if not digests:
        raise ValueError(f"dataset {config.source!r} is empty: it has no documents")
    train, held_out = split_documents(digests, config.split_every, can_cut=not config.has_conversations)
    if not train:
        raise ValueError(
            f"dataset {config.source!r} contains {len(digests)} copies of one conversation, and the held-out "
            "set needs a different one: add others"
        )
    # The text of each document, and nothing else: moved or copied data is the same data.
    # A small corpus is read completely, so its content is hashed. Of a large one the files are identified instead.
    facts = [str(config.held_out_every), *digests]
    fingerprint = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return Documents(texts, train, held_out, fingerprint)


def split_documents(digests: list[str], held_out_every: int, *, can_cut: bool = True) -> tuple[list[Part], list[Part]]:
    """Return the training parts and the held-out parts.

    With at least ``held_out_every`` documents, each document is in one split, chosen by its text
    alone: copies of a document are in the same split, and a document stays in its split when others
    are added. With fewer, or if that leaves a split empty, each document is cut; of documents that
    cannot be cut, the one with the smallest hash is held out, with its copies.

    Args:
        digests: ``text_digest`` of each document.
        held_out_every: about one document in this many is held out; 0 for none.
        can_cut: whether a part of a document is a document.
    """
    is_out = [is_digest_held_out(digest, held_out_every) for digest in digests]
    # With few documents, by hash all may be in one split.
    is_one_sided = held_out_every > 0 and len(set(is_out)) == 1
    if can_cut and (is_one_sided or len(digests) < held_out_every):
        cut = 1 - 1 / held_out_every
        indices = range(len(digests))
        return [Part(index, stop=cut) for index in indices], [Part(index, start=cut) for index in indices]
    if is_one_sided:
        smallest = min(digests)
        is_out = [digest == smallest for digest in digests]
    train: list[Part] = []
    held_out: list[Part] = []
    for index, is_held_out in enumerate(is_out):
        if is_held_out:
            held_out.append(Part(index))
        else:
            train.append(Part(index))
    return train, held_out


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def is_digest_held_out(digest: str, held_out_every: int) -> bool:
    """Return whether a document with this SHA-256 is held out: about one in ``held_out_every``, none for 0."""
    return held_out_every > 0 and int(digest[:16], 16) % held_out_every == 0
