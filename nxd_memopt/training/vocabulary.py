"""The tokenizer of a run, checked against the model's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nxd_memopt.training.special_tokens import SpecialTokens


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer that fits the model.

    Args:
        tokenizer: Hugging Face tokenizer.
        size: V, the model's vocabulary size.
        end_of_text: id of the token that ends every document.
        special: the special token ids of the run and its export.

    Raises:
        ValueError: the tokenizer has more than V tokens, or ``end_of_text`` is outside [0, V).
    """

    tokenizer: Any
    size: int
    end_of_text: int
    special: SpecialTokens | None = None

    def __post_init__(self) -> None:
        if len(self.tokenizer) > self.size:
            raise ValueError(
                f"the tokenizer has {len(self.tokenizer)} tokens, more than the model's "
                f"vocab_size {self.size}: use the model's own tokenizer, or raise vocab_size in "
                "model.config_overrides"
            )
        if not 0 <= self.end_of_text < self.size:
            raise ValueError(f"end-of-text token id {self.end_of_text} is outside [0, vocab_size {self.size})")

    @property
    def notes(self) -> list[str]:
        """One line for each kind of special token on which the model's files disagree."""
        return [] if self.special is None else self.special.notes

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, each ending with ``end_of_text``.

        Raises:
            ValueError: a token id is outside [0, V).
        """
        # Checked for every token: an id outside the embedding is a device-side assertion on CUDA.
        encoded = self.tokenizer(texts, verbose=False, return_attention_mask=False)["input_ids"]
        # Some tokenizers add the end-of-text token themselves: a second one would mark an empty
        # document.
        terminated = []
        for ids in encoded:
            ends = bool(ids) and ids[-1] == self.end_of_text
            terminated.append(ids if ends else [*ids, self.end_of_text])
        largest = max(map(max, terminated))
        smallest = min(map(min, terminated))
        outside = None
        if largest >= self.size:
            outside = largest
        elif smallest < 0:
            outside = smallest
        if outside is not None:
            raise ValueError(f"token id {outside} is outside [0, vocab_size {self.size}): take the model's tokenizer")
        return terminated
