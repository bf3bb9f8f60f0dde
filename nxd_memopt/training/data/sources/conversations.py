"""Reads rows with conversations: messages, or a question and its answer, checked and in one form for all formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.bad_rows import NO_COLUMN, NOT_UTF8, BadRow, RowReader, TextRows, bad_row, type_of

NOT_A_CONVERSATION = "not a conversation"
# Columns of each format: the required ones, and those that a row may have.
COLUMNS = {
    "messages": (("messages",), ()),
    "prompt_completion": (("prompt", "completion"), ("system",)),
    "instruction_output": (("instruction", "output"), ("system", "input")),
}
# Columns that a row of each format may have; the template reads them.
FOR_TEMPLATE = ("tools", "chat_template_kwargs")
# By which other trainers say whether a message is trained.
SWITCHES = ("train", "trainable", "training", "loss", "loss_mask", "weight")


def row_reader(config: DataConfig) -> RowReader:
    """Return what reads rows of ``data.format``."""
    if config.has_conversations:
        return ConversationRows(config.format)
    return TextRows(config.text_column)


@dataclass(frozen=True)
class ConversationRows:
    """Reads a conversation as a text: a JSON object with ``messages`` and what else the row has for the template.

    The text is the same for all kinds of files. ``untrained`` has the indices of answers that are not trained.

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
        return [*COLUMNS[self.format][1], *FOR_TEMPLATE]

    def read(self, row: Mapping[str, Any], place: str) -> dict[str, str | None]:
        """Return the row's conversation, or what is wrong with it."""
        missing = [name for name in self.columns if name not in row]
        if missing:
            wanted = f"(data.format {self.format})"
            return bad_row(NO_COLUMN, f"{place} has no {missing[0]!r} {wanted}: its columns are {list(row)}")
        names = [*self.columns, *self.optional_columns]
        values = {name: _without_nulls(row[name]) for name in names if name in row}
        try:
            messages = values["messages"] if self.format == "messages" else self._messages(values)
            _require_messages(messages)
            conversation = {"messages": messages}
            if untrained := _take_switches(messages):
                conversation["untrained"] = untrained
            if values.get("tools") is not None:
                conversation["tools"] = _tools(values["tools"])
            if values.get("chat_template_kwargs"):
                conversation["chat_template_kwargs"] = _options(values["chat_template_kwargs"])
            text = json.dumps(conversation, ensure_ascii=False, default=_refuse)
        except ValueError as error:
            return bad_row(NOT_A_CONVERSATION, f"{place} {error} (data.format {self.format})")
        text.encode()  # half of a surrogate pair has no UTF-8 form
        return {"text": text, "kind": None, "description": None}

    def _messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the messages of a question and its answer."""
        for name in [*self.columns, *COLUMNS[self.format][1]]:
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
        for call in calls or ():
            function = call.get("function", call) if isinstance(call, dict) else call
            arguments = function.get("arguments", "") if isinstance(function, dict) else None
            if not isinstance(arguments, str | dict):
                raise ValueError(
                    f"has a tool call in message {number} without arguments that are an object or JSON text"
                )
        if message["role"] == "assistant" and not calls and not str(content).strip():
            raise ValueError(f"has an empty message {number} of the assistant")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("has no message of the role assistant")


def _take_switches(messages: list[dict[str, Any]]) -> list[int]:
    """Remove the entries that say whether a message is trained; return the indices of answers that are not."""
    untrained = []
    for index, message in enumerate(messages):
        values = {name: message.pop(name) for name in SWITCHES if name in message}
        for name, value in values.items():
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise ValueError(
                    f"has {json.dumps(value, default=repr)} as {name} of message {index + 1}: only true and 1, or "
                    "false and 0, say whether it is trained"
                )
        if len({bool(value) for value in values.values()}) > 1:
            raise ValueError(f"has {' and '.join(values)} in message {index + 1}, which contradict each other")
        is_answer = message["role"] == "assistant"
        if any(values.values()) and not is_answer:
            raise ValueError(
                f"has {next(iter(values))} in message {index + 1} of the role {message['role']}: only messages of the "
                "assistant are trained (data.train_on_input trains all)"
            )
        if values and not any(values.values()) and is_answer:
            untrained.append(index)
    if all(index in untrained for index, message in enumerate(messages) if message["role"] == "assistant"):
        raise ValueError("has no message of the assistant that is trained")
    return untrained


def _options(options: Any) -> dict[str, Any]:
    """Return the options of the chat template."""
    if not isinstance(options, dict):
        raise ValueError(f"has {type_of(options)} in column 'chat_template_kwargs', not an object")
    return options


def _refuse(value: Any) -> None:
    """Raise ``ValueError`` for a value of a table that JSON does not have."""
    raise ValueError(f"has {type_of(value)}, which JSON does not have: write it as text")


def _tools(tools: Any) -> list[Any]:
    """Return the descriptions of tools."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"has {type_of(tools)} in column 'tools', not a list of objects")
    return tools


def _without_nulls(value: Any) -> Any:
    """Return nested objects without entries that are null."""
    # In a table all objects of a column have the same entries: those that an object lacks are
    # null. A template would render them, and a row of JSON lines in another way than one of a table.
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


def bad_table_rows(dataset: Any, reader: RowReader, place: Any) -> Iterator[BadRow]:
    """Yield the rows of a ``datasets.Dataset`` that are not conversations; ``place`` names a row by its index."""
    for index in range(len(dataset)):
        try:
            row = reader.read(dataset[index], place(index))
        except UnicodeError as error:
            row = bad_row(NOT_UTF8, f"{place(index)} is not UTF-8 ({error})")
        if row["kind"] is not None:
            yield BadRow(index, row["kind"], str(row["description"]))
