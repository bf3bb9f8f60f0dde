"""Which format the columns of rows tell, what is printed of it, and the error that names the right value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.data_format import with_format
from tests.training.chats import PAIRS, turns, write_rows

MESSAGES = [turns(*pair) | {"id": n} for n, pair in enumerate(PAIRS)]
PROMPTS = [{"prompt": ask, "completion": say} for ask, say in PAIRS]
INSTRUCTIONS = [{"instruction": ask, "output": say, "input": ""} for ask, say in PAIRS]
TEXTS = [{"text": ask} for ask, _ in PAIRS]


@pytest.mark.parametrize(
    ("found", "columns", "given"),
    [
        ("messages", "['id', 'messages']", MESSAGES),
        ("prompt_completion", "['completion', 'prompt']", PROMPTS),
        ("instruction_output", "['input', 'instruction', 'output']", INSTRUCTIONS),
        ("messages", "['id', 'messages', 'note']", [{"note": "a bad row"}, *MESSAGES]),
        ("text", "", TEXTS),
        ("text", "['id', 'messages', 'text']", [row | {"text": "t"} for row in MESSAGES]),
    ],
)
def test_the_columns_tell_the_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], found: str, columns: str, given: list[dict[str, Any]]
) -> None:
    config = with_format(DataConfig(dataset=write_rows(tmp_path / "d.jsonl", given)))
    assert (config.format, config.packing) == (found, "concatenate" if found == "text" else "best_fit")
    printed = capsys.readouterr().out
    also = "; messages would fit too (data.format)" if "text" in columns else ""
    expected = f"data: the rows of '{tmp_path}/d.jsonl' have {columns} and are read as {found}{also}\n"
    assert printed == (expected if columns else "")


@pytest.mark.parametrize(
    ("options", "given", "says"),
    [
        ({"format": "messages"}, PROMPTS, r"\['messages'\], and .*: set data.format to prompt_completion"),
        ({"format": "prompt_completion"}, MESSAGES, r"\['prompt', 'completion'\].*set data.format to messages"),
        ({"format": "instruction_output", "on_bad_rows": "skip"}, TEXTS, "set data.format to text"),
        ({"format": "text"}, INSTRUCTIONS, "set data.format to instruction_output"),
        ({"text_column": "body"}, MESSAGES, r"reads the columns \['body'\].*set data.format to messages"),
        ({}, [{"conversations": []}], r"\['conversations'\].*text \['text'\].*in data.text_column"),
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
    with pytest.raises(ValueError, match=r"different formats, .*'messages'.*'prompt_completion'"):
        with_format(DataConfig(mixture=dict.fromkeys(names, 1)))
