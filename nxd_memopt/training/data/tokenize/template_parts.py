"""Finds what a chat template reads of a conversation: which form of tool calls, and which parts it leaves out."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from nxd_memopt.training.data.tokenize.chat_template import ChatTemplate, TemplateError

# They connect calls with results or repeat what the call says: most templates need none of them.
IDENTIFIERS = ("role", "id", "tool_call_id", "type", "index")
# How a message that has calls alone states its content, and how calls state their arguments.
CONTENTS = ("given", "absent", "null", "empty")
ARGUMENTS = ("given", "object", "text")
# The texts differ from their first character on: a template may render the beginning alone.
MARK, OTHER = "Part_{}_of_the_text", "0_others"
MARKS = re.compile(MARK.format(r"\d+"))

Form = tuple[str, str]
"""One of ``CONTENTS`` and one of ``ARGUMENTS``."""
GIVEN: Form = ("given", "given")


class Part(NamedTuple):
    """A part of a conversation that its text must depend on.

    Args:
        name: its name in messages.
        path: keys and indices that lead to it.
    """

    name: str
    path: tuple[Any, ...]

    @property
    def is_argument(self) -> bool:
        """Whether it is the arguments of a tool call."""
        return self.path[-1] == "arguments" and len(self.path) > 3


def readable(template: ChatTemplate, conversation: dict[str, Any]) -> dict[str, Any]:
    """Return the conversation in the form that the template expects.

    A template expects the arguments of a tool call as an object, which it encodes, or as JSON text. The other
    form would be encoded twice, or printed as Python prints it.

    Raises:
        TemplateError: a part of the conversation changes nothing in its text, or no form is rendered.
    """
    for name in conversation.get("chat_template_kwargs", {}):
        if not re.search(rf"\b{re.escape(name)}\b", template.text):
            raise TemplateError(f"the chat template does not read {name!r} of chat_template_kwargs: leave it out")
    # Which parts a template reads hardly depends on their words: found out once for all
    # conversations with equal roles and entries. Where that fails, the conversation itself decides.
    form, problem = _cached_form(template, json.dumps(_marked(conversation)))
    if problem:
        form, problem = _form(template, conversation, is_marked=False)
    if problem:
        raise TemplateError(problem)
    return _in_form(conversation, form)


def _parts(conversation: dict[str, Any]) -> Iterator[Part]:
    """Yield the parts of a conversation that are not empty."""
    for index, message in enumerate(conversation["messages"]):
        where = f"message {index + 1} (role {message['role']})"
        for name, value in message.items():
            if name == "tool_calls":
                for number, call in enumerate(value):
                    path = ("messages", index, name, number, *(("function",) if "function" in call else ()))
                    for entry in ("name", "arguments"):
                        if entry in call.get("function", call):
                            yield Part(f"the {entry} of a tool call in {where}", (*path, entry))
            # The result of a tool may repeat the tool's name.
            elif value and name not in IDENTIFIERS and not (name == "name" and message["role"] in ("tool", "function")):
                yield Part(where if name == "content" else f"{name!r} of {where}", ("messages", index, name))
    if conversation.get("tools"):
        yield Part("the tools", ("tools",))


def _marked(conversation: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation of the same form in which each text is a mark of its own."""
    marked = copy.deepcopy(conversation)
    marked.pop("untrained", None)
    # Templates compare the identifiers of calls and results, and some check their lengths.
    identifiers: dict[str, str] = {}
    for message in marked["messages"]:
        for entries in (message, *(message.get("tool_calls") or ())):
            for name in {"id", "tool_call_id"} & entries.keys():
                value = str(entries[name])
                entries[name] = identifiers.setdefault(value, str(len(identifiers)).zfill(len(value)))
    for number, part in enumerate(_parts(marked)):
        *path, name = part.path
        holder = _at(marked, path)
        holder[name] = _with_text(part, holder[name], MARK.format(number))
    return marked


@lru_cache(maxsize=1024)
def _cached_form(template: ChatTemplate, marked: str) -> tuple[Form, str]:
    """Return the form for the JSON of ``_marked``: equal ones have equal roles and entries."""
    return _form(template, json.loads(marked), is_marked=True)


