"""Packs token ids into sequences of one length: written once by one process to a flat file, read by every rank."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nxd_memopt.training.config import DataConfig, TrainConfig
from nxd_memopt.training.documents import Documents, Part

Tokens = NDArray[np.int32]

# Sequences shuffled together. At S = 1024 a window has 1024 * 1024 * 4 bytes = 4 MiB and the text
# of about 64 standard library files.
WINDOW_SEQUENCES = 1024
DOCUMENTS_PER_CALL = 32  # documents that a fast tokenizer encodes in parallel
FORMAT_VERSION = 1


def tokens_directory(config: TrainConfig) -> Path:
    """Return the directory of the run's packed tokens."""
    return Path(config.trainer.output_dir) / "tokens"


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer that fits the model.

    Args:
        tokenizer: Hugging Face tokenizer.
        size: V, the model's vocabulary size.
        end_of_text: id of the token that ends every document.

    Raises:
        ValueError: the tokenizer has more than V tokens, or ``end_of_text`` is outside [0, V).
    """

    tokenizer: Any
    size: int
    end_of_text: int

    def __post_init__(self) -> None:
        if len(self.tokenizer) > self.size:
            raise ValueError(
                f"the tokenizer has {len(self.tokenizer)} tokens, more than the model's "
                f"vocab_size {self.size}: use the model's own tokenizer, or raise vocab_size in "
                "model.config_overrides"
            )
        if not 0 <= self.end_of_text < self.size:
            raise ValueError(f"end-of-text token id {self.end_of_text} is outside [0, vocab_size {self.size})")

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, each ending with ``end_of_text``.

        Raises:
            ValueError: a token id is outside [0, V).
        """
        # Checked for every token: an id outside the embedding is a device-side assertion on CUDA.
        encoded = self.tokenizer(texts, verbose=False, return_attention_mask=False)["input_ids"]
        # Some tokenizers add the end-of-text token themselves: a second one would mark an empty
        # document.
        terminated = []
        for ids in encoded:
            ends = bool(ids) and ids[-1] == self.end_of_text
            terminated.append(ids if ends else [*ids, self.end_of_text])
        largest = max(map(max, terminated))
        smallest = min(map(min, terminated))
        outside = None
        if largest >= self.size:
            outside = largest
        elif smallest < 0:
            outside = smallest
        if outside is not None:
            raise ValueError(f"token id {outside} is outside [0, vocab_size {self.size}): take the model's tokenizer")
        return terminated


