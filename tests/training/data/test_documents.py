"""Tests the training script's data: sources, the held-out split, packing, order, and what a user gets wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.micro_batches import micro_batch_rows
from nxd_memopt.training.data.packed.sequences import PackedSequences, WindowFiles
from nxd_memopt.training.data.packing import ID_MASK
from nxd_memopt.training.data.sources.documents import Part, open_documents, split_documents, text_digest
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.data.tokenize.windows import Window
from tests.training.packed_tokens import corpus_of, documents, open_split, write
from tests.training.runs import END, LINES, byte_tokenizer


def prepare(directory: Path, config: DataConfig, texts: list[str], sequences: int, seed: int = 0) -> PackedSequences:
    written = write(directory, config, corpus_of(documents(texts), seed), sequences=sequences, seed=seed)
    return open_split(written, seed=seed)


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "d.jsonl"
    path.write_text(
        "".join(json.dumps({"id": i, "body": line}) + "\n" for i, line in enumerate(LINES)), encoding="utf-8"
    )
    return path


def test_stdlib_is_stable_and_split_by_file() -> None:
    first, second = open_documents(DataConfig("stdlib")), open_documents(DataConfig("stdlib"))
    assert first.fingerprint == second.fingerprint
    assert first.train == second.train and first.held_out == second.held_out
    held_out_fraction = len(first.held_out) / (len(first.train) + len(first.held_out))
    assert 0.02 < held_out_fraction < 0.09  # one in 20 of some 800 files, chosen by hash
    assert not {part.index for part in first.train} & {part.index for part in first.held_out}
    assert len(first.text(first.train[0])) > 0


def test_text_file_is_one_document_whose_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("\n".join(LINES), encoding="utf-8")
    opened = open_documents(DataConfig(dataset=str(tmp_path / "d.txt"), held_out_every=10))
    train, held_out = opened.text(opened.train[0]), opened.text(opened.held_out[0])
    assert train + held_out == "\n".join(LINES)
    assert len(held_out) == pytest.approx(len(train) / 9, abs=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "absent/file.jsonl"}, f"'absent/file.jsonl' cannot be read: no such file.* in {Path.cwd()}$"),
        # The datasets library asks the hub several times.
        pytest.param(
            {"dataset": "absent/files"},
            f"name local files, which are looked for in {Path.cwd()}$",
            marks=pytest.mark.slow,
        ),
        ({"dataset": "./absent"}, "no such file"),
        ({"columns": {}}, r"line 1 has no 'text' .*: its columns are \['id', 'body'\]"),
    ],
)
def test_source_errors(jsonl: Path, changes: dict[str, Any], message: str) -> None:
    config = DataConfig(**{"dataset": str(jsonl), "columns": {"text": "body"}, **changes})
    with pytest.raises(ValueError, match=message):
        open_documents(config).texts.read(0)


def test_documents_are_closed_by_end_of_text_and_packed_without_loss(tmp_path: Path) -> None:
    config = DataConfig(seq_length=16, eval_sequences=0)
    file = prepare(tmp_path, config, LINES, 10**6)
    train = documents(LINES).train
    expected = sum(len(LINES[part.index].encode()) + 1 for part in train)
    assert len(file) == expected // 16
    packed = file.rows(range(len(file))) & ID_MASK
    assert packed.shape == (len(file), 16) and packed.dtype == np.int32
    assert len(train) - 1 <= (packed == END).sum() <= len(train)  # the last one may be in the dropped rest


def numbered(directory: Path, count: int) -> PackedSequences:
    """``count`` sequences of two numbers, in windows of 5."""
    directory.mkdir(exist_ok=True)
    windows = WindowFiles(directory, "train", "f")
    rows = np.arange(count * 2, dtype=np.int32).reshape(count, 2)
    for start in range(0, count, 5):
        windows.write(Window(rows[start : start + 5], {}, 0, ended=start + 5 >= count))
    return PackedSequences(windows, seed=5, wait=lambda rows: None)


def test_a_resumed_run_reads_the_same_rows_of_every_pass(tmp_path: Path) -> None:
    whole = numbered(tmp_path, 7)
    expected = whole.rows(range(35)).tolist()
    passes = [expected[first : first + 7] for first in range(0, 35, 7)]
    assert len({str(each) for each in passes}) == 5
    assert all(sorted(each) == passes[0] for each in passes)
    for start in (3, 9, 16, 30):
        file = numbered(tmp_path / str(start), 7)
        assert file.rows(range(start, 35)).tolist() == expected[start:]


def test_ranks_read_disjoint_sequences_of_one_order() -> None:
    config = DataConfig(micro_batch_size=2, global_batch_size=12)
    for replicas in (1, 2, 3):
        accumulation = 12 // (2 * replicas)
        seen = [
            row
            for i in range(accumulation)
            for rank in range(replicas)
            for row in list(range(12))[micro_batch_rows(config, micro_step=i, rank=rank, replicas=replicas)]
        ]
        assert seen == list(range(12))


def digests(texts: list[str]) -> list[str]:
    return [text_digest(text) for text in texts]


def test_split_side_depends_on_the_text_alone() -> None:
    texts = [f"text {i}" for i in range(100)]
    _, held_out = split_documents(digests(texts), 10)
    _, later = split_documents(digests([*texts, *(f"new {i}" for i in range(50))]), 10)
    assert [part for part in later if part.index < 100] == held_out and held_out
    assert split_documents(digests(["a"]), 10) == ([Part(0, stop=0.9)], [Part(0, start=0.9)])


def test_no_split_is_empty() -> None:
    for count in range(2, 60):
        for every in (2, 3, 20):
            train, held_out = split_documents(digests([f"{every}-{count}-{i}" for i in range(count)]), every)
            assert train and held_out
            assert {part.index for part in train} | {part.index for part in held_out} == set(range(count))


def test_the_fingerprint_is_of_the_content_wherever_it_is(jsonl: Path, tmp_path: Path) -> None:
    config = DataConfig(dataset=str(jsonl), columns={"text": "body"})
    first = open_documents(config).fingerprint
    moved = tmp_path / "moved" / "e.jsonl"
    moved.parent.mkdir()
    moved.write_bytes(jsonl.read_bytes())
    os.utime(moved, ns=(1, 1))
    assert open_documents(DataConfig(dataset=str(moved), columns={"text": "body"})).fingerprint == first
    # Another text of the same length under the same name and time.
    times = (jsonl.stat().st_atime_ns, jsonl.stat().st_mtime_ns)
    jsonl.write_text(jsonl.read_text(encoding="utf-8").replace("document 0", "document X", 1), encoding="utf-8")
    os.utime(jsonl, ns=times)
    changed = open_documents(config)
    assert changed.fingerprint != first
    assert changed.texts.read(0).startswith("document X")


def test_text_shorter_than_a_sequence_names_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"have 5 tokens, fewer than data.seq_length 64"):
        prepare(tmp_path, DataConfig(seq_length=64, eval_sequences=0), ["", "hello"], 1)
    with pytest.raises(ValueError, match=r"none of its .* documents has any text"):
        prepare(tmp_path, DataConfig(seq_length=64, eval_sequences=0), ["", " "], 1)


def test_tokenizer_must_fit_the_model() -> None:
    with pytest.raises(ValueError, match="the tokenizer needs 260 rows, more than the model's vocab_size 257"):
        Vocabulary(byte_tokenizer(extra=3), 257, END)
    with pytest.raises(ValueError, match=r"end-of-text token id 300 is outside \[0, vocab_size 257\)"):
        Vocabulary(byte_tokenizer(), 257, 300)
