"""The message about a conversation that the template cannot render names its file and row, in every kind of data."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources import row_places
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.data.tokenize.chat import ConversationEncoder, UnrenderedConversationError
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.data.tokenize.windows import packed_windows
from tests.training.chats import SHORTENED, tokenizer, turns, write_rows
from tests.training.runs import END

BAD = turns("q", "long answer", "more", "end")
GOOD = [turns(f"question {n}", f"answer {n}") for n in range(25)]
ROWS = [*GOOD[:7], BAD, *GOOD[7:20]]


def write(directory: Path, kind: str) -> tuple[str, str]:
    """Write ``ROWS`` after a file of other rows; return the dataset's name, and the place of ``BAD``."""
    if kind == "saved":
        Dataset.from_list(ROWS).save_to_disk(str(directory))
        return str(directory), f"'{directory}' row 8"
    directory.mkdir()
    for name, rows in (("a", GOOD[20:]), ("b", ROWS)):
        path = directory / f"{name}.{kind}"
        if kind == "jsonl":
            write_rows(path, rows)
        elif kind == "json":
            path.write_text(json.dumps(rows), encoding="utf-8")
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    return str(directory), f"{path} {'line' if kind == 'jsonl' else 'row'} 8"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "json", "saved"])
def test_the_file_and_the_row_are_named(tmp_path: Path, kind: str, streaming: bool) -> None:
    if streaming and kind == "json":
        pytest.skip("not read in shards")
    dataset, place = write(tmp_path / "rows", kind)
    options: Any = {"format": "messages", "seq_length": 64, "streaming": streaming}
    config = DataConfig(dataset=dataset, **options)
    encoder = ConversationEncoder(Vocabulary(tokenizer(SHORTENED), 257, END), config)
    with pytest.raises(ValueError, match="the answer in message 2 is not found") as raised:
        for split in (open_corpus(config, 0).train, open_corpus(config, 0).held_out):
            for text, _ in split.read(None):
                encoder.encode([str(text)])
    assert str(raised.value).startswith(f'{place}, the conversation that begins with "q": ')


def test_the_validation_data_is_searched_too(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", GOOD[:3])
    validation = write_rows(tmp_path / "validation.jsonl", [GOOD[4], BAD])
    config = DataConfig(dataset=train, validation_dataset=validation, format="messages", seq_length=64)
    held_out = [str(text) for text, _ in open_corpus(config, 0).held_out.read(None)]
    with pytest.raises(ValueError, match=r"^.*validation.jsonl line 2, the conversation that begins with"):
        ConversationEncoder(Vocabulary(tokenizer(SHORTENED), 257, END), config).encode(held_out)


def test_a_bad_row_before_the_conversation_does_not_hide_its_place(tmp_path: Path) -> None:
    """The run reads its shards in another order, and may not have come to the bad row."""
    Dataset.from_list([turns("q", " "), *ROWS]).save_to_disk(str(tmp_path / "d"))
    config = DataConfig(dataset=str(tmp_path / "d"), format="messages", streaming=True)
    assert row_places.place_of(config, json.dumps(BAD)) == f"'{tmp_path / 'd'}' row 9"


class Conversations:
    """A stream of ``GOOD`` conversations, and a bad one."""

    def __init__(self, bad: int) -> None:
        self._texts = [json.dumps(GOOD[number % len(GOOD)]) for number in range(bad - 1)] + [json.dumps(BAD)]

    def read(self, start: list[int] | None) -> Iterator[tuple[str, list[int]]]:
        for number in range(start[0] if start else 0, len(self._texts)):
            yield self._texts[number], [number + 1]


def test_a_document_that_was_downloaded_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a dataset of the hub again up to it would take hours."""

    def read(_: DataConfig) -> None:
        raise AssertionError("the dataset is read again")

    monkeypatch.setattr(row_places, "find_dataset_shards", read)
    monkeypatch.setattr(row_places, "load_table", read)
    config = DataConfig(dataset="owner/name", format="messages", seq_length=64, streaming=True)
    vocabulary = Vocabulary(tokenizer(SHORTENED), 257, END)
    # Two calls of the tokenizer before it, and documents of its own call.
    with pytest.raises(ValueError, match=r'^document 71 of the stream, the conversation that begins with "q": '):
        list(packed_windows(Conversations(71), vocabulary, config, 0))


def test_the_number_comes_back_from_a_process_that_tokenizes() -> None:
    error = pickle.loads(pickle.dumps(UnrenderedConversationError("the conversation", 7)))
    assert (type(error), str(error), error.index) == (UnrenderedConversationError, "the conversation", 7)
