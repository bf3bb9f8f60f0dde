"""A conversation that the template cannot render is named, or left out, with its file, its row and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.data.tokenize.windows import PackedWindows
from tests.training.chats import SHORTENED, tokenizer, turns, write_rows
from tests.training.runs import END

BAD = turns("q", "long answer", "more", "end")
GOOD = [turns(f"question {n}", f"answer {n}") for n in range(25)]
ROWS = [*GOOD[:7], BAD, *GOOD[7:20]]
REASON = r'the conversation that begins with "q": the chat template .* the answer in message 2 is not found'


def write(directory: Path, kind: str) -> tuple[str, str]:
    """Write ``ROWS`` after a file of other rows; return the dataset's name, and the place of ``BAD``."""
    if kind == "saved":
        Dataset.from_list(ROWS).save_to_disk(str(directory))
        return str(directory), f"'{directory}' row 8"
    # The datasets library knows the splits of a copy of a repository by their directories.
    parent = directory / "train" if kind == "repository" else directory
    parent.mkdir(parents=True)
    for name, rows in (("a", GOOD[20:]), ("b", ROWS)):
        path = parent / f"{name}.{'parquet' if kind == 'repository' else kind}"
        if kind == "jsonl":
            write_rows(path, rows)
        elif kind == "json":
            path.write_text(json.dumps(rows), encoding="utf-8")
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    return str(directory), f"{path} {'line' if kind == 'jsonl' else 'row'} 8"


def tokenize(config: DataConfig) -> None:
    """Tokenize both splits."""
    corpus = open_corpus(config, 0)
    for stream in (corpus.train, corpus.held_out):
        list(PackedWindows(stream, Vocabulary(tokenizer(SHORTENED), 257, END), config, 0).windows(1024))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "json", "saved", "repository"])
def test_the_file_the_row_and_the_reason_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, streaming: bool
) -> None:
    if streaming and kind == "json":
        pytest.skip("not read in shards")
    dataset, place = write(tmp_path / "rows", kind)
    if kind == "repository" and not streaming:
        place = f"'{dataset}' row 13"  # the library has one table of all files
    options: Any = {"format": "messages", "seq_length": 64, "streaming": streaming}
    with pytest.raises(ValueError, match=rf"^{place}, {REASON}.*set data.on_bad_rows to skip"):
        tokenize(DataConfig(dataset=dataset, **options))
    tokenize(DataConfig(dataset=dataset, on_bad_rows="skip", **options))
    (line,) = capsys.readouterr().out.splitlines()
    assert f"left out 1 rows of '{dataset}' so far (1 not renderable), the last: {place}, the conversation" in line
