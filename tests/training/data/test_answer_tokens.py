"""Which tokens are of an answer, to the character: tokenizers of all kinds against the characters of their tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.packing import ID_MASK, NOT_TRAINED
from nxd_memopt.training.data.tokenize.chat import ConversationEncoder
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary

# The prompt for an answer ends with a colon, or with the space after it.
TEMPLATE = (
    "{%% for m in messages %%}{%% if m.role == 'user' %%}USER: {{ m.content }} {%% else %%}"
    "ASSISTANT: {{ m.content }}<end>{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt %%}ASSISTANT:%s{%% endif %%}"
)
# The end of a line after an answer is not of it.
MARKED = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT:"
    "{% generation %} {{ m.content }}<end>{% endgeneration %}{{ '\n' }}{% endif %}{% endfor %}"
)
TEXTS = ("1 + 2", "3 + 1", "  two  spaces  ", " 3 é€𝄞 3", "yes\n", "\n 3  ", "é", "3 <tool> 3", "<tool> 3", "no")
BYTES = {symbol: byte for byte, symbol in bytes_to_unicode().items()}


def byte_level() -> Tokenizer:
    """Tokens with a space before them."""
    pairs = [("Ġ", "3"), ("Ġ", "+"), ("Ġ", "Ġ"), (":", "Ġ"), ("Ġ", "t")]
    symbols = [*sorted(BYTES), *("".join(pair) for pair in pairs)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return made


def trimming() -> Tokenizer:
    """The default of GPT-NeoX in transformers: the space is no character of its token."""
    made = byte_level()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


def sentencepiece(*, normalized: bool = False) -> Tokenizer:
    """Words that begin with a space, and bytes of characters that the vocabulary does not have."""
    letters = sorted(set("▁USERAINT:123+twospacenoy\n"))
    pairs = [("▁", "3"), ("▁", "▁"), ("▁", "+"), (":", "▁")]
    symbols = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *("".join(pair) for pair in pairs)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if normalized:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "trimming": trimming,
    "metaspace": lambda: sentencepiece(),
    "llama_2": lambda: sentencepiece(normalized=True),
}


def bytes_of(token: str, is_byte_level: bool) -> bytes:
    if is_byte_level:
        return bytes(BYTES[symbol] for symbol in token)
    found = re.fullmatch(r"<0x(..)>", token)
    return bytes.fromhex(found[1]) if found else token.replace("▁", " ").encode()


def expected(made: Any, text: str, answers: list[tuple[int, int]]) -> list[bool]:
    """Follow the bytes of the tokens through the text; a token of an answer has bytes of it alone."""
    is_byte_level = "ByteLevel" in str(made.backend_tokenizer.pre_tokenizer)
    data = text.encode()
    bounds = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in answers]
    place, found = 0, []
    for token in made(text, add_special_tokens=False)["input_ids"]:
        added = made.added_tokens_decoder.get(token)
        if added is not None:
            piece = added.content.encode()
            if added.lstrip:
                place += len(data[place:]) - len(data[place:].lstrip())
        else:
            piece = bytes_of(made.convert_ids_to_tokens(token), is_byte_level)
            if not data.startswith(piece, place):
                piece = piece.removeprefix(b" ")  # which the tokenizer has put there
        assert data.startswith(piece, place), (token, piece, data[place : place + 9])
        found.append(any(start <= place < end and place + len(piece) <= end for start, end in bounds))
        place += len(piece)
        if added is not None and added.rstrip:
            place += len(data[place:]) - len(data[place:].lstrip())
    assert place == len(data)
    return found


@pytest.mark.parametrize(
    ("jinja", "space", "after"), [(TEMPLATE % "", "", ""), (TEMPLATE % " ", " ", ""), (MARKED, "", "\n")]
)
@pytest.mark.parametrize("strips", ["", "lstrip", "rstrip"])
@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_a_token_of_an_answer_has_characters_of_it_alone(
    name: str, strips: str, jinja: str, space: str, after: str
) -> None:
    made: Any = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[name]())
    stripping = {strips: True} if strips else {}
    made.add_special_tokens({"eos_token": AddedToken("<end>", special=True, **stripping)})
    made.add_tokens([AddedToken("<tool>", normalized=False, **stripping)])
    made.chat_template = jinja
    encoder = ConversationEncoder(Vocabulary(made, len(made), made.eos_token_id), DataConfig(format="messages"))
    for question, answer in pairwise(TEXTS):
        messages, text, answers = [], "", []
        for say in (answer, question):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": say}]
            text += f"USER: {question} ASSISTANT:{space}"
            answers.append((len(text), len(text) + len(f"{'' if space else ' '}{say}<end>")))
            text += f"{'' if space else ' '}{say}<end>{after}"
        tokens = encoder.encode([json.dumps({"messages": messages})])[0].tokens
        assert (tokens & ID_MASK).tolist() == made(text, add_special_tokens=False)["input_ids"]
        assert ((tokens & NOT_TRAINED) == 0).tolist() == expected(made, text, answers), text


def test_a_conversation_without_a_token_to_train_is_refused() -> None:
    """A prompt that ends with a space, and answers of one token with that space: no token is of the answer alone."""
    made: Any = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<end>")
    made.chat_template = (TEMPLATE % " ").replace("<end>", "")
    encoder = ConversationEncoder(Vocabulary(made, len(made), made.eos_token_id), DataConfig(format="messages"))
    rows = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}] for answer in ("3", "30")]
    refused, trained = encoder.encode([json.dumps({"messages": messages}) for messages in rows])
    assert refused.outcome == "skipped" and "none would be trained" in refused.problem and not len(refused.tokens)
    # Of the other, the second digit is trained.
    assert not trained.problem and ((trained.tokens & NOT_TRAINED) == 0).tolist()[-2:] == [False, True]
