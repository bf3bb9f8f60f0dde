"""Large corpora: shards, windows of documents, held-out text, and reading on from every position."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packed import feed as token_feed
from nxd_memopt.training.data.sources import corpora, shards
from nxd_memopt.training.data.sources.corpora import WindowedDocuments, open_corpus
from nxd_memopt.training.data.sources.documents import text_digest
from nxd_memopt.training.data.sources.rows import RowReader, Shard
from nxd_memopt.training.data.sources.shards import find_shards, is_streamed
from tests.training import packed_tokens
from tests.training.packed_tokens import ListedTexts, open_split, rows_of
from tests.training.runs import LINES, exact, run_here, write_config, write_jsonl

TEXTS = [f"document {i}: " + "ä€𝄞\n" * (i % 9) for i in range(120)]


def streamed(path: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(dataset=str(path), streaming=True, seq_length=16, eval_sequences=4, **changes)


def all_texts(config: DataConfig) -> list[str]:
    return [text for shard in shards_of(config) for text, _ in shard.read(0)]


def shards_of(config: DataConfig) -> list[Shard]:
    return find_shards(config, RowReader(config), streamed=True)


@pytest.mark.parametrize("size", [7, 1000, 10**6])
def test_ranges_of_a_file_have_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Also where a range ends at the end of a line, inside a character, or has no line at all."""
    monkeypatch.setattr(shards, "LINES_BYTES", size)
    path = tmp_path / "d.jsonl"
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS[:40])
    path.write_bytes(b"\xef\xbb\xbf" + lines.replace("\n", "\n\n", 3).encode())
    config = streamed(path)
    assert len(shards_of(config)) == -(-path.stat().st_size // size)
    assert all_texts(config) == TEXTS[:40]


def test_a_range_that_ends_with_a_line_leaves_the_next_line_to_the_next_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{i:04}" for i in range(20)]
    path = Path(write_jsonl(tmp_path / "d.jsonl", texts))
    monkeypatch.setattr(shards, "LINES_BYTES", 3 * path.stat().st_size // len(texts))
    assert all_texts(streamed(path)) == texts


def test_every_kind_of_file_goes_on_from_every_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "TEXT_BYTES", 100)
    monkeypatch.setattr(shards, "TEXT_PIECE_BYTES", 64)
    write_jsonl(tmp_path / "d.jsonl", TEXTS)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "d.parquet", row_group_size=17)
    (tmp_path / "d.txt").write_text("".join(TEXTS) + "long line " * 30, encoding="utf-8")
    for name in ("d.jsonl", "d.parquet", "d.txt"):
        (shard,) = shards_of(streamed(tmp_path / name))
        read = list(shard.read(0))
        if name == "d.txt":
            assert "".join(text for text, _ in read) == "".join(TEXTS) + "long line " * 30 and len(read) > 10
        else:
            assert [text for text, _ in read] == TEXTS
        for number, (_, position) in enumerate(read, start=1):
            assert list(shard.read(position)) == read[number:]


def stream(window: int, seed: int = 3, held_out: bool = False) -> WindowedDocuments:
    of_shards = [ListedTexts(TEXTS[start : start + 13]) for start in range(0, len(TEXTS), 13)]
    is_chosen = (lambda text: len(text) % 5 == 0) if held_out else (lambda text: len(text) % 5 != 0)
    return WindowedDocuments(of_shards, seed, is_chosen, window)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("window", [1, 13, 1000])
def test_windows_have_each_document_once_and_go_on_from_every_position(window: int) -> None:
    read = list(stream(window).read(None))
    texts = [text for text, *_ in read]
    chosen = [text for text in TEXTS if len(text) % 5]
    assert sorted(texts) == sorted(chosen) and texts != chosen
    for number, (_, position, _) in enumerate(read, start=1):
        again = list(stream(window).read(json.loads(json.dumps(position))))
        assert [text for text, *_ in again] == texts[number:]
    assert texts != [text for text, *_ in stream(window, seed=4).read(None)]
    held_out = {text for text, *_ in stream(1, held_out=True).read(None)}
    assert held_out == set(TEXTS) - set(chosen)


def test_the_seed_orders_the_documents_of_one_file() -> None:
    orders = [
        [text for text, *_ in WindowedDocuments([ListedTexts(TEXTS)], seed, lambda _: True, 1000).read(None)]
        for seed in (1, 2)
    ]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_held_out_text_is_chosen_by_its_content(tmp_path: Path) -> None:
    """Copies in other files are on the same side, and no side has text of the other."""
    (tmp_path / "d").mkdir()
    for name in ("a", "b"):
        write_jsonl(tmp_path / "d" / f"{name}.jsonl", TEXTS if name == "a" else TEXTS[::-1])
    corpus = open_corpus(streamed(tmp_path / "d", held_out_every=4), 0)
    train, held_out = ([text for text, *_ in split.read(None)] for split in (corpus.train, corpus.held_out))
    assert train and held_out and not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(2 * TEXTS)