def _form(template: ChatTemplate, conversation: dict[str, Any], *, is_marked: bool) -> tuple[Form, str]:
    """Return the first form that the template renders completely, or what is wrong with all of them."""
    # What is left out tells more than the error of a form that the row does not have.
    left_out: list[str] = []
    wrong: list[str] = []
    has_calls = any(message.get("tool_calls") for message in conversation["messages"])
    # At most 12 forms, from the given one on: the first that loses nothing is taken. Without calls there is one form.
    for form in product(CONTENTS, ARGUMENTS) if has_calls else [GIVEN]:
        candidate = _in_form(conversation, form)
        try:
            text, _ = template.render(candidate)
        except TemplateError as error:
            wrong.append(str(error))
            continue
        if problem := _wrong_arguments(candidate, text):
            wrong.append(problem)
        elif problem := _left_out(template, candidate, text, is_marked=is_marked):
            left_out.append(problem)
        else:
            return form, ""
    return GIVEN, [*left_out, *wrong][0]


def _wrong_arguments(conversation: dict[str, Any], text: str) -> str:
    """Return what the template does to arguments of the other form; an empty text if they are right."""
    for part in _parts(conversation):
        value = _at(conversation, part.path)
        if not part.is_argument or not value:
            continue
        if isinstance(value, str) and any(json.dumps(value, ensure_ascii=ascii) in text for ascii in (False, True)):
            return f"the chat template encodes {part.name} as JSON, and they are a text: write them as an object"
        if isinstance(value, dict) and repr(value) in text:
            return (
                f"the chat template prints {part.name} as Python does, and they are an object: write them as JSON text"
            )
    return ""


def _left_out(template: ChatTemplate, conversation: dict[str, Any], text: str, *, is_marked: bool) -> str:
    """Return which part of the conversation changes nothing in its text; an empty text if there is none."""
    for part in _parts(conversation):
        value = _at(conversation, part.path)
        mark = MARKS.search(str(value)) if is_marked else None
        if mark is not None and mark.group() in text:
            continue
        # The text of the part is not in the rendered text as it is: the template may encode, shorten or count it. It
        # reads the part if another value changes the text.
        other = _with_text(part, value, OTHER)
        try:
            changed, _ = template.render(_replaced(conversation, part.path, None if other == value else other))
        except TemplateError:
            continue  # it reads the part
        if changed == text:
            return (
                f"the chat template leaves out {part.name}: remove that from the row, or name a template that renders "
                "it in data.chat_template"
            )
    return ""


def _in_form(conversation: dict[str, Any], form: Form) -> dict[str, Any]:
    """Return the conversation with its calls in one form."""
    if form == GIVEN:
        return conversation
    content, arguments = form
    messages = []
    for message in conversation["messages"]:
        changed = message
        if message.get("tool_calls"):
            changed = {**message, "tool_calls": [_call_in_form(call, arguments) for call in message["tool_calls"]]}
            if content != "given" and not message.get("content"):
                changed.pop("content", None)
                changed |= {"null": {"content": None}, "empty": {"content": ""}}.get(content, {})
        messages.append(changed)
    return {**conversation, "messages": messages}


def _call_in_form(call: dict[str, Any], arguments: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object or JSON text."""
    if "function" in call:
        return {**call, "function": _call_in_form(call["function"], arguments)}
    value = call.get("arguments")
    if arguments == "object" and isinstance(value, str):
        found = _as_object(value)
        return call if found is None else {**call, "arguments": found}
    if arguments == "text" and isinstance(value, dict):
        return {**call, "arguments": json.dumps(value, ensure_ascii=False)}
    return call


def _as_object(text: str) -> dict[str, Any] | None:
    """Return the object of a JSON text; None if it has none."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _with_text(part: Part, value: Any, text: str) -> Any:
    """Return a value of the same kind for a part, with another text; unchanged if it has no text."""
    if isinstance(value, str):
        is_json = part.is_argument and _as_object(value) is not None
        return json.dumps({text: "value"}) if is_json else text
    return {text: "value"} if isinstance(value, dict) else value


def _at(value: Any, path: Sequence[Any]) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return ``value`` with another entry at ``path``; what is not on the path is shared."""
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = _replaced(value[path[0]], path[1:], new)
    return changed
