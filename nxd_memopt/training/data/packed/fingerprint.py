"""Names the packed tokens of a run by everything that they depend on: text, tokenizer and options."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.sources.corpora import WINDOW_SEQUENCES, Corpus
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.data.tokenize.windows import window_sequences

SEQUENCES_VERSION = 6  # of the rules by which documents become sequences
CONVERSATIONS_VERSION = 3  # of the rules by which a row becomes tokens
# Code, digits and letters outside of ASCII: what tokenizers treat differently.
SAMPLE = "def f(x):\n    return x + 1  # 0123456789 äöü\n"


def directory_of(parent: Path, fingerprint: str) -> Path:
    """Return the directory below ``parent`` of the packed tokens with ``fingerprint``."""
    return parent / fingerprint[:16]


def fingerprint_of(config: TrainConfig, name: str, corpus: Corpus, vocabulary: Vocabulary) -> str:
    """Return ``tokens_fingerprint`` of a source of a run, or of its ``data.validation_dataset``."""
    # Of the same text, one has held-out sequences and the other sequences of training.
    held_out = "validation " if name == config.data.validation_dataset else ""
    return tokens_fingerprint(
        config.data.of_source(name), f"{held_out}{corpus.fingerprint}", vocabulary, config.trainer.seed
    )


def tokens_fingerprint(config: DataConfig, corpus_fingerprint: str, vocabulary: Vocabulary, seed: int) -> str:
    """Return a hash of everything that the packed tokens depend on."""
    text = [
        corpus_fingerprint,
        config.seq_length,
        config.packing,
        seed,
        window_sequences(config.seq_length, WINDOW_SEQUENCES),
    ]
    if config.has_conversations:
        text += [config.format, config.train_on_input, config.long_conversations, vocabulary.tokenizer.chat_template]
        text.append(CONVERSATIONS_VERSION)
    facts = [SEQUENCES_VERSION, *text, vocabulary.size, vocabulary.end_of_text, _tokenizer_facts(vocabulary)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _tokenizer_facts(vocabulary: Vocabulary) -> list[Any]:
    """Return, as JSON values, what the encoding of a text depends on."""
    tokenizer = vocabulary.tokenizer
    # The sample covers what Python code of a tokenizer does in addition. It comes first: encoding
    # resets the truncation and padding of a fast tokenizer, which its serialization contains.
    facts: list[Any] = [vocabulary.encode([SAMPLE])[0], len(tokenizer)]
    facts.append(sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items()))
    # A fast tokenizer serializes completely: normalizer, vocabulary, merges, template. Of a slow
    # one the vocabulary is known.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = backend.to_str()
    else:
        content = json.dumps(sorted(tokenizer.get_vocab().items()))
    return [*facts, hashlib.sha256(content.encode()).hexdigest()]