def halves(texts: list[str], every: int) -> list[list[str]]:
    """The first characters of each text, and the last 1/every, computed with integers."""
    bounds = [len(text) * (every - 1) // every for text in texts]
    return [
        sorted(text[:bound] for text, bound in zip(texts, bounds, strict=True)),
        sorted(text[bound:] for text, bound in zip(texts, bounds, strict=True)),
    ]


# By hash, none of these 30 is held out with every 5th.
ALL_TRAINED = [text for text in (f"document {i} of many" for i in range(200)) if int(text_digest(text)[:16], 16) % 5][
    :30
]


@pytest.mark.parametrize("texts", [TEXTS[20:23], ALL_TRAINED], ids=["three", "one side"])
def test_few_documents_that_are_streamed_are_cut_as_without_streaming(tmp_path: Path, texts: list[str]) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", texts)
    config = streamed(path, held_out_every=5)
    corpus = open_corpus(config, 0)
    assert [sorted(text for text, *_ in split.read(None)) for split in (corpus.train, corpus.held_out)] == halves(
        texts, 5
    )
    cut = "the last 1/5 of each document is held out"
    assert corpus.notes == (
        f"order: all of {path!r} is read before training: it has too few documents to stream",
        cut,
    )
    assert open_corpus(replace(config, streaming=False), 0).notes == (cut,)
    assert open_corpus(replace(config, streaming=False), 0).fingerprint == corpus.fingerprint


def test_a_large_corpus_is_not_read_before_its_first_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read for the first sequences does not depend on the size of the corpus."""
    monkeypatch.setattr(corpora, "WINDOW_DOCUMENTS", 50)
    parse, read = shards._json_line, []
    monkeypatch.setattr(shards, "_json_line", lambda data: (read.append(1), parse(data))[1])
    numbers = []
    for count in (4000, 40_000):
        path = write_jsonl(tmp_path / f"{count}.jsonl", [f"{i} " + "abc " * 20 for i in range(count)])
        config = streamed(path)
        read.clear()
        packed_tokens.write(tmp_path / "tokens", config, open_corpus(config, 0), sequences=100)
        numbers.append(len(read))
    assert 0.5 < numbers[1] / numbers[0] < 2 and numbers[1] < 5000  # of 40,000 lines, for both splits


def test_another_corpus_has_other_tokens(tmp_path: Path) -> None:
    """An edit in the middle of a file that keeps its size; and an edit that keeps its time too, at its beginning."""
    path = Path(write_jsonl(tmp_path / "d.jsonl", ["abcd " * 10] * 9000))
    first = open_corpus(streamed(path), 0).fingerprint
    assert open_corpus(streamed(path), 0).fingerprint == first
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    data = path.read_bytes()
    path.write_bytes(b"%s{%s" % (data[:100_002], data[100_003:]))
    os.utime(path, ns=(times[0], times[1] + 1))
    second = open_corpus(streamed(path), 0).fingerprint
    path.write_bytes(data.replace(b"abcd", b"abce", 1))
    os.utime(path, ns=times)
    third = open_corpus(streamed(path), 0).fingerprint
    assert len({first, second, third}) == 3


def test_bad_rows_of_a_large_corpus(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": 5}\nnot json\n{"text": "b"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"d.jsonl line 3 has a number in column 'text'.*: correct it, or set"):
        all_texts(streamed(path))
    assert all_texts(streamed(path, on_bad_rows="skip")) == ["a", "b"]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=r"'absent' .* is not in .*d.parquet: its columns are \['text'\]"):
        all_texts(streamed(tmp_path / "d.parquet", columns={"text": "absent"}))
    (tmp_path / "one.json").write_text('[{"text": "a"}]', encoding="utf-8")
    with pytest.raises(ValueError, match=r"one.json is one JSON value.*set data.streaming to false"):
        shards_of(streamed(tmp_path / "one.json"))
    with pytest.raises(ValueError, match=r"data.streaming true reads files"):
        shards_of(streamed("stdlib"))


def test_size_decides_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", LINES)
    assert not is_streamed(DataConfig(dataset=path)) and not is_streamed(DataConfig("stdlib"))
    monkeypatch.setattr(shards, "SMALL_BYTES", 1000)
    assert is_streamed(DataConfig(dataset=path)) and not is_streamed(DataConfig(dataset=path, streaming=False))


@pytest.mark.slow
def test_a_run_reads_what_a_process_tokenizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the losses of a run that tokenizes in its own process, and epochs that are counted."""
    trainer = {"max_steps": 8, "export": False, "save_interval": "never"}
    data = {"dataset": write_jsonl(tmp_path / "few.jsonl", LINES[:30]), "streaming": True}
    runs = []
    started: list[object] = []
    start = token_feed.TokenProcess
    monkeypatch.setattr(token_feed, "TokenProcess", lambda job: started.append(job) or start(job))
    for name, seconds in (("own", 60.0), ("process", 0.0)):
        monkeypatch.setattr(token_feed, "FOREGROUND_S", seconds)
        (tmp_path / name).mkdir()
        outcome = run_here(write_config(tmp_path / name, trainer=trainer, data=data | {"global_batch_size": 40}))
        assert outcome.returncode == 0, outcome.stderr
        assert "with a shuffled window of 10,000 documents" in " ".join(outcome.stdout.split())
        assert "epoch 2 of" in outcome.stdout
        assert bool(started) == (name == "process")
        runs.append(tmp_path / name / "run")
    assert exact(runs[0]) == exact(runs[1])
    first, second = (next(run.glob("tokens/*")) for run in runs)
    assert rows_of(first) == rows_of(second)
    assert len(open_split(first)) == len(rows_of(first))
