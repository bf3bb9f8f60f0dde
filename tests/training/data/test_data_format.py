"""Which format the columns of rows tell, what is printed of it, and the error that names the right value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packed.fingerprint import tokens_fingerprint
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.data.sources.data_format import with_format
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from tests.training.chats import PAIRS, tokenizer, turns, write_rows
from tests.training.runs import END

MESSAGES = [turns(*pair) | {"id": n} for n, pair in enumerate(PAIRS)]
PROMPTS = [{"prompt": ask, "completion": say} for ask, say in PAIRS]
INSTRUCTIONS = [{"instruction": ask, "output": say, "input": ""} for ask, say in PAIRS]
TEXTS = [{"text": ask} for ask, _ in PAIRS]


def renamed(rows: list[dict[str, Any]], **columns: str) -> list[dict[str, Any]]:
    """The rows with other names of columns, each with the column that it has here."""
    return [{name: row.get(column) for name, column in columns.items()} for row in rows]


@pytest.mark.parametrize(
    ("found", "columns", "given", "printed"),
    [
        ("messages", {}, MESSAGES, "messages: columns messages; not read: id"),
        ("prompt_completion", {}, PROMPTS, "prompt_completion: columns prompt, completion"),
        ("instruction_output", {}, INSTRUCTIONS, "instruction_output: columns instruction, output, input"),
        ("messages", {}, [{"note": "a bad row"}, *MESSAGES], "messages: columns messages; not read: id, note"),
        ("text", {}, TEXTS, "text: columns text"),
        ("text", {}, [row | {"text": "t"} for row in MESSAGES], "; messages (messages) would fit too (data.format, "),
        ("messages", {"messages": "conversations"}, renamed(MESSAGES, conversations="messages"), "'conversations'"),
        (
            "prompt_completion",
            {"completion": "response"},
            renamed(PROMPTS, prompt="prompt", response="completion"),
            "in 'response'",
        ),
        (
            "prompt_completion",
            {"prompt": "question", "completion": "answer"},
            renamed(PROMPTS, question="prompt", answer="completion", context="context"),
            "columns prompt in 'question', completion in 'answer'; not read: context",
        ),
    ],
)
def test_the_columns_tell_the_format(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    found: str,
    columns: dict[str, str],
    given: list[dict[str, Any]],
    printed: str,
) -> None:
    config = with_format(DataConfig(dataset=write_rows(tmp_path / "d.jsonl", given)))
    assert (config.format, config.packing) == (found, "concatenate" if found == "text" else "best_fit")
    assert config.columns == columns
    line = capsys.readouterr().out
    assert line.startswith(f"format: the {len(given)} rows of '{tmp_path}/d.jsonl' are read as {found}: ")
    assert printed in line and line.count("\n") == 1


def test_what_is_known_of_the_first_rows_alone_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = [{"prompt": "a", "completion": "b"}] * 100 + [{"prompt": "a", "completion": "b", "system": "c"}]
    with_format(DataConfig(dataset=write_rows(tmp_path / "d.jsonl", late)))
    assert "the 101 rows" in (line := capsys.readouterr().out) and "prompt, completion in the first 100 rows" in line
    with pytest.raises(ValueError, match=r"the first 100 rows of .* have the columns \['id'\]"):
        with_format(DataConfig(dataset=write_rows(tmp_path / "e.jsonl", [{"id": 1}] * 100 + [{"text": "a"}])))


@pytest.mark.parametrize("streaming", [False, True])
def test_given_columns_are_read_and_another_column_is_another_text(tmp_path: Path, streaming: bool) -> None:
    rows = [{"frage": ask, "antwort": say, "other": f"{say}!", "body": ask} for ask, say in PAIRS]
    path = write_rows(tmp_path / "d.jsonl", rows)
    found: dict[str, set[str]] = {}
    for columns, form, first in (
        ({"prompt": "frage", "completion": "antwort"}, "prompt_completion", turns(*PAIRS[0])),
        ({"prompt": "frage", "completion": "other"}, "prompt_completion", turns(PAIRS[0][0], f"{PAIRS[0][1]}!")),
        ({"text": "body"}, "text", PAIRS[0][0]),
        ({"text": "other"}, "text", f"{PAIRS[0][1]}!"),
    ):
        config = with_format(DataConfig(dataset=path, columns=columns, streaming=streaming))
        assert config.format == form
        corpus = open_corpus(config, 0)
        texts = [str(text) for split in (corpus.train, corpus.held_out) for text, *_ in split.read(None)]
        assert (first if isinstance(first, str) else json.dumps(first)) in texts and len(texts) == len(rows)
        words = Vocabulary(tokenizer(), 257, END)
        found.setdefault(tokens_fingerprint(config, corpus.fingerprint, words, 0), set()).add(str(columns))
    assert len(found) == 4


@pytest.mark.parametrize(
    ("options", "given", "says"),
    [
        ({"format": "messages"}, PROMPTS, r"\['messages'\], .*which is prompt_completion: set data.format to prompt_c"),
        ({"format": "prompt_completion"}, MESSAGES, r"\['prompt', 'completion'\].*set data.format to messages, or"),
        ({"format": "instruction_output", "on_bad_rows": "skip"}, TEXTS, "set data.format to text"),
        ({"format": "text"}, INSTRUCTIONS, "set data.format to instruction_output"),
        ({"columns": {"text": "body"}}, MESSAGES, r"data.columns names \['body'\], .*\['id', 'messages'\]"),
        ({"columns": {"prompt": "a", "text": "b"}}, MESSAGES, r"the fields \['prompt', 'text'\], .*text has text; "),
        ({"columns": {"prompt": 1}}, PROMPTS, "'prompt' the column 1: give it a name"),
        ({"columns": {"prompt": "completion"}}, PROMPTS, r"the columns \['completion', 'prompt'\].* read others"),
        ({"format": "prompt_completion", "columns": {"prompt": "completion"}}, PROMPTS, "'completion' twice"),
        ({}, [{"conversation": []}], r"\['conversation'\].*text \['text'\].*in data.columns"),
        ({"packing": "concatenate"}, MESSAGES, "data.packing 'concatenate' would cut conversations"),
        ({"train_on_input": True}, TEXTS, "data.train_on_input True is for conversations, and data.format is 'text'"),
    ],
)  # fmt: skip
def test_another_format_is_one_error_with_the_value(
    tmp_path: Path, options: dict[str, Any], given: list[dict[str, Any]], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        with_format(DataConfig(dataset=write_rows(tmp_path / "d.jsonl", given), **options))


def test_the_sources_of_a_mixture_have_one_format(tmp_path: Path) -> None:
    names = [write_rows(tmp_path / f"{name}.jsonl", given) for name, given in (("a", MESSAGES), ("b", PROMPTS))]
    assert with_format(DataConfig(mixture={names[0]: 1})).format == "messages"
    with pytest.raises(ValueError, match=r"different formats or columns: .* is messages .* is prompt_completion"):
        with_format(DataConfig(mixture=dict.fromkeys(names, 1)))


def test_a_line_shows_the_columns_of_the_validation_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its rows may have a system message that the trained rows have not, or columns that are not read."""
    held_out = [row | {"system": "s", "context": "c"} for row in PROMPTS]
    dataset, validation = write_rows(tmp_path / "d.jsonl", PROMPTS), write_rows(tmp_path / "v.jsonl", held_out)
    with_format(DataConfig(dataset=dataset, validation_dataset=validation))
    _, line = capsys.readouterr().out.splitlines()
    expected = f"of {validation!r} are read as prompt_completion: columns prompt, completion, system; not read: context"
    assert expected in line
