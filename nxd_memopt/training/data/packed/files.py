"""The directory of a run's packed tokens: its name, its index, and the sequences that ranks read from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxd_memopt.checkpoint.sharded.index import read_checked_json, write_json
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.packed.log import TokenLog
from nxd_memopt.training.data.packing import Tokens
from nxd_memopt.training.data.sources.corpora import WINDOW_SEQUENCES
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.data.tokenize.windows import described, window_sequences

FORMAT = "nxd_memopt packed tokens"
FORMAT_VERSION = 5
CONVERSATIONS_VERSION = 2  # of the rules by which a row becomes tokens
INDEX = "index.json"
# Code, digits and letters outside of ASCII: what tokenizers treat differently.
SAMPLE = "def f(x):\n    return x + 1  # 0123456789 äöü\n"


def directory_of(parent: Path, fingerprint: str) -> Path:
    """Return the directory below ``parent`` of the packed tokens with ``fingerprint``."""
    return parent / fingerprint[:16]


def tokens_fingerprint(config: DataConfig, corpus_fingerprint: str, vocabulary: Vocabulary, seed: int) -> str:
    """Return a hash of everything that the packed tokens depend on."""
    text = [
        corpus_fingerprint,
        config.seq_length,
        config.packing,
        seed,
        window_sequences(config.seq_length, WINDOW_SEQUENCES),
    ]
    if config.has_conversations:
        text += [config.format, config.train_on_input, config.long_conversations, vocabulary.tokenizer.chat_template]
        text.append(CONVERSATIONS_VERSION)
    facts = [FORMAT_VERSION, *text, vocabulary.size, vocabulary.end_of_text, _tokenizer_facts(vocabulary)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def create_directory(directory: Path, fingerprint: str) -> None:
    """Create the directory of packed tokens if it is absent, with its index.

    Raises:
        ValueError: the path is of something else, or of other tokens.
        OSError: it cannot be written.
    """
    # A process may have been killed while it wrote the index, the first file.
    remainder = f"{INDEX}.incomplete"
    is_empty = directory.is_dir() and all(path.name == remainder for path in directory.iterdir())
    if is_empty or not directory.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / INDEX, {"format": FORMAT, "version": FORMAT_VERSION, "fingerprint": fingerprint})
    require_directory(directory, fingerprint)


def require_directory(directory: Path, fingerprint: str) -> None:
    """Check the index of a directory of packed tokens.

    Raises:
        ValueError: the directory is not visible on this host, its index is damaged, or it has
            another format or fingerprint.
    """
    path = directory / INDEX
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, and the tokens are in a directory of this name: delete it")
    if not directory.is_dir():
        raise ValueError(f"{directory}, written by rank 0, is not visible here: use an output_dir that all hosts share")
    remedy = f"delete {directory} to tokenize again"
    try:
        index = read_checked_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; or {remedy}") from error
    if (index.get("format"), index.get("version")) != (FORMAT, FORMAT_VERSION):
        found = f"{index.get('format')!r}, version {index.get('version')!r}"
        raise ValueError(f"{path} has format {found}, not {FORMAT!r}, version {FORMAT_VERSION}: {remedy}")
    if index["fingerprint"] != fingerprint:
        raise ValueError(f"{path} has fingerprint {index['fingerprint']}, this run's is {fingerprint}: {remedy}")


class TokenFile:
    """Packed sequences of one split, memory-mapped.

    Args:
        path: flat file of int32 token ids with the flags of ``packing``, ``[sequences, S]``.
        seq_length: S, tokens per sequence.
        documents_per_row: the largest number of documents in a row.
        seed: seed of the order of the second and later epochs; the first epoch has the file's
            order, which is shuffled already.
        count: sequences of the file that are complete; None stands for all.
    """

    def __init__(
        self, path: Path, seq_length: int, *, documents_per_row: int, seed: int = 0, count: int | None = None
    ) -> None:
        self._path = path
        self._seq_length = seq_length
        self._tokens = self._mapped(count)
        self.documents_per_row = documents_per_row
        self._seed = seed
        self._order: tuple[int, NDArray[np.int64] | None] = (0, None)

    def __len__(self) -> int:
        return len(self._tokens)

    def _mapped(self, count: int | None) -> Tokens:
        """Return the first ``count`` rows."""
        # Memory-mapped: ranks of a host share the page cache, and a step reads its rows only.
        shape = None if count is None else (count * self._seq_length,)
        return np.memmap(self._path, dtype=np.int32, mode="r", shape=shape).reshape(-1, self._seq_length)

    def rows(self, positions: range) -> Tokens:
        """Return the rows at ``positions`` of the stream, ``[len(positions), S]``, with their flags.

        The stream repeats the file without end.
        """
        return np.stack([self._tokens[self._row(position)] for position in positions])

    def _row(self, position: int) -> int:
        """Return the file's row at ``position``; each epoch after the first has a permutation."""
        # The permutation is a function of seed and epoch, so a resumed run needs no data state
        # but the step. Only the last epoch's permutation is cached.
        epoch, row = divmod(position, len(self))
        if epoch == 0:
            return row
        if self._order[0] != epoch:
            generator = np.random.default_rng([self._seed, 2, epoch])
            self._order = (epoch, generator.permutation(len(self)))
        assert self._order[1] is not None
        return int(self._order[1][row])