class TokenFile:
    """Packed sequences of one split, memory-mapped.

    Args:
        path: flat file of int32 token ids, ``[sequences, S]``.
        seq_length: S, tokens per sequence.
        seed: seed of the order of the second and later epochs; the first epoch has the file's
            order, which is shuffled already.
    """

    def __init__(self, path: Path, seq_length: int, *, seed: int = 0) -> None:
        # Memory-mapped: ranks of a host share the page cache, and a step reads its rows only.
        self._tokens: Tokens = np.memmap(path, dtype=np.int32, mode="r").reshape(-1, seq_length)
        self._seed = seed
        self._order: tuple[int, NDArray[np.int64] | None] = (0, None)

    def __len__(self) -> int:
        return len(self._tokens)

    def sequences(self, positions: range) -> Tensor:
        """Return the token ids at ``positions`` of the stream, ``[len(positions), S]``, int64.

        The stream repeats the file without end.
        """
        rows = np.stack([self._tokens[self._row(position)] for position in positions])
        return torch.from_numpy(rows.astype(np.int64))

    def _row(self, position: int) -> int:
        """Return the file's row at ``position``; each epoch after the first has a permutation."""
        # The permutation is a function of seed and epoch, so a resumed run needs no data state
        # but the step. Only the last epoch's permutation is cached.
        epoch, row = divmod(position, len(self))
        if epoch == 0:
            return row
        if self._order[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._order = (epoch, generator.permutation(len(self)))
        assert self._order[1] is not None
        return int(self._order[1][row])


def micro_batch_positions(
    config: DataConfig,
    *,
    step: int,
    micro_step: int,
    rank: int,
    replicas: int,
) -> range:
    """Return the stream positions of one forward pass.

    A step has the same global batch for every number of data-parallel replicas D: micro-step m of
    rank r has the sequences [(m * D + r) * B, (m * D + r + 1) * B) of the step.

    Args:
        config: sizes of the micro-batch B and of the global batch.
        step: optimizer steps done before.
        micro_step: forward passes done before in this step.
        rank: data-parallel rank.
        replicas: D, the number of data-parallel ranks.
    """
    # Micro-steps are outermost, so changing D or B reorders micro-batches within a step only.
    first = step * config.global_batch_size + (micro_step * replicas + rank) * config.micro_batch_size
    return range(first, first + config.micro_batch_size)


def write_tokens(
    directory: Path,
    config: DataConfig,
    *,
    documents: Documents,
    vocabulary: Vocabulary,
    train_sequences: int,
    seed: int,
) -> None:
    """Tokenize and pack documents into ``directory``, until ``train_sequences`` or the text's end.

    Files of an earlier run are reused if they have the same text, tokenizer and seed and enough
    sequences. A longer file starts with the sequences of a shorter one, so a run that is extended
    continues in the same order.

    Args:
        directory: where ``train.bin``, ``held_out.bin`` and ``index.json`` are written.
        config: S, the number of held-out sequences and the text column.
        documents: training and held-out text.
        vocabulary: tokenizer, checked against the model.
        train_sequences: sequences of S tokens that training reads.
        seed: seed of the order of documents and sequences.

    Raises:
        ValueError: a split has fewer than S tokens.
    """
    fingerprint = _fingerprint(config, documents, vocabulary, seed)
    index_file = directory / "index.json"
    wanted = {"train": train_sequences, "held_out": config.eval_sequences}
    # The requested numbers are compared, not the sequences in the files: a text that ended early
    # has fewer, and tokenizing it again would not give more.
    if index_file.is_file():
        index = json.loads(index_file.read_text(encoding="utf-8"))
        has_enough = all(index["wanted"][name] >= wanted[name] for name in wanted)
        if index["fingerprint"] == fingerprint and has_enough:
            return
    directory.mkdir(parents=True, exist_ok=True)
    # The index is removed first and written last: an interrupted run leaves no index, so its
    # partial files are not reused.
    index_file.unlink(missing_ok=True)
    for name, parts in (("train", documents.train), ("held_out", documents.held_out)):
        if wanted[name]:
            sequences = _packed(documents, _shuffled(parts, seed), vocabulary, config)
            _write_split(directory / f"{name}.bin", _shuffled_windows(sequences, seed), wanted[name])
    index_file.write_text(json.dumps({"fingerprint": fingerprint, "wanted": wanted}), encoding="utf-8")


def read_fingerprint(directory: Path) -> str:
    """Return the fingerprint that ``write_tokens`` recorded.

    Raises:
        ValueError: the file is not visible on this host.
    """
    index = directory / "index.json"
    if not index.is_file():
        raise ValueError(f"{index}, written by rank 0, is not visible here: use an output_dir that all hosts share")
    return json.loads(index.read_text(encoding="utf-8"))["fingerprint"]


def _fingerprint(config: DataConfig, documents: Documents, vocabulary: Vocabulary, seed: int) -> str:
    """Return a hash of everything that the packed tokens depend on."""
    # Tokenizers have no portable hash: the encoding of a sample with code, digits and non-ASCII
    # letters stands for the tokenizer.
    sample = vocabulary.encode(["def f(x):\n    return x + 1  # 0123456789 äöü\n"])[0]
    text = [documents.fingerprint, config.text_column, config.seq_length, seed]
    facts = [FORMAT_VERSION, *text, vocabulary.size, len(vocabulary.tokenizer), sample]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _write_split(path: Path, windows: Iterator[Tokens], wanted: int) -> None:
    """Write at most ``wanted`` sequences of ``windows`` to ``path``."""
    written = 0
    with path.open("wb") as file:
        for window in windows:
            rows = window[: wanted - written]
            file.write(np.ascontiguousarray(rows).tobytes())
            written += len(rows)
            if written == wanted:
                break


def _shuffled(parts: list[Part], seed: int) -> list[Part]:
    """Return ``parts`` in an order that depends on ``seed`` and their number."""
    # [seed, 0] orders documents, [seed, 1] the sequences of each window.
    return [parts[index] for index in np.random.default_rng([seed, 0]).permutation(len(parts))]


def _shuffled_windows(sequences: Iterator[Tokens], seed: int) -> Iterator[Tokens]:
    """Yield windows of shuffled sequences, ``[<= WINDOW_SEQUENCES, S]``.

    Neighbouring sequences come from one document; shuffling spreads them over a window.
    """
    generator = np.random.default_rng([seed, 1])
    while window := list(itertools.islice(sequences, WINDOW_SEQUENCES)):
        yield np.stack(window)[generator.permutation(len(window))]


def _packed(documents: Documents, parts: list[Part], vocabulary: Vocabulary, config: DataConfig) -> Iterator[Tokens]:
    """Yield sequences ``[S]`` of the concatenated documents; a remainder below S tokens is dropped.

    Raises:
        ValueError: the documents have fewer than S tokens.
    """
    # ``rest`` carries fewer than S tokens from one call of the tokenizer to the next, so memory
    # is bounded by DOCUMENTS_PER_CALL documents.
    length = config.seq_length
    tokens = 0
    found = False
    rest: list[int] = []
    for start in range(0, len(parts), DOCUMENTS_PER_CALL):
        texts = [documents.text(part) for part in parts[start : start + DOCUMENTS_PER_CALL]]
        # Empty documents are left out: each would add nothing but an end-of-text token.
        texts = [text for text in texts if text.strip()]
        if texts:
            for ids in vocabulary.encode(texts):
                tokens += len(ids)
                rest += ids
        packed = np.asarray(rest[: len(rest) // length * length], dtype=np.int32).reshape(-1, length)
        # [packed sequences, S]; the tokens after the last complete sequence stay in ``rest``.
        rest = rest[packed.size :]
        found = found or len(packed) > 0
        yield from packed
    if not found:
        raise ValueError(_too_short(config, tokens, len(parts)))


def _too_short(config: DataConfig, tokens: int, count: int) -> str:
    """Return the message for a split that has no complete sequence."""
    if not tokens:
        return f"dataset {config.dataset!r} is empty: none of its documents has any text"
    return (
        f"the {count} documents of a split of {config.dataset!r} have {tokens} tokens, fewer "
        f"than data.seq_length {config.seq_length}: shorten data.seq_length, give it more text, "
        "or set data.eval_sequences to 0"
    )
