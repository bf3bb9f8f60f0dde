"""Tests the training script's data: sources, the held-out split, packing, order, and what a user gets wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from nxd_memopt.training.config import DataConfig
from nxd_memopt.training.documents import Documents, Part, open_documents, split_documents
from nxd_memopt.training.tokens import TokenFile, Vocabulary, micro_batch_positions, read_fingerprint, write_tokens
from tests.training.runs import END, LINES, byte_tokenizer


def vocabulary() -> Vocabulary:
    return Vocabulary(byte_tokenizer(), 257, END)


def documents(texts: list[str], held_out_every: int = 20) -> Documents:
    train, held_out = split_documents([str(i) for i in range(len(texts))], held_out_every)
    return Documents(texts.__getitem__, train, held_out, fingerprint="test")


def prepare(directory: Path, config: DataConfig, texts: list[str], sequences: int, seed: int = 0) -> TokenFile:
    write_tokens(
        directory, config, documents=documents(texts), vocabulary=vocabulary(), train_sequences=sequences, seed=seed
    )
    return TokenFile(directory / "train.bin", config.seq_length, seed=seed)


def rows(file: TokenFile, count: int) -> list[list[int]]:
    return file.sequences(range(count)).tolist()


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "d.jsonl"
    path.write_text(
        "".join(json.dumps({"id": i, "body": line}) + "\n" for i, line in enumerate(LINES)), encoding="utf-8"
    )
    return path


def test_stdlib_is_stable_and_split_by_file() -> None:
    first, second = open_documents(DataConfig()), open_documents(DataConfig())
    assert first.fingerprint == second.fingerprint
    assert first.train == second.train and first.held_out == second.held_out
    held_out_fraction = len(first.held_out) / (len(first.train) + len(first.held_out))
    assert 0.02 < held_out_fraction < 0.09  # one in 20 of some 800 files, chosen by hash
    assert not {part.index for part in first.train} & {part.index for part in first.held_out}
    assert len(first.text(first.train[0])) > 0


def test_jsonl_parquet_and_saved_datasets_read_alike(jsonl: Path, tmp_path: Path) -> None:
    table = {"id": list(range(len(LINES))), "body": LINES}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "d.parquet")
    datasets.Dataset.from_dict(table).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "several").mkdir()
    for name, part in (("a.jsonl", LINES[:80]), ("b.jsonl", LINES[80:])):
        text = "".join(json.dumps({"body": line}) + "\n" for line in part)
        (tmp_path / "several" / name).write_text(text, encoding="utf-8")
    sources = [str(jsonl), *(str(tmp_path / name) for name in ("d.parquet", "saved", "several", "several/*.jsonl"))]
    for source in sources:
        opened = open_documents(DataConfig(dataset=source, text_column="body"))
        assert [opened.read(i) for i in range(len(LINES))] == LINES, source


def test_text_file_is_one_document_whose_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("\n".join(LINES), encoding="utf-8")
    opened = open_documents(DataConfig(dataset=str(tmp_path / "d.txt"), held_out_every=10))
    train, held_out = opened.text(opened.train[0]), opened.text(opened.held_out[0])
    assert train + held_out == "\n".join(LINES)
    assert len(held_out) == pytest.approx(len(train) / 9, abs=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "absent/file.jsonl"}, "'absent/file.jsonl' cannot be read: no such file"),
        ({"dataset": "./absent"}, "no such file"),
        ({"text_column": "text"}, r"'text' is not in dataset .*: its columns are \['id', 'body'\]"),
        ({"text_column": "id"}, "holds int, not text, in row"),
    ],
)
def test_source_errors(jsonl: Path, changes: dict[str, Any], message: str) -> None:
    config = DataConfig(**{"dataset": str(jsonl), "text_column": "body", **changes})
    with pytest.raises(ValueError, match=message):
        open_documents(config).read(0)


def test_empty_and_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "damaged.jsonl").write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    (tmp_path / "damaged.parquet").write_bytes(b"not parquet")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 10)
    for name in ("empty.jsonl", "damaged.jsonl", "damaged.parquet", "latin.txt"):
        with pytest.raises(ValueError, match=name):
            open_documents(DataConfig(dataset=str(tmp_path / name)))


def test_documents_are_closed_by_end_of_text_and_packed_without_loss(tmp_path: Path) -> None:
    config = DataConfig(seq_length=16, eval_sequences=0)
    file = prepare(tmp_path, config, LINES, 10**6)
    train = documents(LINES).train
    expected = sum(len(LINES[part.index].encode()) + 1 for part in train)
    assert len(file) == expected // 16
    packed = file.sequences(range(len(file)))
    assert packed.shape == (len(file), 16) and packed.dtype == torch.int64
    assert len(train) - 1 <= (packed == END).sum() <= len(train)  # the last one may be in the dropped rest


def test_a_longer_run_starts_with_the_same_sequences(tmp_path: Path) -> None:
    config = DataConfig(seq_length=16, eval_sequences=4)
    short = rows(prepare(tmp_path, config, LINES, 10), 10)
    longer = rows(prepare(tmp_path, config, LINES, 300), 300)
    assert longer[:10] == short
    assert rows(prepare(tmp_path / "other", config, LINES, 300, seed=1), 10) != short


def test_second_pass_has_the_same_sequences_in_another_order(tmp_path: Path) -> None:
    file = prepare(tmp_path, DataConfig(seq_length=16, eval_sequences=0), LINES, 10**6)
    both = rows(file, 2 * len(file))
    first, second = both[: len(file)], both[len(file) :]
    assert first != second and sorted(first) == sorted(second)


def test_tokens_are_kept_while_they_are_enough(tmp_path: Path) -> None:
    config = DataConfig(seq_length=16, eval_sequences=4)
    prepare(tmp_path, config, LINES, 50)
    fingerprint, written = read_fingerprint(tmp_path), (tmp_path / "train.bin").stat().st_mtime_ns
    prepare(tmp_path, config, LINES, 20)
    assert (tmp_path / "train.bin").stat().st_mtime_ns == written
    prepare(tmp_path, config, LINES, 60)
    assert (tmp_path / "train.bin").stat().st_mtime_ns != written
    assert read_fingerprint(tmp_path) == fingerprint
    prepare(tmp_path, config, LINES, 60, seed=1)
    assert read_fingerprint(tmp_path) != fingerprint


def test_ranks_read_disjoint_sequences_of_one_order() -> None:
    config = DataConfig(micro_batch_size=2, global_batch_size=12)
    for replicas in (1, 2, 3):
        accumulation = 12 // (2 * replicas)
        seen = [
            position
            for step in range(3)
            for i in range(accumulation)
            for rank in range(replicas)
            for position in micro_batch_positions(config, step=step, micro_step=i, rank=rank, replicas=replicas)
        ]
        assert seen == list(range(36))


def test_split_side_depends_on_the_name_alone() -> None:
    names = [f"file{i}\t{i}" for i in range(100)]
    _, held_out = split_documents(names, 10)
    _, later = split_documents([f"{name}9" for name in names], 10)  # every file has grown
    assert held_out == later and held_out
    assert split_documents(["a"], 10) == ([Part(0, stop=0.9)], [Part(0, start=0.9)])


def test_text_shorter_than_a_sequence_names_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"have 5 tokens, fewer than data.seq_length 64"):
        prepare(tmp_path, DataConfig(seq_length=64, eval_sequences=0), ["", "hello"], 1)
    with pytest.raises(ValueError, match="none of its documents has any text"):
        prepare(tmp_path, DataConfig(seq_length=64, eval_sequences=0), ["", " "], 1)


def test_tokenizer_must_fit_the_model() -> None:
    with pytest.raises(ValueError, match="the tokenizer has 260 tokens, more than the model's vocab_size 257"):
        Vocabulary(byte_tokenizer(extra=3), 257, END)
    with pytest.raises(ValueError, match=r"end-of-text token id 300 is outside \[0, vocab_size 257\)"):
        Vocabulary(byte_tokenizer(), 257, 300)


def test_token_ids_must_be_in_the_vocabulary() -> None:
    class Outside:
        def __len__(self) -> int:
            return 10

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[1, 2, 12] for _ in texts]}

    with pytest.raises(ValueError, match=r"token id 12 is outside \[0, vocab_size 10\)"):
        Vocabulary(Outside(), 10, 0).encode(["text"])


def test_token_file_is_plain_int32(tmp_path: Path) -> None:
    file = prepare(tmp_path, DataConfig(seq_length=16, eval_sequences=0), LINES, 10)
    raw = np.fromfile(tmp_path / "train.bin", dtype=np.int32)
    assert raw.reshape(-1, 16)[:10].tolist() == rows(file, 10)