class GrowingTokenFile(TokenFile):
    """Packed sequences of one split that another process is writing; each window is checked when it is first read.

    Args:
        log: log of the split.
        seq_length: S.
        seed: seed of the order of the second and later epochs.
        wait: returns when the log has so many sequences, or all of the text; every rank calls.
    """

    def __init__(self, log: TokenLog, seq_length: int, *, seed: int, wait: Callable[[int], None]) -> None:
        wait(1)
        super().__init__(log.bin, seq_length, documents_per_row=1, seed=seed, count=log.last.rows)
        self._log = log
        self._wait = wait
        self._checked: set[int] = set()

    def rows(self, positions: range) -> Tokens:
        """Return the rows at ``positions``; wait until they exist.

        Raises:
            ValueError: a row's window was altered after it was written.
        """
        self._wait(positions.stop)
        # Bytes after the complete rows are being written.
        if len(self) != self._log.last.rows:
            self._tokens = self._mapped(self._log.last.rows)
        for row in {self._row(position) for position in positions}:
            self._check(row)
        return super().rows(positions)

    def epoch(self, position: int) -> tuple[int, int]:
        """Return the epoch of ``position``, from 0, and the sequences of an epoch that are known."""
        if not self._log.last.ended:
            return 0, len(self)
        return position // len(self), len(self)

    def _check(self, row: int) -> None:
        """Compare the window of a row with its CRC-32, once; raise the number of documents in a row to its."""
        index = self._log.entry_at(row)
        if index not in self._checked:
            window = self._log.window(index)
            self._log.require_intact(index, self._tokens[window.start : window.stop])
            self._checked.add(index)
            # Every rank reads the same rows, so it is equal on all of them; powers of two, so that
            # few shapes of document bounds occur while the file grows.
            most = self._log.entries[index].most_documents
            self.documents_per_row = max(self.documents_per_row, 1 << (most - 1).bit_length())


def describe_rows(config: TrainConfig, log: TokenLog, read: int) -> list[str]:
    """Return the start report's lines about the rows of training that exist, of which the run reads ``read``."""
    last = log.last
    if not last.rows:
        return []
    share = last.not_trained / (last.rows * config.data.seq_length)
    documents = f"at most {last.most_documents} documents in a row"
    lines = [f"packing {config.data.packing}: {documents}, {share:.2%} of the tokens are padding or not trained"]
    if config.data.has_conversations:
        lines.append(f"conversations: {last.documents:,} read so far, of which {described(last.outcomes)}")
    steps = f"{config.trainer.max_steps:,} steps read {read:,}"
    if last.ended:
        lines.append(f"data: the text has {last.rows:,} sequences, of which {steps}: {read / last.rows:.1f} epochs")
    elif read > last.rows:
        lines.append(f"data: {last.rows:,} sequences are tokenized, {steps}: a process tokenizes while the run trains")
    return lines


def _tokenizer_facts(vocabulary: Vocabulary) -> list[Any]:
    """Return, as JSON values, what the encoding of a text depends on."""
    tokenizer = vocabulary.tokenizer
    # The sample covers what Python code of a tokenizer does in addition. It comes first: encoding
    # resets the truncation and padding of a fast tokenizer, which its serialization contains.
    facts: list[Any] = [vocabulary.encode([SAMPLE])[0], len(tokenizer)]
    facts.append(sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items()))
    # A fast tokenizer serializes completely: normalizer, vocabulary, merges, template. Of a slow
    # one the vocabulary is known.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        facts.append(hashlib.sha256(backend.to_str().encode()).hexdigest())
    else:
        vocabulary_text = json.dumps(sorted(tokenizer.get_vocab().items()))
        facts.append(hashlib.sha256(vocabulary_text.encode()).hexdigest())
    return facts
