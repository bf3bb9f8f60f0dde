"""Conversations for the tests: templates of several styles, a tokenizer with one, and rows of each format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import decoders

from tests.training.runs import byte_tokenizer, write_config

# The style of ChatML: header, content, end of turn; the header of an answer is the prompt for one.
TURNS = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role[0] + ':' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
# The style of LLaMA 2: no prompt for an answer.
INSTRUCTIONS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[' + m.content + ']' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
# Shortens answers that others follow, as templates of reasoning models do.
SHORTENED = (
    "{% for m in messages %}{{ m.role[0] + ':' }}{% if loop.last or m.role == 'user' %}"
    "{{ m.content }}{% else %}{{ m.content[:2] }}{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
# Renders an answer only if a message follows.
NOT_LAST = "{% for m in messages %}{% if m.role == 'user' or not loop.last %}{{ m.content }}{% endif %}{% endfor %}"


def tokenizer(template: str | None = TURNS) -> Any:
    made = byte_tokenizer()
    made.backend_tokenizer.decoder = decoders.ByteLevel()
    made.chat_template = template
    return made


def turns(*contents: str) -> dict[str, Any]:
    """A conversation whose messages are of the user and of the assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[index % 2], "content": text} for index, text in enumerate(contents)]}


def question(number: int) -> str:
    return f"{number} times 2?"


def answer(number: int) -> str:
    return f"{2 * number}" + " yes" * (number % 4)


CONVERSATIONS = [turns(question(n), answer(n), "And?", f"no {n}") for n in range(60)]
PAIRS = [(question(n), answer(n)) for n in range(60)]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def write_chat_config(directory: Path, template: str = MARKED, **sections: Mapping[str, Any]) -> Path:
    """A run of a small random LLaMA on ``CONVERSATIONS``; returns the YAML file."""
    tokenizer(template).save_pretrained(directory / "chat_tokenizer")
    model = {"tokenizer": str(directory / "chat_tokenizer")} | dict(sections.pop("model", {}))
    data = {
        "dataset": write_rows(directory / "chats.jsonl", CONVERSATIONS),
        "format": "messages",
        "seq_length": 48,
        "held_out_every": 6,
        "eval_sequences": 64,
    } | dict(sections.pop("data", {}))
    return write_config(directory, model=model, data=data, **sections)
