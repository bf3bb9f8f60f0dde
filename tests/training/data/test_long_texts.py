"""Tests that the pieces of a long text have the tokens of the whole text, with tokenizers of every kind."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nxd_memopt.checkpoint.huggingface.tokenizers import LLAMA3_WORDS
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.tokenize import encoding, long_texts
from nxd_memopt.training.data.tokenize.encoding import DocumentEncoder
from nxd_memopt.training.data.tokenize.long_texts import long_text_ids
from tests.training.packed_tokens import vocabulary

CODE = inspect.getsource(typing)[:40_000]
TEXTS = {
    "code": CODE,
    "ends of lines of Windows": CODE.replace("\n", "\r\n"),
    "one line": CODE.replace("\n", " "),
    "one word": CODE.replace("\n", "").replace(" ", ""),
    "other scripts": "äöü ß—“x” 漢字かな \u0301e\u0301 한글 " * 1500,
}
SPECIAL = ["<unk>", "<s>", "</s>"]


def trained(model: models.Model, trainer: trainers.Trainer, **parts: object) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator([CODE[start : start + 2000] for start in range(0, 20_000, 2000)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level(splitter: str | None = None) -> PreTrainedTokenizerFast:
    parts = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter is None)]
    if splitter:
        parts.insert(0, pre_tokenizers.Split(Regex(splitter), "isolated"))
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
    )
    return trained(models.BPE(), trainer, pre_tokenizer=pre_tokenizers.Sequence(parts))


def metaspace() -> PreTrainedTokenizerFast:
    """LLaMA 2's: a space before the text, a begin-of-text token, and no words."""
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, max_token_length=8, special_tokens=SPECIAL)
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model = models.BPE(unk_token="<unk>", fuse_unk=True)
    tokenizer = trained(model, trainer, normalizer=spaces, pre_tokenizer=pre_tokenizers.Split("\n", "isolated"))
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def wordpiece() -> PreTrainedTokenizerFast:
    trainer = trainers.WordPieceTrainer(vocab_size=500, show_progress=False, special_tokens=SPECIAL)
    ends = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    parts = {"normalizer": normalizers.BertNormalizer(), "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}
    return trained(models.WordPiece(unk_token="<unk>"), trainer, post_processor=ends, **parts)


def added() -> PreTrainedTokenizerFast:
    """Tokens across the end of a line, and tokens that take the space next to them."""
    tokenizer = byte_level()
    names = ["\nclass", "\nimport", " def"]
    tokens = [AddedToken(name) for name in names] + [AddedToken("self", single_word=True, lstrip=True, rstrip=True)]
    tokenizer.add_tokens(tokens)
    return tokenizer


@pytest.mark.parametrize(
    "build",
    [
        byte_level,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (lambda: byte_level(LLAMA3_WORDS), wordpiece)),
        metaspace,
        added,
    ],
)
def test_pieces_have_the_tokens_of_the_whole_text(
    build: Callable[[], PreTrainedTokenizerFast], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build()
    monkeypatch.setattr(long_texts, "PIECES_PER_CALL", 7)
    for size in (300, 4000):
        monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", size)
        for name, text in TEXTS.items():
            expected = tokenizer(text, verbose=False)["input_ids"]
            assert long_text_ids(tokenizer, text).tolist() == expected, name
            pieces = len(list(long_texts._cuts(tokenizer, text)))
            assert (pieces > 0) == (name != "one word"), name


def test_a_long_document_has_the_tokens_of_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the end-of-text token, in the place of the document; a blank one has none."""
    encoder = DocumentEncoder(vocabulary(), DataConfig())
    documents = ["short", CODE, " " * 900, np.array([5, 6], np.int32)]
    expected = encoder.encode(documents)
    monkeypatch.setattr(encoding, "LONG_CHARACTERS", 600)
    monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", 500)
    longest: list[int] = []
    call = PreTrainedTokenizerFast.__call__

    def recorded(self: Any, text: str | list[str], **options: Any) -> Any:
        longest.append(max(map(len, [text] if isinstance(text, str) else text)))
        return call(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", recorded)
    found = encoder.encode(documents)
    assert [each.tokens.tolist() for each in found] == [each.tokens.tolist() for each in expected]
    assert max(longest) < 1100
