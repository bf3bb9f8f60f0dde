"""Tests which tokens of conversations are trained: styles of templates, long conversations, counts, restarts."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data import packing as packing_module
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.data.packed.fingerprint import tokens_fingerprint
from nxd_memopt.training.data.packing import ID_MASK, NOT_TRAINED, PADDING, BestFit
from nxd_memopt.training.data.sources import corpora
from nxd_memopt.training.data.sources.documents import split_documents, text_digest
from nxd_memopt.training.data.tokenize import chat
from nxd_memopt.training.data.tokenize import windows as tokens
from nxd_memopt.training.data.tokenize.chat import (
    ConversationEncoder,
    TemplateError,
    rendered_spans,
    with_chat_template,
)
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.sample import marked
from tests.training import packed_tokens
from tests.training.chats import (
    CONVERSATIONS,
    INSTRUCTIONS,
    MARKED,
    NOT_LAST,
    SHORTENED,
    TURNS,
    tokenizer,
    turns,
)
from tests.training.runs import END

CONFIG = DataConfig(format="messages", seq_length=64, eval_sequences=2)


def vocabulary(template: str = TURNS) -> Vocabulary:
    return Vocabulary(tokenizer(template), 257, END)


def trained_text(encoded: chat.Encoded) -> str:
    """The text of the trained tokens, with a bar before each that follows one that is not trained."""
    text, before, words = "", False, tokenizer()
    for token in encoded.tokens:
        is_trained = not token & NOT_TRAINED
        if is_trained:
            text += ("" if before else "|") + words.decode([token & ID_MASK])
        before = is_trained
    return text


def encode(conversation: dict[str, Any], template: str = TURNS, config: DataConfig = CONFIG) -> chat.Encoded:
    return ConversationEncoder(vocabulary(template), config).encode([json.dumps(conversation)])[0]


@pytest.mark.parametrize("template", [TURNS, MARKED, INSTRUCTIONS])
def test_the_answers_and_their_ends_are_trained(template: str) -> None:
    """Also where a question has the words of the answer, and the answer those of the template."""
    found = encode(turns("yes? a:no", "yes", "no", "a:no"), template)
    assert trained_text(found) == "|yes<end>|a:no<end>"


@pytest.mark.parametrize("template", [TURNS, MARKED, INSTRUCTIONS])
def test_the_tokens_are_those_of_transformers(template: str) -> None:
    made = tokenizer(template)
    for conversation in CONVERSATIONS[:5]:
        expected = made.apply_chat_template(
            conversation["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        found = encode(conversation, template).tokens
        assert (found & ID_MASK).tolist() == expected["input_ids"]
        if template == MARKED:
            assert ((found & NOT_TRAINED) == 0).tolist() == [bool(each) for each in expected["assistant_masks"]]


def test_train_on_input_trains_every_token() -> None:
    config = DataConfig(format="messages", seq_length=64, train_on_input=True)
    found = encode(turns("Why", "So"), config=config)
    assert trained_text(found) == "|u:Why<end>a:So<end>"


def test_a_system_message_and_consecutive_answers() -> None:
    """A conversation that cannot be rendered leaves the others in their places."""
    messages = [{"role": "system", "content": "s"}, *turns("q", "1")["messages"], {"role": "assistant", "content": "2"}]
    bad = {"messages": [{"role": "assistant", "content": "a"}]}
    texts = [json.dumps(each) for each in (bad, {"messages": messages})]
    found = ConversationEncoder(vocabulary(), CONFIG).encode(texts)
    assert [each.outcome for each in found] == ["skipped", "complete"]
    assert trained_text(found[1]) == "|1<end>|2<end>"


def test_a_token_across_the_bound_of_an_answer_is_not_trained() -> None:
    """The prompt of an answer ends inside of the token: the model never has to say it."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), ":x", "<end>"]
    made = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(symbols)}, merges=[(":", "x")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merged = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    merged.chat_template = TURNS
    encoder = ConversationEncoder(Vocabulary(merged, 258, 257), CONFIG)
    found = encoder.encode([json.dumps(turns("q", "xyz"))])[0]
    ids = [merged.convert_ids_to_tokens(int(token & ID_MASK)) for token in found.tokens if not token & NOT_TRAINED]
    assert ids == ["y", "z", "<end>"]


@pytest.mark.parametrize(
    ("template", "conversation", "says"),
    [
        (SHORTENED, turns("q", "long answer", "more", "end"), "the answer in message 2 is not found"),
        (TURNS, {"messages": [{"role": "assistant", "content": "a"}]}, "it begins with the assistant"),
        ("{{ raise_exception('roles must alternate') }}", turns("q", "a"), "roles must alternate"),
        ("{{ messages[0].content }}", turns("q", "a"), r"leaves out message 2 \(role assistant\)"),
        (NOT_LAST, turns("q", "a", "b"), "renders nothing for message 2"),
        (MARKED.replace("== 'assistant'", "== 'model'"), turns("q", "a"), "nothing that the assistant says"),
    ],
)
def test_an_answer_that_is_not_found_is_an_error(template: str, conversation: dict[str, Any], says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        rendered_spans(tokenizer(template), conversation)
    found = encode(conversation, template)
    assert (len(found.tokens), found.outcome) == (0, "skipped")
    assert re.match(rf"the conversation that begins with .*{says}", found.problem)


def test_the_date_in_a_template_is_fixed() -> None:
    """Tokens that depend on the day would differ after a restart."""
    text, _ = rendered_spans(tokenizer("{{ strftime_now('%d %b %Y') }}" + TURNS), turns("q", "a"))
    assert text.startswith("26 Jul 2024u:q")


@pytest.mark.parametrize("policy", ["cut", "drop"])
def test_long_conversations(policy: str) -> None:
    config = DataConfig(format="messages", seq_length=12, long_conversations=policy)  # pyright: ignore
    fits, too_long = encode(turns("12", "345"), config=config), encode(turns("12", "3456789"), config=config)
    only_question = encode(turns("0123456789", "a"), config=config)
    assert fits.outcome == "complete" and len(fits.tokens) == 11
    if policy == "cut":
        assert (too_long.outcome, trained_text(too_long)) == ("cut", "|34567")
    else:
        assert (too_long.outcome, len(too_long.tokens)) == ("dropped", 0)
    assert (only_question.outcome, len(only_question.tokens)) == ("dropped", 0)


def _corpus(texts: list[str]) -> corpora.Corpus:
    train, held_out = split_documents([text_digest(text) for text in texts], 20, can_cut=False)
    opened = dataclasses.replace(packed_tokens.documents(texts), train=train, held_out=held_out)
    return packed_tokens.corpus_of(opened)


def test_the_counts_are_those_of_one_run_after_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "WINDOW_TOKENS", 500)
    monkeypatch.setattr(corpora, "WINDOW_SEQUENCES", 4)
    monkeypatch.setattr(tokens, "MIN_WINDOW_SEQUENCES", 4)
    monkeypatch.setattr(tokens, "DOCUMENTS_PER_CALL", 3)
    odd = [turns("q" * (9 * n), "answer") for n in range(12)]
    texts = [json.dumps(each) for each in [*CONVERSATIONS, *odd]]
    words, corpus = vocabulary(), _corpus(texts)
    at_once = packed_tokens.write(tmp_path / "one", CONFIG, corpus, sequences=10**6, words=words)
    for sequences in range(1, 200, 12):
        directory = packed_tokens.write(tmp_path / "two", CONFIG, corpus, sequences=sequences, words=words)
        if packed_tokens.windows_of(directory).last.ended:
            break
    facts = [packed_tokens.windows_of(each).last for each in (at_once, directory)]
    assert facts[0] == facts[1]  # with the hash of the sequences
    encoded = [encode(json.loads(corpus_text)) for corpus_text, *_ in corpus.train.read(None)]  # pyright: ignore
    expected = {name: sum(each.outcome == name for each in encoded) for name in ("cut", "dropped")}
    assert facts[0].outcomes == expected and min(expected.values()) > 0
    rows = np.array(packed_tokens.rows_of(at_once))
    assert np.count_nonzero((rows & NOT_TRAINED) == 0) == sum(
        np.count_nonzero((each.tokens & NOT_TRAINED) == 0) for each in encoded
    )


def test_routers_count_questions_but_not_padding() -> None:
    packer = BestFit(16, padding_id=END, seed=0)
    packer.add(encode(turns("123", "45")).tokens)
    row = np.stack(packer.finish())
    batch = MicroBatch.of(row, divisor=1, num_boundaries=3, has_padding=True)
    assert batch.token_mask is not None
    assert batch.token_mask[0].tolist() == [True] * 11 + [False] * 5
    assert (batch.labels[0] != -100).sum() == 3 and (row & PADDING != 0).sum() == 5


def test_conversations_are_never_cut_to_hold_some_out() -> None:
    digests = [text_digest(str(n)) for n in range(3)]
    train, held_out = split_documents([*digests, min(digests)], 20, can_cut=False)
    assert all((part.start, part.stop) == (0, 1) for part in [*train, *held_out])
    assert len(held_out) == 2 and len(train) == 2  # copies are on one side


def test_a_template_file_replaces_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(INSTRUCTIONS, encoding="utf-8")
    before = vocabulary()
    found = with_chat_template(before, DataConfig(format="messages", chat_template=str(tmp_path / "chat.jinja")))
    assert found.tokenizer.chat_template == INSTRUCTIONS and before.tokenizer.chat_template == TURNS
    with pytest.raises(ValueError, match=r"the tokenizer has none.*data.chat_template"):
        with_chat_template(Vocabulary(tokenizer(None), 257, END), CONFIG)


def test_a_template_with_a_begin_of_text_token_adds_it_once() -> None:
    made = tokenizer("{{ bos_token }}" + TURNS)
    made.add_special_tokens({"bos_token": "<extra>"})
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<extra> $A", special_tokens=[("<extra>", 257)]
    )
    found = ConversationEncoder(Vocabulary(made, 258, END), CONFIG).encode([json.dumps(turns("q", "a"))])[0]
    assert (found.tokens & ID_MASK).tolist().count(257) == 1


def test_the_fingerprint_of_tokens_has_what_is_trained() -> None:
    base = tokens_fingerprint(CONFIG, "text", vocabulary(), 0)
    changed = [{"format": "prompt_completion"}, {"train_on_input": True}, {"long_conversations": "drop"}]
    others = [tokens_fingerprint(dataclasses.replace(CONFIG, **each), "text", vocabulary(), 0) for each in changed]
    others.append(tokens_fingerprint(CONFIG, "text", vocabulary(MARKED), 0))
    assert len({base, *others}) == 5
    assert tokens_fingerprint(CONFIG, "text", vocabulary(), 0) == base


def test_the_sample_marks_what_has_a_label() -> None:
    ids = torch.tensor(tokenizer()("u:hi<end>a:ok<end>")["input_ids"])
    labels = ids.masked_fill(torch.arange(10) < 7, -100)
    assert marked(ids, labels, tokenizer()) == "u:hi<end>a:⟦ok<end>⟧"
