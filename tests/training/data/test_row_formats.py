"""A row gives the same document and the same tokens whatever file it comes from, streamed or not."""

from __future__ import annotations

import codecs
import copy
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packing import ID_MASK, NOT_TRAINED
from nxd_memopt.training.data.sources.conversations import conversation_text
from nxd_memopt.training.data.sources.corpora import open_corpus
from nxd_memopt.training.data.sources.data_format import with_format
from nxd_memopt.training.data.tokenize.encoding import DocumentEncoder
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from tests.training.chats import MARKED, PAIRS, tokenizer, turns, write_rows
from tests.training.data.test_template_parts import ENCODED, TOOL
from tests.training.runs import END

Rows = list[dict[str, Any]]


def call_row(arguments: dict[str, Any], **entries: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "on 2024-07-26?", "tool_calls": None, "weight": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "weight": 0},
        {"role": "assistant", "content": "2024-07-27", "tool_calls": None, "weight": None},
    ]
    return {"messages": messages, "tools": [copy.deepcopy(TOOL)]} | entries


# As JSON lines have them; in a table the rows have each other's entries, null.
CALLS: Rows = [
    *(turns(*pair) for pair in PAIRS[:21]),
    call_row({"city": "Ås", "unit": None, "days": [1, 2]}),
    call_row({"query": "2024-01-05", "where": {"at": "x", "by": None}}, chat_template_kwargs={"mood": "glad"}),
]
# Both as the reader is to give them, written by hand.
FIRST, SECOND = (
    {
        "messages": [
            {"role": "user", "content": "on 2024-07-26?"},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": values}}]},
            {"role": "assistant", "content": "2024-07-27"},
        ],
        "untrained": [1],
        "tools": [TOOL],
    }
    for values in ({"city": "Ås", "days": [1, 2]}, {"query": "2024-01-05", "where": {"at": "x"}})
)
PROMPTS: Rows = [{"prompt": ask, "completion": say, "system": None} for ask, say in PAIRS[:21]]
INSTRUCTIONS: Rows = [{"instruction": ask, "output": say} for ask, say in PAIRS[:21]]
TEXTS: Rows = [{"id": n, "text": f"\ufeff2024-07-{n + 1:02}: Ås\r\n" * (1 + n % 3)} for n in range(25)]
KINDS: dict[str, tuple[Rows, list[dict[str, Any] | str]]] = {
    "messages": (CALLS, [*CALLS[:21], FIRST, SECOND | {"chat_template_kwargs": {"mood": "glad"}}]),
    "prompt_completion": (PROMPTS, [turns(*pair) for pair in PAIRS[:21]]),
    "instruction_output": (INSTRUCTIONS, [turns(*pair) for pair in PAIRS[:21]]),
    "text": (TEXTS, [row["text"] for row in TEXTS]),
}


def _table(rows: Rows) -> pyarrow.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})


def _lines(path: Path, rows: Rows) -> str:
    return write_rows(path / "d.jsonl", rows)


