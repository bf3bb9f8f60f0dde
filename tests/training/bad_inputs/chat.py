"""Bad inputs: conversations, their columns and their templates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nxd_memopt.training.config.data import FIELDS
from tests.training.bad_inputs.case import BadInput
from tests.training.chats import CONVERSATIONS, PAIRS, turns, write_chat_config, write_rows
from tests.training.runs import LINES, byte_tokenizer


def _row(row: Any, **data: Any) -> Callable[[Path], Path]:
    """A run whose fifth row is ``row``."""

    def prepare(directory: Path) -> Path:
        pairs = [dict(zip(FIELDS[data["format"]][0], pair, strict=True)) for pair in PAIRS] if data else []
        good = pairs or CONVERSATIONS
        path = write_rows(directory / "d.jsonl", [*good[:4], row, *good[4:]])
        return write_chat_config(directory, data={"dataset": path} | data)

    return prepare


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


def _all_too_long(directory: Path) -> Path:
    rows = [turns("q" * 99, f"{n}") for n in range(20)]
    return write_chat_config(directory, data={"dataset": write_rows(directory / "d.jsonl", rows)})


def _copies(directory: Path) -> Path:
    return write_chat_config(directory, data={"dataset": write_rows(directory / "d.jsonl", [turns("q", "a")] * 30)})


ALPACA_ROW = {"instruction": "q", "output": "a", "input": 1}
CASES: tuple[BadInput, ...] = (
    BadInput("chat_no_messages", _row({"text": "a"}), ("d.jsonl line 5", "no 'messages'", "['text']")),
    BadInput("chat_message_text", _row({"messages": ["a"]}), ("d.jsonl line 5", "a text as message 1")),
    BadInput("chat_surrogate", _row(turns("q", "\ud800")), ("line 5", "not UTF-8")),
    BadInput("chat_input_number", _row(ALPACA_ROW, format="instruction_output"), ("line 5", "'input'", "number")),
    BadInput("chat_text_file", _texts, ("data.format 'messages'", "text files", "JSON lines")),
    BadInput("chat_stdlib", _option(dataset="stdlib"), ("data.format 'messages'", "'stdlib'")),
    BadInput("chat_text_column", _option(columns={"text": "body"}), ("data.columns", "['text']", "messages has")),
    BadInput("chat_unknown_format", _option(format="mesages"), ("data.format", "did you mean 'messages'")),
    BadInput("chat_no_template", _no_template, ("the tokenizer has none", "data.chat_template")),
    BadInput("chat_template_missing", _template(None), ("chat.jinja", "cannot be read")),
    BadInput("chat_template_syntax", _template("{% for"), ("chat.jinja line 1", "not Jinja")),
    BadInput("chat_template_name", _template("{{ messages[0].a.b }}"), ("chat template cannot render", "no attribute")),
    BadInput("chat_all_too_long", _all_too_long, ("a split", "were dropped", "data.seq_length")),
    BadInput("chat_copies", _copies, ("30 copies of one conversation", "held-out")),
)
