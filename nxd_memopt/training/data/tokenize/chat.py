"""Turns conversations into tokens: the chat template, the assistant's tokens, and conversations that are too long."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
import numpy as np
from tokenizers import processors

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packing import NOT_TRAINED, Tokens, trained_tokens
from nxd_memopt.training.data.tokenize.chat_template import ChatTemplate, Span, TemplateError
from nxd_memopt.training.data.tokenize.template_parts import readable
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary

QUOTED_CHARACTERS = 60
NO_TOKENS = np.empty(0, dtype=np.int32)


class Encoded(NamedTuple):
    """Tokens of a document, and what became of it.

    Args:
        tokens: with the flags of ``packing``; empty if the document is left out.
        outcome: ``cut`` and ``dropped`` are of ``data.long_conversations``, ``skipped`` of
            ``data.on_bad_rows``.
        problem: why a skipped conversation is not rendered or trained; the message goes on after its place.
    """

    tokens: Tokens
    outcome: Literal["complete", "cut", "dropped", "skipped"] = "complete"
    problem: str = ""


def with_chat_template(vocabulary: Vocabulary, config: DataConfig) -> Vocabulary:
    """Return ``vocabulary`` with the chat template of the run; unchanged for texts.

    Raises:
        ValueError: conversations cannot be rendered: there is no template, it is not Jinja, or the
            tokenizer does not say which characters a token stands for.
    """
    if not config.has_conversations:
        return vocabulary
    tokenizer = vocabulary.tokenizer
    if config.chat_template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = _template_of(Path(config.chat_template))
    if tokenizer.chat_template is None:
        raise ValueError(
            f"data.format {config.format!r} needs a chat template, and the tokenizer has none: take the tokenizer of a "
            "chat model, or name a Jinja file in data.chat_template"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"data.format {config.format!r} needs a tokenizer of the tokenizers library, which says which characters a "
            f"token stands for, and {type(tokenizer).__name__} is not one: convert it with transformers"
        )
    return dataclasses.replace(vocabulary, tokenizer=tokenizer)


def _template_of(path: Path) -> str:
    """Return the template of a file."""
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.chat_template {path} cannot be read: {error}: name a Jinja file") from error
    try:
        ChatTemplate(template).render({"messages": []})
    except TemplateError as error:
        # There is no message to render: a conversation's own error is reported with it.
        if isinstance(syntax := error.__cause__, jinja2.TemplateSyntaxError):
            raise ValueError(
                f"data.chat_template {path} line {syntax.lineno} is not Jinja: {syntax.message}"
            ) from error
    return template


class ConversationEncoder:
    """Renders and tokenizes conversations, and flags the tokens that are not trained.

    Args:
        vocabulary: of ``with_chat_template``.
        config: S, and what is trained.
    """

    def __init__(self, vocabulary: Vocabulary, config: DataConfig) -> None:
        self._vocabulary = vocabulary
        self._config = config
        # The post-processors of some tokenizers leave spaces out of the characters of a token, which
        # may be the end of a question. Without special tokens they do nothing else.
        self._tokenizer = copy.deepcopy(vocabulary.tokenizer)
        self._tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        added = vocabulary.tokenizer.added_tokens_decoder
        self._stripping = [token for token, each in added.items() if each.lstrip or each.rstrip]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the tokens of conversations of ``conversations.conversation_text``.

        Raises:
            ValueError: a token is outside of the vocabulary.
        """
        rendered: list[tuple[str, list[Span]]] = []
        encoded: list[Encoded | None] = []
        for text in texts:
            conversation = json.loads(text)
            try:
                rendered.append(self._rendered(conversation))
                encoded.append(None)
            except TemplateError as error:
                encoded.append(_skipped(conversation["messages"][0].get("content") or "", str(error)))
        fitted = iter(self._tokens(rendered))
        return [each or next(fitted) for each in encoded]

    def _rendered(self, conversation: dict[str, Any]) -> tuple[str, list[Span]]:
        """Return the rendered conversation, and the characters of the assistant."""
        untrained = conversation.get("untrained")
        if self._config.train_on_input and untrained:
            raise TemplateError(
                f"message {untrained[0] + 1} is not to be trained, and data.train_on_input trains all tokens: set it "
                "to false"
            )
        return rendered_spans(self._vocabulary.tokenizer, conversation)

    def _tokens(self, rendered: list[tuple[str, list[Span]]]) -> list[Encoded]:
        """Return the flagged tokens of rendered conversations."""
        if not rendered:
            return []
        # The full text is tokenized at once, as transformers' apply_chat_template does; the
        # template has the begin-of-text token.
        encoded = self._tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        tokens = zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
        return [self._fitted(ids, offsets, *each) for ids, offsets, each in tokens]

    def _fitted(self, ids: list[int], offsets: list[Span], text: str, spans: list[Span]) -> Encoded:
        """Return the flagged tokens of a conversation, at most S."""
        length = self._config.seq_length
        if not ids:
            return Encoded(NO_TOKENS, "dropped")
        self._vocabulary.require_inside(min(ids), max(ids))
        tokens = np.asarray(ids, dtype=np.int32)
        if not self._config.train_on_input:
            characters = np.asarray(offsets)
            # White space that an added token takes from its neighbours is not a part of it.
            for index in np.flatnonzero(np.isin(tokens, self._stripping)):
                start, end = offsets[index]
                own = text[start:end].strip() or text[start:end]
                start = text.index(own, start)
                characters[index] = start, start + len(own)
            tokens[~inside(characters, spans)] |= NOT_TRAINED
            # Read as a conversation, it would train nothing.
            if not trained_tokens(tokens[None, :], isolated=False):
                return _skipped(
                    text,
                    "the tokens of its answers have characters of the questions too, and none would be trained: end "
                    "answers with an end-of-text token in the chat template",
                )
        if len(tokens) <= length:
            return Encoded(tokens)
        # What remains may be a question alone.
        is_cut = self._config.long_conversations == "cut" and trained_tokens(tokens[None, :length], isolated=False) > 0
        return Encoded(tokens[:length], "cut") if is_cut else Encoded(NO_TOKENS, "dropped")


