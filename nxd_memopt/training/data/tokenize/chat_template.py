"""Renders conversations by a chat template, in transformers' Jinja sandbox."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

# The keyword by which a template marks what the assistant says (transformers' extension of Jinja).
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Templates that state today's date: the tokens of a run may not depend on the day. LLaMA 3's default.
DATE = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)

Span = tuple[int, int]
"""Range of characters of a rendered conversation."""


class TemplateError(ValueError):
    """The chat template cannot render a conversation, leaves a part of it out, or does not show the answers."""


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a tokenizer.

    Args:
        text: Jinja.
        special: the tokenizer's special tokens by name, which the template may read.
    """

    text: str
    special: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def marks_answers(self) -> bool:
        """Whether it says itself where the assistant speaks."""
        return GENERATION.search(self.text) is not None

    def render(
        self, conversation: Mapping[str, Any], count: int | None = None, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of the first ``count`` messages, and with ``marks`` the ranges that the template marks.

        Args:
            conversation: ``messages``, and optionally ``tools`` and ``chat_template_kwargs``.
            count: number of messages; None stands for all.
            prompt: whether the prompt for an answer follows.
            marks: whether to look for the marks.

        Raises:
            TemplateError: the template fails.
        """
        messages = conversation["messages"][:count]
        options = {**self.special, **conversation.get("chat_template_kwargs", {})}
        try:
            # transformers annotates one text; it returns two lists.
            rendered: Any = render_jinja_template(
                [messages],
                tools=conversation.get("tools"),
                chat_template=self.text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                strftime_now=DATE.strftime,
                **options,
            )
        except Exception as error:
            # A template raises whatever its author has chosen, and Jinja what Python code raises.
            raise TemplateError(f"the chat template cannot render {len(messages)} of its messages: {error}") from error
        texts, spans = rendered
        return texts[0], spans[0] if spans else []
