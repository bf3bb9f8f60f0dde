"""Bad inputs: conversations, their columns and their templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nxd_memopt.training.data.sources.conversations import COLUMNS
from tests.training.bad_inputs.case import BadInput
from tests.training.chats import CONVERSATIONS, PAIRS, turns, write_chat_config, write_rows
from tests.training.runs import LINES, byte_tokenizer, write_config, write_jsonl


def _row(row: Any, **data: Any) -> Callable[[Path], Path]:
    """A run whose fifth row is ``row``."""

    def prepare(directory: Path) -> Path:
        pairs = [dict(zip(COLUMNS[data["format"]][0], pair, strict=True)) for pair in PAIRS] if data else []
        good = pairs or CONVERSATIONS
        path = write_rows(directory / "d.jsonl", [*good[:4], row, *good[4:]])
        return write_chat_config(directory, data={"dataset": path} | data)

    return prepare


def _message(**message: Any) -> Callable[[Path], Path]:
    return _row({"messages": [{"role": "user", "content": "q"}, message]})


def _option(**data: Any) -> Callable[[Path], Path]:
    return lambda directory: write_chat_config(directory, data=data)


def _template(text: str | None) -> Callable[[Path], Path]:
    def prepare(directory: Path) -> Path:
        if text is not None:
            (directory / "chat.jinja").write_text(text, encoding="utf-8")
        return write_chat_config(directory, data={"chat_template": str(directory / "chat.jinja")})

    return prepare


def _no_template(directory: Path) -> Path:
    byte_tokenizer().save_pretrained(directory / "plain")
    return write_chat_config(directory, model={"tokenizer": str(directory / "plain")})


def _texts(directory: Path) -> Path:
    (directory / "d.txt").write_text("\n".join(LINES), encoding="utf-8")
    return write_chat_config(directory, data={"dataset": str(directory / "d.txt")})


def _text_rows(directory: Path) -> Path:
    return write_chat_config(directory, data={"dataset": write_jsonl(directory / "d.jsonl", LINES)})


def _all_too_long(directory: Path) -> Path:
    rows = [turns("q" * 99, f"{n}") for n in range(20)]
    return write_chat_config(directory, data={"dataset": write_rows(directory / "d.jsonl", rows)})


def _copies(directory: Path) -> Path:
    return write_chat_config(directory, data={"dataset": write_rows(directory / "d.jsonl", [turns("q", "a")] * 30)})


def _half_a_line(directory: Path) -> Path:
    (directory / "d.jsonl").write_text(json.dumps(turns("q", "a")) + '\n{"messages": [{"role"', encoding="utf-8")
    return write_chat_config(directory, data={"dataset": str(directory / "d.jsonl")})


PAIR = {"format": "prompt_completion"}
ALPACA = {"format": "instruction_output"}
CASES: tuple[BadInput, ...] = (
    BadInput("chat_no_messages", _row({"text": "a"}), ("d.jsonl line 5", "no 'messages'", "['text']")),
    BadInput("chat_messages_text", _row({"messages": "a"}), ("d.jsonl line 5", "a text in column 'messages'")),
    BadInput("chat_messages_null", _row({"messages": None}), ("d.jsonl line 5", "null in column 'messages'")),
    BadInput("chat_no_message", _row({"messages": []}), ("d.jsonl line 5", "no message of the role assistant")),
    BadInput("chat_message_text", _row({"messages": ["a"]}), ("d.jsonl line 5", "a text as message 1")),
    BadInput("chat_sharegpt", _row({"messages": [{"from": "gpt", "value": "a"}]}), ("line 5", "role", "'from'")),
    BadInput("chat_role_number", _message(role=1, content="a"), ("line 5", "role of message 2")),
    BadInput("chat_content_null", _message(role="assistant", content=None), ("line 5", "null as content of message 2")),
    BadInput(
        "chat_content_parts", _message(role="assistant", content=[{"text": "a"}]), ("line 5", "a list as content")
    ),
    BadInput("chat_empty_answer", _message(role="assistant", content=" "), ("line 5", "empty message 2")),
    BadInput("chat_calls", _message(role="assistant", content="a", tool_calls="f"), ("line 5", "tool_calls", "a list")),
    BadInput(
        "chat_weight", _message(role="assistant", content="a", weight=0.5), ("line 5", "0.5 as weight of message 2")
    ),
    BadInput(
        "chat_weight_0", _message(role="assistant", content="a", weight=0), ("line 5", "assistant that is trained")
    ),
    BadInput(
        "chat_reasoning",
        _message(role="assistant", content="a", reasoning_content="r"),
        ("line 5", "leaves out 'reasoning_content' of message 2", "data.chat_template"),
    ),
    BadInput("chat_question_only", _message(role="user", content="a"), ("line 5", "no message of the role assistant")),
    BadInput("chat_tools_text", _row(turns("q", "a") | {"tools": "f"}), ("line 5", "'tools'", "list of objects")),
    BadInput("chat_surrogate", _row(turns("q", "\ud800")), ("line 5", "not UTF-8")),
    BadInput("chat_half_a_line", _half_a_line, ("d.jsonl line 2", "not JSON", "data.on_bad_rows")),
    BadInput("chat_text_rows", _text_rows, ("d.jsonl", "['text']", "set data.format to text")),
    BadInput("chat_no_prompt", _row({"completion": "a"}, **PAIR), ("line 5", "no 'prompt'", "prompt_completion")),
    BadInput(
        "chat_prompt_list", _row({"prompt": [], "completion": "a"}, **PAIR), ("line 5", "a list in column 'prompt'")
    ),
    BadInput("chat_no_output", _row({"instruction": "q"}, **ALPACA), ("line 5", "no 'output'")),
    BadInput(
        "chat_input_number", _row({"instruction": "q", "output": "a", "input": 1}, **ALPACA), ("'input'", "number")
    ),
    BadInput("chat_text_file", _texts, ("data.format 'messages'", "text files", "JSON lines")),
    BadInput("chat_stdlib", _option(dataset="stdlib"), ("data.format 'messages'", "'stdlib'")),
    BadInput(
        "chat_concatenate", _option(packing="concatenate"), ("data.packing", "data.format 'messages'", "best_fit")
    ),
    BadInput("chat_text_column", _option(text_column="body"), ("data.text_column 'body'", "data.format")),
    BadInput("chat_unknown_format", _option(format="mesages"), ("data.format", "did you mean 'messages'")),
    BadInput("chat_unknown_policy", _option(long_conversations="split"), ("data.long_conversations", "'cut'")),
    BadInput(
        "chat_option_of_texts",
        lambda directory: write_config(directory, data={"train_on_input": True}),
        ("data.train_on_input", "data.format is 'text'"),
    ),
    BadInput("chat_no_template", _no_template, ("the tokenizer has none", "data.chat_template")),
    BadInput("chat_template_missing", _template(None), ("chat.jinja", "cannot be read")),
    BadInput("chat_template_syntax", _template("{% for"), ("chat.jinja line 1", "not Jinja")),
    BadInput("chat_template_name", _template("{{ messages[0].a.b }}"), ("chat template cannot render", "no attribute")),
    BadInput("chat_all_too_long", _all_too_long, ("a split", "is empty", "were dropped", "data.seq_length")),
    BadInput("chat_copies", _copies, ("30 copies of one conversation", "held-out")),
)
