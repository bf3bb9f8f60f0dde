"""Datasets of the hub that are read row by row, here from copies of repositories: shards, resumption and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources import corpora, dataset_shards, shards
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.data.sources.dataset_shards import is_large
from nxd_memopt.training.data.sources.rows import RowReader, RowShard, Shard
from nxd_memopt.training.data.sources.shards import find_shards, is_streamed

TEXTS = [f"document {i}: " + "ä€𝄞\n" * (i % 9) for i in range(120)]


def repository(directory: Path, kind: str = "parquet", texts: list[str] = TEXTS) -> Path:
    """A copy of a repository of the hub: three files of training, one of another split, and a README."""
    (directory / "data").mkdir(parents=True)
    for part, split in enumerate(("train", "train", "train", "test")):
        chosen = texts[part::3] if split == "train" else ["of another split"]
        rows = [{"id": number, "text": text} for number, text in enumerate(chosen)]
        path = directory / "data" / f"{split}-{part % 3:05}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (directory / "README.md").write_text("# No text to train on\n", encoding="utf-8")
    return directory


def saved(directory: Path) -> Path:
    datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS}).save_to_disk(str(directory))
    return directory


def streamed(path: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(dataset=str(path), streaming=True, seq_length=16, eval_sequences=4, **changes)


def shards_of(config: DataConfig) -> list[Shard]:
    return find_shards(config, RowReader(config), streamed=True)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "saved"])
def test_every_dataset_goes_on_from_every_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """And so does the stream of shuffled windows, from the JSON of its position."""
    monkeypatch.setattr(dataset_shards, "SAVED_BYTES", 3000)
    monkeypatch.setattr(corpora, "WINDOW_DOCUMENTS", 13)
    path = saved(tmp_path / "d") if kind == "saved" else repository(tmp_path / "d", kind)
    config = streamed(path)
    found = shards_of(config)
    assert len(found) >= 3 and len({json.dumps(shard.identity) for shard in found}) == len(found)
    assert sorted(text for shard in found for text, _ in shard.read(0)) == sorted(TEXTS)
    read = list(found[1].read(0))
    for number in (1, 7, 8, len(read) - 1, len(read)):  # within a row group, and at its end
        assert list(shards_of(config)[1].read(read[number - 1][1])) == read[number:]
    train = documents_after(config, None)
    for number in (1, 13, 14, 59):  # the end of a window too
        position = json.loads(json.dumps(train[number - 1][1]))
        assert documents_after(config, position) == train[number:]


def documents_after(config: DataConfig, position: list[int] | None) -> list[tuple[Any, list[int]]]:
    return [(text, after) for text, after, _ in open_corpus(config, 3).train.read(position)]


def test_a_shard_is_opened_once_for_all_of_its_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise be downloaded again, up to its place, for each window; and is not read ahead."""
    monkeypatch.setattr(corpora, "WINDOW_DOCUMENTS", 5)
    opened, read = [], []

    def open_rows(start: int) -> Iterator[Callable[[], Any]]:
        opened.append(start)
        for text in TEXTS[start:]:
            read.append(text)
            yield lambda text=text: {"text": text}

    config = streamed("owner/name")
    shard = RowShard(open_rows, "d", ["d"], RowReader(config))
    stream = corpora.WindowedDocuments([shard], 0, lambda _: True, 5).read(None)
    next(stream)
    assert len(read) == 5
    assert len(list(stream)) == len(TEXTS) - 1 and opened == [0]
    # Of two splits that read one shard, each has its own place.
    next(shard.read(4))
    assert [text for text, _ in shard.read(2)] == TEXTS[2:]


def test_size_decides_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (repository(tmp_path / "repository"), saved(tmp_path / "saved")):
        config = DataConfig(dataset=str(path))
        assert not is_streamed(config)
        assert sorted(open_documents_texts(config)) == sorted(TEXTS)
        monkeypatch.setattr(shards, "SMALL_BYTES", 1000)
        assert is_streamed(config)
        monkeypatch.setattr(shards, "SMALL_BYTES", 2**26)
    monkeypatch.setattr(shards, "SMALL_BYTES", 1000)
    # The datasets library streams no part of a split.
    assert not is_streamed(DataConfig(dataset=str(tmp_path / "repository"), split="train[:10%]"))


def open_documents_texts(config: DataConfig) -> list[str]:
    corpus = open_corpus(config, 0)
    return [str(text) for split in (corpus.train, corpus.held_out) for text, *_ in split.read(None)]


