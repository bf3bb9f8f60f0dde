"""Helpers for tests of packed tokens: documents of a list of texts, their tokens on disk, and reading them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packed.fingerprint import directory_of, tokens_fingerprint
from nxd_memopt.training.data.packed.run_tokens import RunTokens
from nxd_memopt.training.data.packed.sequences import FACTS, PackedSequences, WindowFiles
from nxd_memopt.training.data.packed.writer import Progress, TokenJob, write_tokens
from nxd_memopt.training.data.packing import Tokens
from nxd_memopt.training.data.sources.corpora import Corpus, PermutedDocuments
from nxd_memopt.training.data.sources.documents import Documents, StoredTexts, split_documents, text_digest
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from tests.training.runs import END, byte_tokenizer


def vocabulary() -> Vocabulary:
    return Vocabulary(byte_tokenizer(), 257, END)


def documents(texts: list[str], held_out_every: int = 20) -> Documents:
    train, held_out = split_documents([text_digest(text) for text in texts], held_out_every)
    stored, shard = StoredTexts(), ListedTexts(texts)
    for number, text in enumerate(texts, start=1):
        stored.add(text, shard, number)
    return Documents(stored, train, held_out, fingerprint="test")


def corpus_of(opened: Documents, seed: int = 0) -> Corpus:
    return Corpus(
        PermutedDocuments(opened, opened.train, seed),
        PermutedDocuments(opened, opened.held_out, seed),
        opened.fingerprint,
    )


def write(
    parent: Path,
    config: DataConfig,
    corpus: Corpus,
    *,
    sequences: int,
    seed: int = 0,
    words: Vocabulary | None = None,
    pauses: Callable[[Progress], bool] = lambda progress: False,
) -> Path:
    """Write packed tokens as rank 0 does; return their directory."""
    words = words or vocabulary()
    fingerprint = tokens_fingerprint(config, corpus.fingerprint, words, seed)
    directory = directory_of(parent, fingerprint)
    directory.mkdir(parents=True, exist_ok=True)
    wanted: Mapping[str, int] = {"train": sequences, "held_out": config.eval_sequences}
    write_tokens(TokenJob(directory, fingerprint, corpus.fingerprint, config, words, seed, wanted), corpus, pauses)
    return directory


def windows_of(directory: Path, name: str = "train") -> WindowFiles:
    """The windows of a split that are written."""
    first = directory / f"{name}.000000.safetensors"
    fingerprint = ""
    if first.exists():
        with safe_open(first, framework="numpy") as file:
            fingerprint = json.loads(file.metadata()[FACTS])["fingerprint"]
    windows = WindowFiles(directory, name, fingerprint)
    windows.count = windows.written()
    return windows


def open_split(directory: Path, name: str = "train", seed: int = 0) -> PackedSequences:
    """The sequences of a split that are written."""
    return PackedSequences(windows_of(directory, name), seed=seed, wait=lambda rows: None)


def recorded_held_out(monkeypatch: pytest.MonkeyPatch) -> list[Tokens]:
    """A list that gets the rows of each evaluation."""
    evaluated: list[Tokens] = []
    held_out = RunTokens.held_out_sequences

    def record(tokens: RunTokens, sequences: int) -> Tokens:
        evaluated.append(held_out(tokens, sequences))
        return evaluated[-1]

    monkeypatch.setattr(RunTokens, "held_out_sequences", record)
    return evaluated


def rows_of(directory: Path, name: str = "train") -> list[list[int]]:
    """The rows of a split, with their flags."""
    windows = windows_of(directory, name)
    return [windows.row(index).tolist() for index in range(windows.last.rows)]


class ListedTexts:
    """A shard of texts in a list."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    @property
    def identity(self) -> list[Any]:
        return [text_digest(text) for text in self.texts]

    def read(self, start: int) -> Iterator[tuple[str, int]]:
        for index in range(start, len(self.texts)):
            yield self.texts[index], index + 1

    def place_of(self, position: int) -> str:
        return f"text {position}"

    def share_of(self, position: int) -> float:
        return position / len(self.texts)
