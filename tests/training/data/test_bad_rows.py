"""Tests rows without text to train on: each kind is an error with its place, or left out and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.data.sources.documents import open_documents

GOOD = [f"document {i}" for i in range(25)]
BAD_LINES = {
    "broken": (b'{"text": "a', "is not JSON", "1 not JSON"),
    "null row": (b"null", "is null, not a JSON object", "1 not a JSON object"),
    "list": (b"[1]", "is a list, not a JSON object", "1 not a JSON object"),
    "null text": (b'{"text": null}', "has null in column 'text'", "1 null"),
    "number": (b'{"text": 3}', "has a number in column 'text'", "1 not text"),
    "other column": (b'{"body": "a"}', "has no 'text'", "1 without the column"),
    "latin": (b'{"text": "caf\xe9"}', "is not UTF-8", "1 not UTF-8"),
    "surrogate": (b'{"text": "a\\ud800"}', "is not UTF-8", "1 not UTF-8"),
    "nested": (b"[" * 100_000, "is not JSON", "1 not JSON"),
}


def write_lines(path: Path, bad: bytes) -> None:
    """``GOOD`` with a blank line, which is no row, and ``bad`` as line 5."""
    lines = [json.dumps({"text": text}).encode() for text in GOOD]
    path.write_bytes(b"\n".join([*lines[:3], b"", bad, *lines[3:]]) + b"\n")


def texts(path: Path, policy: str = "skip") -> list[str]:
    opened = open_documents(DataConfig(dataset=str(path), on_bad_rows="skip" if policy == "skip" else "error"))
    return [opened.texts.read(i) for i in sorted({part.index for part in [*opened.train, *opened.held_out]})]


@pytest.mark.parametrize("name", list(BAD_LINES))
def test_a_bad_line_is_named_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    line, says, counted = BAD_LINES[name]
    path = tmp_path / "d.jsonl"
    write_lines(path, line)
    with pytest.raises(ValueError, match=rf"{path} line 5 {says}.*set data.on_bad_rows to skip"):
        texts(path, "error")
    assert texts(path) == GOOD
    first, total = capsys.readouterr().out.splitlines()
    assert f"left out 1 rows of '{path}' so far ({counted}), the last: {path} line 5 {says}" in first
    assert f"left out 1 of the 26 rows of '{path}' ({counted})" in total


def test_each_kind_is_counted_with_a_place_and_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of a kind, the 10th and so on; the place of each is that of the line."""
    path = tmp_path / "d.jsonl"
    bad = ["not json", *['{"text": null}'] * 11, '{"text": 5}']
    path.write_text("\n".join([*bad, *(json.dumps({"text": text}) for text in GOOD)]), encoding="utf-8")
    assert texts(path) == GOOD
    *lines, total = capsys.readouterr().out.splitlines()
    places = [line.partition("the last: ")[2] for line in lines]
    column = "column 'text' (data.columns), not text"
    assert places[0].startswith(f"{path} line 1 is not JSON")
    assert places[1:] == [f"{path} line {n} has null in {column}" for n in (2, 11)] + [
        f"{path} line 13 has a number in {column}"
    ]
    assert "left out 13 of the 38 rows" in total and "(1 not JSON, 1 not text, 11 null)" in total


def test_a_row_that_both_splits_read_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "d.jsonl"
    write_lines(path, BAD_LINES["null text"][0])
    config = DataConfig(dataset=str(path), on_bad_rows="skip", streaming=True, held_out_every=5)
    corpus = open_corpus(config, 0)
    read = [text for stream in (corpus.train, corpus.held_out, corpus.train) for text, *_ in stream.read(None)]
    assert set(read) == set(GOOD)
    (line,) = capsys.readouterr().out.splitlines()
    assert "left out 1 rows" in line


def test_lines_of_several_files_and_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "a"}\r\n')
    (tmp_path / "b.jsonl").write_bytes(b"\n")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "c"}\n{"text": ')
    assert texts(tmp_path) == ["a", "c"]
    with pytest.raises(ValueError, match=rf"{tmp_path}/c.jsonl line 2 is not JSON"):
        texts(tmp_path, "error")


def not_utf8() -> pyarrow.Array:
    """The strings "ab" and FF FE."""
    offsets = pyarrow.array([0, 2, 4], pyarrow.int32()).buffers()[1]
    return pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"ab\xff\xfe")])


@pytest.mark.parametrize(
    ("column", "says", "left"),
    [
        (lambda: pyarrow.array(["a", None, "c"]), "has null in column 'text'", ["a", "c"]),
        (not_utf8, "is not UTF-8", ["ab"]),
    ],
    ids=["null", "not_utf8"],
)
def test_bad_rows_of_parquet_files(
    tmp_path: Path, column: Callable[[], pyarrow.Array], says: str, left: list[str]
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": column()}), tmp_path / "b.parquet")
    assert texts(tmp_path) == ["x", *left]
    with pytest.raises(ValueError, match=rf"^{tmp_path}/b.parquet row 2 {says}.*data.on_bad_rows"):
        texts(tmp_path, "error")


def test_bad_rows_of_saved_datasets(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", None, "c"], "n": [1, 2, 3]}).save_to_disk(str(tmp_path / "d"))
    assert texts(tmp_path / "d") == ["a", "c"]
    with pytest.raises(ValueError, match=r"'.*/d' row 2 has null in column 'text'"):
        texts(tmp_path / "d", "error")
    with pytest.raises(ValueError, match=r"leaves no row: 3 of the 3 rows of .* \(3 not text\)"):
        open_documents(DataConfig(dataset=str(tmp_path / "d"), columns={"text": "n"}, on_bad_rows="skip"))


def test_text_files_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("gut äöü\n", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 " * 10)
    assert texts(tmp_path) == ["gut äöü\n"]
    with pytest.raises(ValueError, match=rf"{tmp_path}/b.txt is not UTF-8"):
        texts(tmp_path, "error")