def test_sizes_of_files_elsewhere() -> None:
    """Of a directory at a time, as the hub lists them; a size that nobody knows is large."""
    memory = fsspec.filesystem("memory")
    for name in ("a", "b"):
        memory.pipe(f"/sizes/{name}", b"x" * 600)
    paths = ["memory://sizes/a", "memory://sizes/b"]
    assert is_large(paths, 1000) and not is_large(paths, 1200) and not is_large(paths[:1], 1000)
    assert is_large(["zip://a::memory://sizes/a"], 1000)


def test_another_commit_is_another_corpus(tmp_path: Path) -> None:
    config = streamed(repository(tmp_path / "d"))
    first = open_corpus(config, 0).fingerprint
    assert open_corpus(config, 0).fingerprint == first
    assert open_corpus(streamed(tmp_path / "d", split="test", held_out_every=2), 0).fingerprint != first
    pyarrow.parquet.write_table(pyarrow.table({"text": ["another"]}), tmp_path / "d" / "data" / "train-00001.parquet")
    assert open_corpus(config, 0).fingerprint != first


def test_files_about_a_repository_are_no_text(tmp_path: Path) -> None:
    path = repository(tmp_path / "d")
    for name in ("LICENSE.md", "dataset_infos.json"):
        (path / name).write_text("{}\n", encoding="utf-8")
    assert sorted(open_documents_texts(DataConfig(dataset=str(path)))) == sorted(TEXTS)
    # Other text files are the data, as before.
    (path / "chapter.txt").write_text("a book", encoding="utf-8")
    (path / "dataset_infos.json").unlink()
    texts = open_documents_texts(DataConfig(dataset=str(path)))
    assert any(text.startswith("a bo") for text in texts) and TEXTS[0] not in texts


@pytest.mark.parametrize("streaming", [True, False])
def test_files_in_no_split_are_an_error(tmp_path: Path, streaming: bool) -> None:
    """The datasets library would leave them out without a word."""
    path = repository(tmp_path / "d", "jsonl")
    for name in ("train", "extra"):
        (path / name).mkdir()
        (path / "data" / "train-00001.jsonl").rename(path / name / "b.jsonl")
        (path / "data" / "train-00001.jsonl").write_text('{"id": 0, "text": "a"}\n', encoding="utf-8")
    (path / "data" / "train-00001.jsonl").unlink()
    config = DataConfig(dataset=str(path), streaming=streaming)
    with pytest.raises(ValueError, match=r"of its files are in no split, the first is .*: give the directories"):
        open_corpus(config, 0)
    # A README that says what belongs to the dataset is followed.
    (path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: train/*\n---\n",
        encoding="utf-8",
    )
    assert open_corpus(config, 0).fingerprint


def test_caches_next_to_a_saved_dataset_are_not_its_files(tmp_path: Path) -> None:
    config = streamed(saved(tmp_path / "d"))
    first = open_corpus(config, 0).fingerprint
    datasets.load_from_disk(config.dataset).map(lambda row: {"length": len(row["text"])})
    assert list((tmp_path / "d").glob("cache-*.arrow"))
    assert open_corpus(config, 0).fingerprint == first


def test_bad_rows_and_columns_are_named(tmp_path: Path) -> None:
    path = repository(tmp_path / "d", texts=["a", "b", "c", "d", None, "f"])  # pyright: ignore[reportArgumentType]
    config = streamed(path)
    with pytest.raises(ValueError, match=r"data/train-00001.parquet row 2 has null in column 'text'.*correct it"):
        [list(shard.read(0)) for shard in shards_of(config)]
    texts = [text for shard in shards_of(streamed(path, on_bad_rows="skip")) for text, _ in shard.read(0)]
    assert sorted(texts) == ["a", "b", "c", "d", "f"]
    with pytest.raises(ValueError, match=r"'body' \(data.columns\) is not in .*: its columns are \['id', 'text'\]"):
        shards_of(streamed(path, columns={"text": "body"}))
    for split in ("absent", "train[:10%]"):
        with pytest.raises(ValueError, match=r"cannot be read: Bad split: .*Available splits: \['train', 'test'\]"):
            shards_of(streamed(path, split=split))
    with pytest.raises(ValueError, match=r"data.split 'test' chooses a part of a data set of the hub"):
        shards_of(streamed(saved(tmp_path / "saved"), split="test"))


def test_a_network_that_fails_in_a_row_is_named() -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise ConnectionError("Connection reset by peer")

    stream: Any = SimpleNamespace(num_shards=1, shard=lambda **_: stream, skip=lambda _: rows())
    loaded = dataset_shards._stream_rows(stream, 0, "hub file", 0)
    assert next(loaded)() == {"text": "a"}
    with pytest.raises(ValueError, match=r"'hub file row 2' cannot be read: Connection reset by peer: check the name"):
        next(loaded)
