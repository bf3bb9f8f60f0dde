"""Reads rows with conversations: messages, or a question and its answer, checked and in one form for all formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nxd_memopt.training.config.data import FIELDS, columns_by_field

# Who speaks in a message of ShareGPT's form, and the role of that.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "function",
}
# By which other trainers say whether a message is trained.
TRAINING_FLAGS = ("train", "trainable", "training", "loss", "loss_mask", "weight")


def conversation_text(row: Mapping[str, Any], form: str, columns: Mapping[str, str] | None = None) -> str:
    """Return a conversation as a text, which is the same for all kinds of files.

    It is a JSON object with ``messages``, what else the row has for the template, and in ``untrained`` the indices
    of answers that are not trained.

    Args:
        row: has the required columns.
        form: ``data.format``.
        columns: ``data.columns``.

    Raises:
        ValueError: the row has no conversation; the message goes on after the place of the row.
    """
    required, optional = columns_by_field(form, columns or {})
    names = required | optional
    values = {field: _without_nulls(row[column]) for field, column in names.items() if column in row}
    if form == "messages":
        given = values["messages"]
        if not isinstance(given, list):
            raise ValueError(f"has {type_of(given)} in column {names['messages']!r}, not a list of messages")
        messages = [_with_role(message, number) for number, message in enumerate(given, start=1)]
    else:
        messages = _messages(values, form, names)
    _require_messages(messages)
    conversation: dict[str, Any] = {"messages": messages}
    if untrained := _take_flags(messages):
        conversation["untrained"] = untrained
    if (tools := values.get("tools")) is not None:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError(f"has {type_of(tools)} in column {names['tools']!r}, not a list of objects")
        conversation["tools"] = tools
    if options := values.get("chat_template_kwargs"):
        if not isinstance(options, dict):
            raise ValueError(f"has {type_of(options)} in column {names['chat_template_kwargs']!r}, not an object")
        conversation["chat_template_kwargs"] = options
    return json.dumps(conversation, ensure_ascii=False, default=_refuse)


def type_of(value: Any) -> str:
    """Return the type of a value, as JSON calls it, or its Python name where JSON has none, as of a date."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object", str: "a text"}
    return names.get(type(value), f"a {type(value).__name__}")


def _messages(row: Mapping[str, Any], form: str, columns: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the messages of a question and its answer, of a row by field."""
    required, _ = FIELDS[form]
    for name in (*required, "system", "input"):
        value = row.get(name)
        if not isinstance(value, str) and (name in required or value is not None):
            raise ValueError(f"has {type_of(value)} in column {columns[name]!r}, not text")
    question, answer = (row[name] for name in required)
    # The convention of Alpaca's data: the input follows the instruction, after an empty line.
    if row.get("input"):
        question = f"{question}\n\n{row['input']}"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def _with_role(message: Any, number: int) -> Any:
    """Return a message of ShareGPT's form, or with OpenAI's list of contents, with a role and a text."""
    if not isinstance(message, dict):
        return message  # reported with the other checks
    if "from" in message:
        both = [name for name in ("role", "content") if name in message]
        if both:
            raise ValueError(f"has both 'from' and {both[0]!r} in message {number}: leave one form out")
        speaker = message["from"]
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise ValueError(f"has {speaker!r} as 'from' of message {number}, which is none of {', '.join(SPEAKERS)}")
        others = {name: value for name, value in message.items() if name not in ("from", "value")}
        message = {"role": SPEAKERS[speaker], "content": message.get("value"), **others}
    # Templates that read lists render the texts of a message one after another, without anything in between.
    if isinstance(message.get("content"), list):
        return message | {"content": "".join(_text_of_part(part, number) for part in message["content"])}
    return message


def _text_of_part(part: Any, number: int) -> str:
    """Return the text of ``{type: text, text: ...}``."""
    if not isinstance(part, dict) or "type" not in part:
        raise ValueError(f"has {type_of(part)} without a type in the content of message {number}, not type and text")
    if part["type"] != "text":
        raise ValueError(f"has a part of the type {part['type']!r} in message {number}: only text is read")
    if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise ValueError(f"has a part with {list(part)} in the content of message {number}, not a type and a text")
    return part["text"]


def _require_messages(messages: list[Any]) -> None:
    """Raise ``ValueError`` unless all are messages, at least one of the assistant."""
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


def _take_flags(messages: list[dict[str, Any]]) -> list[int]:
    """Remove the entries that say whether a message is trained; return the indices of answers that are not."""
    # The entries are removed: a template would print some of them, and a row with them and one without would differ.
    untrained = []
    for index, message in enumerate(messages):
        values = {name: message.pop(name) for name in TRAINING_FLAGS if name in message}
        flags = list(values.values())
        if any(flag not in (0, 1) for flag in flags) or any(flag != flags[0] for flag in flags):
            raise ValueError(
                f"has {json.dumps(values, default=repr)} in message {index + 1}: only true and 1, or false and 0, say "
                "whether it is trained, each entry in the same way"
            )
        is_answer = message["role"] == "assistant"
        if any(flags) and not is_answer:
            raise ValueError(
                f"has {next(iter(values))} in message {index + 1} of the role {message['role']}: only messages of the "
                "assistant are trained (data.train_on_input trains all)"
            )
        if flags and not any(flags) and is_answer:
            untrained.append(index)
    if all(index in untrained for index, message in enumerate(messages) if message["role"] == "assistant"):
        raise ValueError("has no message of the assistant that is trained")
    return untrained


def _refuse(value: Any) -> None:
    """Raise ``ValueError`` for a value of a table that JSON does not have."""
    raise ValueError(f"has {type_of(value)}, which JSON does not have: write it as text")


def _without_nulls(value: Any) -> Any:
    """Return nested objects without entries that are null."""
    # In a table all objects of a column have the same entries: those that an object lacks are
    # null. A template would render them, and a row of JSON lines in another way than one of a table.
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value
