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

WINDOW_SEQUENCES = 1024  # shuffled together: 64 stdlib files' worth at S = 1024, and 4 MiB
DOCUMENTS_PER_CALL = 32  # the fast tokenizers work on these in parallel
FORMAT_VERSION = 1


def tokens_directory(config: TrainConfig) -> Path:
    return Path(config.trainer.output_dir) / "tokens"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer that fits the model.

    Args:
        tokenizer: a Hugging Face tokenizer.
        size: V, the model's vocabulary.
        end_of_text: id that closes every document.
    """

    tokenizer: Any
    size: int
    end_of_text: int

    def __post_init__(self) -> None:
        if len(self.tokenizer) > self.size:
            raise ValueError(
                f"the tokenizer has {len(self.tokenizer)} tokens, more than the model's vocab_size {self.size}: "
                "use the model's own tokenizer, or raise vocab_size in model.config_overrides"
            )
        if not 0 <= self.end_of_text < self.size:
            raise ValueError(f"end-of-text token id {self.end_of_text} is outside [0, vocab_size {self.size})")

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids per text, each closed by ``end_of_text``."""
        encoded = self.tokenizer(texts, verbose=False, return_attention_mask=False)["input_ids"]
        closed = [ids if ids and ids[-1] == self.end_of_text else [*ids, self.end_of_text] for ids in encoded]
        largest, smallest = max(map(max, closed)), min(map(min, closed))
        if smallest < 0 or largest >= self.size:
            outside = largest if largest >= self.size else smallest
            raise ValueError(f"token id {outside} is outside [0, vocab_size {self.size}): take the model's tokenizer")
        return closed


class TokenFile:
    """The packed sequences of one split.

    Args:
        path: flat file of int32, ``[sequences, S]``.
        seq_length: S.
        seed: orders the second and later passes over the file; the first pass takes it as it is.
    """

    def __init__(self, path: Path, seq_length: int, *, seed: int = 0) -> None:
        self._tokens: Tokens = np.memmap(path, dtype=np.int32, mode="r").reshape(-1, seq_length)
        self._seed = seed
        self._order: tuple[int, NDArray[np.int64] | None] = (0, None)

    def __len__(self) -> int:
        return len(self._tokens)

    def sequences(self, positions: range) -> Tensor:
        """Token ids at ``positions`` of the endless stream, ``[len(positions), S]``."""
        rows = np.stack([self._tokens[self._row(position)] for position in positions])
        return torch.from_numpy(rows.astype(np.int64))

    def _row(self, position: int) -> int:
        epoch, row = divmod(position, len(self))
        if epoch == 0:
            return row
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self)))
        assert self._order[1] is not None
        return int(self._order[1][row])


def micro_batch_positions(config: DataConfig, *, step: int, micro_step: int, rank: int, replicas: int) -> range:
    """Stream positions of one forward pass. A step's sequences are the same for every number of data-parallel replicas.

    Args:
        step: optimizer steps done before.
        micro_step: forward passes done before in this step.
        rank: data-parallel rank, of ``replicas``.
    """
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
    """Tokenise and pack as much text as ``train_sequences`` needs, or all of it, into ``directory``.

    Files that an earlier run left there are kept where they were made from the same text, tokenizer and seed. A longer
    file starts with the shorter one's sequences, so a prolonged run goes on in the same order.
    """
    fingerprint = _fingerprint(config, documents, vocabulary, seed)
    index_file = directory / "index.json"
    wanted = {"train": train_sequences, "held_out": config.eval_sequences}
    if index_file.is_file():
        index = json.loads(index_file.read_text(encoding="utf-8"))
        if index["fingerprint"] == fingerprint and all(index["wanted"][name] >= wanted[name] for name in wanted):
            return
    directory.mkdir(parents=True, exist_ok=True)
    index_file.unlink(missing_ok=True)
    for name, parts in (("train", documents.train), ("held_out", documents.held_out)):
        if wanted[name]:
            sequences = _packed(documents, _shuffled(parts, seed), vocabulary, config)
            _write_split(directory / f"{name}.bin", _shuffled_windows(sequences, seed), wanted[name])
    index_file.write_text(json.dumps({"fingerprint": fingerprint, "wanted": wanted}), encoding="utf-8")


def read_fingerprint(directory: Path) -> str:
    """The fingerprint that ``write_tokens`` recorded."""
    index = directory / "index.json"
    if not index.is_file():
        raise ValueError(f"{index}, written by rank 0, is not visible here: use an output_dir that all hosts share")
    return json.loads(index.read_text(encoding="utf-8"))["fingerprint"]


def _fingerprint(config: DataConfig, documents: Documents, vocabulary: Vocabulary, seed: int) -> str:
    sample = vocabulary.encode(["def f(x):\n    return x + 1  # 0123456789 äöü\n"])[0]
    text = [documents.fingerprint, config.text_column, config.seq_length, seed]
    facts = [FORMAT_VERSION, *text, vocabulary.size, len(vocabulary.tokenizer), sample]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _write_split(path: Path, windows: Iterator[Tokens], wanted: int) -> None:
    written = 0
    with path.open("wb") as file:
        for window in windows:
            part = window[: wanted - written]
            file.write(np.ascontiguousarray(part).tobytes())
            written += len(part)
            if written == wanted:
                break


def _shuffled(parts: list[Part], seed: int) -> list[Part]:
    return [parts[index] for index in np.random.default_rng([seed, 0]).permutation(len(parts))]


def _shuffled_windows(sequences: Iterator[Tokens], seed: int) -> Iterator[Tokens]:
    """Collect sequences and shuffle them, ``[<= WINDOW_SEQUENCES, S]`` at a time: neighbours come from one document."""
    generator = np.random.default_rng([seed, 1])
    while window := list(itertools.islice(sequences, WINDOW_SEQUENCES)):
        yield np.stack(window)[generator.permutation(len(window))]


def _packed(documents: Documents, parts: list[Part], vocabulary: Vocabulary, config: DataConfig) -> Iterator[Tokens]:
    """Join documents and cut them into sequences of S; what remains at the end is dropped."""
    length, tokens, found = config.seq_length, 0, False
    rest: list[int] = []
    for start in range(0, len(parts), DOCUMENTS_PER_CALL):
        texts = [text for part in parts[start : start + DOCUMENTS_PER_CALL] if (text := documents.text(part)).strip()]
        for ids in vocabulary.encode(texts) if texts else ():
            tokens += len(ids)
            rest += ids
        packed = np.asarray(rest[: len(rest) // length * length], dtype=np.int32).reshape(-1, length)
        rest = rest[packed.size :]
        found = found or len(packed) > 0
        yield from packed
    if not found:
        raise ValueError(_too_short(config, tokens, len(parts)))


def _too_short(config: DataConfig, tokens: int, count: int) -> str:
    if not tokens:
        return f"dataset {config.dataset!r} is empty: none of its documents has any text"
    return (
        f"the {count} documents of a split of {config.dataset!r} have {tokens} tokens, fewer than data.seq_length "
        f"{config.seq_length}: shorten data.seq_length, give it more text, or set data.eval_sequences to 0"
    )