def _skipped(beginning: str, reason: str) -> Encoded:
    """Return what becomes of a conversation that cannot be trained; its place precedes the message."""
    quoted = json.dumps(beginning[:QUOTED_CHARACTERS], ensure_ascii=False)
    return Encoded(NO_TOKENS, "skipped", f"the conversation that begins with {quoted}: {reason}")


def inside(offsets: Any, spans: Sequence[Span]) -> Any:
    """Return which tokens stand for characters of the spans only, ``[tokens]`` bool.

    Args:
        offsets: first and last character + 1 of each token, ``[tokens, 2]``.
        spans: ranges of characters.
    """
    # A token across a bound has characters of the question, or was not there when the model had to
    # answer: it is not trained.
    starts, ends = offsets[:, 0], offsets[:, 1]
    found = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        found |= (starts >= start) & (ends <= end) & (starts < end)
    return found


def rendered_spans(tokenizer: Any, conversation: dict[str, Any]) -> tuple[str, list[Span]]:
    """Return the text of a conversation, and the ranges of characters of the answers that are trained.

    A template marks them with ``{% generation %}``. Otherwise the messages before each one of the
    assistant are rendered with the prompt for an answer, and those up to it: the text that the second has
    more is what the model has to say. Both must be a beginning of the full text.

    Args:
        tokenizer: has the chat template.
        conversation: of ``conversations.conversation_text``.

    Raises:
        TemplateError: the template fails, leaves a part of the conversation out, or changes what it
            rendered for fewer messages.
    """
    text = tokenizer.get_chat_template(None, conversation.get("tools"))
    template = ChatTemplate(text, tokenizer.special_tokens_map)
    conversation = readable(template, conversation)
    answers = [index for index, message in enumerate(conversation["messages"]) if message["role"] == "assistant"]
    untrained = conversation.get("untrained", [])
    text, spans = template.render(conversation, marks=template.marks_answers)
    # Marks have an order and no names. A template that marks a part of a message, or two, gives no way to know the
    # range of one message.
    if template.marks_answers:
        if untrained and len(spans) != len(answers):
            raise TemplateError(
                f"message {untrained[0] + 1} is not to be trained, and the chat template marks {len(spans)} ranges in "
                f"{len(answers)} messages of the assistant, so that the one of this message is not known"
            )
        if untrained:
            spans = [span for index, span in zip(answers, spans, strict=True) if index not in untrained]
    else:
        spans = [_answer(template, conversation, index, text) for index in answers if index not in untrained]
    if not any(end > start for start, end in spans):
        raise TemplateError("the chat template renders nothing that the assistant says")
    return text, spans


def _answer(template: ChatTemplate, conversation: dict[str, Any], index: int, text: str) -> Span:
    """Return the range of ``text`` that the assistant says in message ``index``."""
    remedy = "name a template with {% generation %} marks in data.chat_template"
    if index == 0:
        raise TemplateError(f"it begins with the assistant, and the chat template marks no answers: {remedy}")
    # The prompt for an answer belongs to the question: at inference, the model is given it and does not have to say it.
    question, _ = template.render(conversation, index, prompt=True)
    answered, _ = template.render(conversation, index + 1)
    for part in (question, answered):
        if not text.startswith(part):
            raise TemplateError(
                f"the chat template renders the first messages in another way when more follow, so that the answer in "
                f"message {index + 1} is not found: {remedy}"
            )
    if len(answered) <= len(question):
        raise TemplateError(f"the chat template renders nothing for message {index + 1} of the assistant: {remedy}")
    return len(question), len(answered)
