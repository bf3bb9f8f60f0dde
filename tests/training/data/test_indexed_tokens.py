"""Tokens in Megatron-LM's format: documents, order, split, and what damaged files lead to."""

from __future__ import annotations

import struct
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.data.sources.indexed_tokens import IndexedTokens
from tests.training.packed_tokens import rows_of, vocabulary, write
from tests.training.runs import END, LINES

DOCUMENTS = [[*line.encode()] for line in LINES]


def write_indexed(path: Path, documents: list[list[list[int]]], dtype: Any = np.uint16, code: int = 8) -> Path:
    """Write documents of several sequences each, in the format of Megatron-LM's writer."""
    sequences = [sequence for document in documents for sequence in document]
    data = [np.array(sequence, dtype) for sequence in sequences]
    path.with_suffix(".bin").write_bytes(b"".join(each.tobytes() for each in data))
    sizes = [each.nbytes for each in data]
    places = np.cumsum([0, *sizes[:-1]])
    bounds = np.cumsum([0, *(len(document) for document in documents)])
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(bounds))
    index += np.array([len(each) for each in sequences], np.int32).tobytes()
    index += places.astype(np.int64).tobytes() + bounds.astype(np.int64).tobytes()
    path.with_suffix(".idx").write_bytes(index)
    return path.with_suffix(".idx")


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4)])
def test_documents_are_read_with_all_of_their_sequences(tmp_path: Path, dtype: Any, code: int) -> None:
    documents = [[[1, 2, 3], [4]], [[5, 60000 if dtype != np.int32 else 70000]], [], [[7], [8], [9, 10]]]
    tokens = IndexedTokens(write_indexed(tmp_path / "d", documents, dtype, code))
    found = [tokens[index].tolist() for index in range(len(tokens))]
    assert found == [[*chain.from_iterable(document)] for document in documents]


def test_both_splits_have_each_document_once_and_go_on(tmp_path: Path) -> None:
    path = write_indexed(tmp_path / "d", [[document] for document in [*DOCUMENTS, *DOCUMENTS]])
    corpus = open_corpus(DataConfig(dataset=str(path)), 3)
    splits = [
        [(ids.tolist(), position) for ids, position, _ in each.read(None)] for each in (corpus.train, corpus.held_out)
    ]
    train, held_out = ([ids for ids, _ in split] for split in splits)
    assert sorted(train + held_out) == sorted(2 * DOCUMENTS) and train and held_out
    assert not {str(ids) for ids in train} & {str(ids) for ids in held_out}
    for number, (_, position) in enumerate(splits[0], start=1):
        assert [ids.tolist() for ids, *_ in corpus.train.read(position)] == train[number:]
    assert train != [ids.tolist() for ids, *_ in open_corpus(DataConfig(dataset=str(path)), 4).train.read(None)]


def test_few_documents_are_cut(tmp_path: Path) -> None:
    path = write_indexed(tmp_path / "d", [[[*range(10, 30)]], [[*range(40, 50)]]])
    corpus = open_corpus(DataConfig(dataset=str(path), held_out_every=5), 3)
    train, held_out = (sorted(ids.tolist() for ids, *_ in each.read(None)) for each in (corpus.train, corpus.held_out))
    assert train == [[*range(10, 26)], [*range(40, 48)]] and held_out == [[*range(26, 30)], [48, 49]]
    assert "the last 1/5 of each document is held out" in corpus.notes[1]


def test_documents_end_with_the_end_of_text_once(tmp_path: Path) -> None:
    path = write_indexed(tmp_path / "d", [[[*ids, END] if i % 2 else ids] for i, ids in enumerate(DOCUMENTS)])
    config = DataConfig(dataset=str(path), seq_length=16, eval_sequences=0)
    corpus = open_corpus(config, 0)
    directory = write(tmp_path / "tokens", config, corpus, sequences=10**6)
    rows = np.array(rows_of(directory))
    count = sum(1 for _ in corpus.train.read(None))
    ends = np.count_nonzero((rows & (2**29 - 1)) == END)
    assert count - 1 <= ends <= count
    with pytest.raises(ValueError, match=r"token id 300 is outside \[0, vocab_size 257\)"):
        vocabulary().terminated(np.array([1, 300], np.int32))


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.with_suffix(".bin").unlink(), r"d\.bin is missing: name the \.idx file"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"MMIDIDX", b"TNTIDX\0")), "is not an index"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:17] + b"\x07" + path.read_bytes()[18:]),
            "with an integer dtype",
        ),
        (lambda path: cut(path, 8), r"d\.idx has \d+ bytes, its header says"),
        (lambda path: cut(path.with_suffix(".bin"), 2), r"d\.bin has \d+ bytes, .*d\.idx names"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8] + b"\1" + bytes(7)), "do not cover its 200 sequences"),
        (lambda path: path.write_bytes(path.read_bytes() + bytes(200)), "has modes of sequences"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Any, message: str) -> None:
    path = write_indexed(tmp_path / "d", [[document] for document in DOCUMENTS])
    damage(path)
    with pytest.raises(ValueError, match=message):
        open_corpus(DataConfig(dataset=str(path)), 0)
