"""Shows, before the first step, a conversation as it is trained: which of its tokens have a label."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch

from nxd_memopt.modules.causal_lm import IGNORE_INDEX
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.data.packing import documents_per_row
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.state import Training

MARKS = ("⟦", "⟧")
SHOWN_CHARACTERS = 2000


def conversation_notes(training: Training, config: TrainConfig, vocabulary: Vocabulary) -> list[str]:
    """Return the lines of the start report with the first conversation of the training data; none for texts."""
    if not config.data.has_conversations or not training.tokens.trains():
        return []
    row = training.tokens.training_sequences().rows(range(1))
    # The labels that the first step has, not the flags they are made from.
    boundaries = documents_per_row(row) + 1 if config.data.isolate_documents else None
    batch = MicroBatch.of(row, divisor=1, num_boundaries=boundaries)
    ids, labels = batch.ids[0], batch.labels[0]
    if batch.documents is not None:
        end = int(batch.documents.boundaries[1])
        ids, labels = ids[:end], labels[:end]
    text = marked(ids, labels, vocabulary.tokenizer)
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]} ... and {len(text) - SHOWN_CHARACTERS:,} more characters"
    lines = "\n".join(f"  | {line}" for line in text.split("\n"))
    notes = [f"a conversation of the training data; what is trained is between {MARKS[0]} and {MARKS[1]}:\n{lines}"]
    return [*notes, *_end_notes(ids, labels, vocabulary)]


def marked(ids: torch.Tensor, labels: torch.Tensor, tokenizer: Any) -> str:
    """Return the text of tokens ``[n]`` with marks around those that have a label."""
    text = ""
    for is_trained, group in groupby(
        zip(ids.tolist(), labels.tolist(), strict=True), lambda pair: pair[1] != IGNORE_INDEX
    ):
        part = tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
        text += f"{MARKS[0]}{part}{MARKS[1]}" if is_trained else part
    return text


def _end_notes(ids: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary) -> list[str]:
    """Return a line if answers do not end with a token at which the export stops to generate."""
    # White space may follow the end of a turn.
    trained = [token for token in ids[labels != IGNORE_INDEX].tolist() if vocabulary.tokenizer.decode([token]).strip()]
    known = [vocabulary.end_of_text]
    if vocabulary.special is not None:
        known = vocabulary.special.ends_of_answers()
    if not trained or set(known) & set(trained):
        return []
    token = vocabulary.tokenizer.convert_ids_to_tokens(trained[-1])
    names = ", ".join(vocabulary.tokenizer.convert_ids_to_tokens(known))
    return [
        f"no answer of this conversation has an end-of-text token of the model ({names}), the last trained token is "
        f"{token}: the export would not stop after an answer; if {token} ends a turn, set data.end_of_text to it"
    ]
