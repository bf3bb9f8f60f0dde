"""Reads rows with conversations: messages, or a question and its answer, checked and in one form for all formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nxd_memopt.training.bad_rows import NO_COLUMN, NOT_UTF8, BadRow, RowReader, TextRows, bad_row, type_of
from nxd_memopt.training.data_options import DataConfig

NOT_A_CONVERSATION = "not a conversation"
# Columns of each format: the required ones, and those that a row may have.
COLUMNS = {
    "messages": (("messages",), ("tools",)),
    "prompt_completion": (("prompt", "completion"), ("system",)),
    "instruction_output": (("instruction", "output"), ("system", "input")),
}


def row_reader(config: DataConfig) -> RowReader:
    """Return what reads rows of ``data.format``."""
    if config.has_conversations:
        return ConversationRows(config.format)
    return TextRows(config.text_column)


@dataclass(frozen=True)
class ConversationRows:
    """Reads a conversation as a text: a JSON object with ``messages``, and ``tools`` if the row has some.

    Args:
        format: ``data.format``.
    """

    format: str

    @property
    def columns(self) -> list[str]:
        """The columns that a row must have."""
        return list(COLUMNS[self.format][0])

    @property
    def optional_columns(self) -> list[str]:
        """The columns that are read if a row has them."""
        return list(COLUMNS[self.format][1])

    def read(self, row: Mapping[str, Any], place: str) -> dict[str, str | None]:
        """Return the row's conversation, or what is wrong with it."""
        missing = [name for name in self.columns if name not in row]
        if missing:
            wanted = f"(data.format {self.format})"
            return bad_row(NO_COLUMN, f"{place} has no {missing[0]!r} {wanted}: its columns are {list(row)}")
        try:
            messages = row["messages"] if self.format == "messages" else self._messages(row)
            _require_messages(messages)
            conversation = {"messages": messages}
            if row.get("tools") is not None and self.format == "messages":
                conversation["tools"] = _tools(row["tools"])
        except ValueError as error:
            return bad_row(NOT_A_CONVERSATION, f"{place} {error} (data.format {self.format})")
        text = json.dumps(conversation, ensure_ascii=False)
        text.encode()  # half of a surrogate pair has no UTF-8 form
        return {"text": text, "kind": None, "description": None}

    def _messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the messages of a question and its answer."""
        for name in [*self.columns, *self.optional_columns]:
            value = row.get(name)
            if not isinstance(value, str) and (name in self.columns or value is not None):
                raise ValueError(f"has {type_of(value)} in column {name!r}, not text")
        question, answer = (row[name] for name in self.columns)
        # The convention of Alpaca's data: the input follows the instruction, after an empty line.
        if row.get("input"):
            question = f"{question}\n\n{row['input']}"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if row.get("system"):
            messages.insert(0, {"role": "system", "content": row["system"]})
        return messages


def _require_messages(messages: Any) -> None:
    """Raise ``ValueError`` unless ``messages`` is a list of messages, at least one of the assistant."""
    if not isinstance(messages, list):
        raise ValueError(f"has {type_of(messages)} in column 'messages', not a list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"has {type_of(message)} as message {number}, not an object with role and content")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"has no text as role of message {number}: its entries are {list(message)}")
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, str) and not (content is None and calls):
            raise ValueError(f"has {type_of(content)} as content of message {number}, not text")
        if not isinstance(calls, list | None):
            raise ValueError(f"has {type_of(calls)} as tool_calls of message {number}, not a list")
        if message["role"] == "assistant" and not calls and not str(content).strip():
            raise ValueError(f"has an empty message {number} of the assistant")
        # OpenAI's way to leave a message out of the loss: trained, it would be wrong without a word.
        if "weight" in message:
            raise ValueError(f"has a weight in message {number}, which is not supported: remove it, or the row")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("has no message of the role assistant")


def _tools(tools: Any) -> list[Any]:
    """Return the descriptions of tools."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"has {type_of(tools)} in column 'tools', not a list of objects")
    return tools


def table_row(row: Any, reader: RowReader, place: str) -> dict[str, str | None]:
    """Return a row of a table, as ``pyarrow`` or ``datasets`` gives it."""
    return reader.read(_without_nulls(row), place)


def _without_nulls(value: Any) -> Any:
    """Return nested objects without entries that are null."""
    # In a table all objects of a column have the same entries: those that an object lacks are
    # null. A template would render them.
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


def bad_table_rows(dataset: Any, reader: RowReader, place: Any) -> Iterator[BadRow]:
    """Yield the rows of a ``datasets.Dataset`` that are not conversations; ``place`` names a row by its index."""
    for index in range(len(dataset)):
        try:
            row = table_row(dataset[index], reader, place(index))
        except UnicodeError as error:
            row = bad_row(NOT_UTF8, f"{place(index)} is not UTF-8 ({error})")
        if row["kind"] is not None:
            yield BadRow(index, row["kind"], str(row["description"]))