def _marked_lines(path: Path, rows: Rows) -> str:
    """With a byte order mark, ends of lines of Windows, and a name that does not tell the lines."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    (path / "d.json").write_bytes(codecs.BOM_UTF8 + text.encode())
    return str(path / "d.json")


def _array(path: Path, rows: Rows) -> str:
    (path / "d.json").write_bytes(codecs.BOM_UTF8 + json.dumps(rows, indent=1).encode())
    return str(path / "d.json")


def _parquet(path: Path, rows: Rows) -> str:
    pyarrow.parquet.write_table(_table(rows), path / "d.parquet", row_group_size=6)
    return str(path / "d.parquet")


def _views(path: Path, rows: Rows) -> str:
    """With texts as polars writes them, and as categories of pandas; the roles of messages too."""
    table = _table(rows)
    columns: dict[str, Any] = {}
    for number, name in enumerate(table.column_names):
        column = table.column(name).combine_chunks()
        if pyarrow.types.is_string(column.type):
            column = column.dictionary_encode() if number % 2 else column.cast(pyarrow.string_view())
        elif name == "messages":
            messages = column.flatten()
            fields = {field.name: messages.field(field.name) for field in messages.type}
            fields["role"] = fields["role"].dictionary_encode()
            column = pyarrow.LargeListArray.from_arrays(
                column.offsets.cast(pyarrow.int64()), pyarrow.StructArray.from_arrays(fields.values(), fields)
            )
        columns[name] = column
    pyarrow.parquet.write_table(pyarrow.table(columns), path / "d.parquet", row_group_size=6)
    return str(path / "d.parquet")


def _saved(path: Path, rows: Rows) -> str:
    Dataset(_table(rows)).save_to_disk(str(path / "d"))
    return str(path / "d")


def _repository(path: Path, rows: Rows) -> str:
    (path / "d" / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(_table(rows), path / "d" / "data" / "train-0.parquet")
    return str(path / "d")


FILES = [_lines, _marked_lines, _array, _parquet, _views, _saved, _repository]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("write", FILES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_row_is_the_same_in_every_file(
    tmp_path: Path, kind: str, write: Callable[[Path, Rows], str], streaming: bool
) -> None:
    if write is _array and streaming:
        pytest.skip("an array is read at once")
    rows, right = KINDS[kind]
    config = with_format(DataConfig(dataset=write(tmp_path, rows), streaming=streaming, seq_length=512))
    assert config.format == kind
    corpus = open_corpus(config, 0)
    texts = [str(text) for split in (corpus.train, corpus.held_out) for text, *_ in split.read(None)]
    if kind == "text":
        assert sorted(texts) == sorted(map(str, right))
        return
    assert sorted(texts) == sorted(json.dumps(each, ensure_ascii=False) for each in right)
    words = tokenizer("{{ mood or '' }}" + ENCODED)
    encoded = DocumentEncoder(Vocabulary(words, 257, END), config).encode(texts)
    expected = {}
    for row in right:
        assert isinstance(row, dict)
        options = {name: row[name] for name in row if name not in ("messages", "untrained", "chat_template_kwargs")}
        expected[json.dumps(row, ensure_ascii=False)] = words.apply_chat_template(
            row["messages"], return_dict=True, **options, **row.get("chat_template_kwargs", {})
        )["input_ids"]
    assert [(each.tokens & ID_MASK).tolist() for each in encoded] == [expected[text] for text in texts]


# Conversations as other programs write them, and their messages by hand.
SPOKEN = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "1 plus 2?"},
    {"from": "gpt", "value": "look", "weight": 0},
    {"from": "tool", "value": "3"},
    {"from": "gpt", "value": "3."},
]
ROLES = ("system", "user", "assistant", "tool", "assistant")
MESSAGES = [{"role": role, "content": each["value"]} for role, each in zip(ROLES, SPOKEN, strict=True)]
IN_PARTS = [
    {
        "role": each["role"],
        "content": [{"type": "text", "text": part} for part in (each["content"][:1], each["content"][1:])],
    }
    for each in MESSAGES
]
WITHOUT_FLAG = [{name: value for name, value in each.items() if name != "weight"} for each in SPOKEN]
QUESTION = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "columns", "messages"),
    [
        ({"conversations": WITHOUT_FLAG}, {}, MESSAGES),
        ({"messages": IN_PARTS}, {}, MESSAGES),
        ({"dialog": WITHOUT_FLAG}, {"messages": "dialog"}, MESSAGES),
        ({"prompt": "q", "response": "a", "system": "s"}, {}, QUESTION),
        ({"question": "q", "answer": "a", "system": "s"}, {}, QUESTION),
        ({"input": "q", "output": "a", "s": "s"}, {"instruction": "input", "system": "s"}, QUESTION),
    ],
)
def test_tokens_and_answers_are_those_of_transformers(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], messages: list[dict[str, Any]]
) -> None:
    words = tokenizer(MARKED)
    right = words.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    for write in (_lines, _parquet):
        config = with_format(DataConfig(dataset=write(tmp_path, [row]), columns=columns, eval_sequences=0))
        ((text, *_),) = open_corpus(config, 0).train.read(None)
        (encoded,) = DocumentEncoder(Vocabulary(words, 257, END), config).encode([text])
        assert (encoded.tokens & ID_MASK).tolist() == right["input_ids"]
        assert ((encoded.tokens & NOT_TRAINED) == 0).tolist() == [bool(each) for each in right["assistant_masks"]]


def test_an_answer_of_sharegpt_may_be_excluded() -> None:
    assert json.loads(conversation_text({"messages": SPOKEN}, "messages")) == {"messages": MESSAGES, "untrained": [2]}


def of_assistant(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **message}]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": "a"}, "a text in column 'messages'"),
        ({"messages": []}, "no message of the role assistant"),
        ({"messages": [{"from": "bing", "value": "a"}]}, "'bing' as 'from' of message 1, which is none of human, "),
        ({"messages": [{"from": "gpt", "role": "assistant"}]}, "both 'from' and 'role' in message 1"),
        ({"messages": [{"from": "gpt"}]}, "null as content of message 1"),
        (of_assistant(content=[{"type": "image_url", "image_url": {}}]), "the type 'image_url' in message 2: only"),
        (of_assistant(content=[{"type": "text", "text": "a", "at": 1}]), r"\['type', 'text', 'at'\] in the content"),
        (of_assistant(content=["a"]), "a text without a type in the content of message 2"),
        (of_assistant(content=None), "null as content of message 2"),
        (of_assistant(content=[{"text": "a"}]), "an object without a type in the content of message 2"),
        (of_assistant(content=" "), "empty message 2 of the assistant"),
        (of_assistant(content="a", tool_calls="f"), "a text as tool_calls of message 2"),
        (of_assistant(tool_calls=[{"function": {"name": "f", "arguments": 1}}]), "tool call in message 2"),
        (of_assistant(content="a", at=datetime.date(2026, 1, 2)), "has a date, which JSON does not have"),
        (turns("q", "a") | {"tools": "f"}, "'tools', not a list of objects"),
        ({"prompt": [], "completion": "a"}, "a list in column 'prompt'"),
    ],
)
def test_a_row_without_a_conversation_is_named(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        conversation_text(row, "prompt_completion" if "prompt" in row else "messages")
