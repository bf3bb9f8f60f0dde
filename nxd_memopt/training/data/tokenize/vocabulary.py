"""The tokenizer of a run, checked against the model's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nxd_memopt.training.data.tokenize.special_tokens import SpecialTokens

# Bytes that no UTF-8 text contains (RFC 3629).
_NOT_IN_TEXT = {0xC0, 0xC1, *range(0xF5, 0x100)}


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer that fits the model.

    Args:
        tokenizer: Hugging Face tokenizer.
        size: V, the model's vocabulary size.
        end_of_text: id of the token that ends every document.
        special: the special token ids of the run and its export.

    Raises:
        ValueError: the tokenizer has tokens outside [0, V) that are no added tokens, or
            ``end_of_text`` is outside.
    """

    tokenizer: Any
    size: int
    end_of_text: int
    special: SpecialTokens | None = None

    def __post_init__(self) -> None:
        # Of a model's own tokenizer, only tokens that were added to it have no row, such as a padding
        # token that no text contains: the ids of each text are checked.
        beyond = self._beyond()
        if beyond and set(beyond) - set(self.tokenizer.get_added_vocab()):
            raise ValueError(
                f"the tokenizer needs {rows_for(self.tokenizer)} rows, more than the model's vocab_size {self.size}: "
                "use the model's own tokenizer, or set model.resize_embedding to give each token a row"
            )
        if not 0 <= self.end_of_text < self.size:
            raise ValueError(f"end-of-text token id {self.end_of_text} is outside [0, vocab_size {self.size})")

    @property
    def notes(self) -> list[str]:
        """Lines for special tokens on which the model's files disagree, and for tokens or text without the other."""
        notes = [] if self.special is None else list(self.special.notes)
        beyond = self._beyond()
        if beyond:
            notes.append(
                f"{len(beyond)} added tokens of the tokenizer, such as {beyond[0]!r}, are outside of the model's "
                f"vocab_size {self.size}: text with one of them is an error, unless model.resize_embedding gives them "
                "rows"
            )
        missing = bytes_without_token(self.tokenizer)
        if missing:
            shown = ", ".join(f"0x{byte:02X}" for byte in missing[:4])
            notes.append(
                f"the tokenizer has no token for {len(missing)} of the 243 bytes of UTF-8 text ({shown}, ...) and "
                "drops them: characters with these bytes are trained on in part or not at all"
            )
        return notes

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
        self.require_inside(min(map(min, terminated)), max(map(max, terminated)))
        return terminated

    def terminated(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids of a document that was tokenized before, ending with ``end_of_text``.

        Raises:
            ValueError: a token id is outside [0, V).
        """
        if not len(ids):
            return ids
        self.require_inside(int(ids.min()), int(ids.max()))
        return ids if ids[-1] == self.end_of_text else np.append(ids, np.int32(self.end_of_text))

    def require_inside(self, smallest: int, largest: int) -> None:
        """Raise ``ValueError`` unless all ids between two are rows of the embedding."""
        if smallest < 0 or largest >= self.size:
            outside = largest if largest >= self.size else smallest
            raise ValueError(
                f"token id {outside} is outside [0, vocab_size {self.size}): take the model's tokenizer, or set "
                "model.resize_embedding to give each token of this one a row"
            )

    def _beyond(self) -> list[str]:
        """Return the tokens whose ids are no rows of the embedding."""
        known = self.tokenizer.get_vocab()
        return sorted((token for token in known if known[token] >= self.size), key=known.__getitem__)


def rows_for(tokenizer: Any) -> int:
    """Return the rows of an embedding for all tokens of a tokenizer, whose ids may have gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def bytes_without_token(tokenizer: Any) -> list[int]:
    """Return the bytes of UTF-8 text that a byte-level BPE tokenizer drops without a word.

    Other tokenizers give unknown text an unknown token, or fall back to bytes.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or type(fast.model).__name__ != "BPE" or "ByteLevel" not in str(fast.pre_tokenizer):
        return []
    if fast.model.unk_token is not None or fast.model.byte_fallback:
        return []
    known = set(tokenizer.get_vocab())
    missing = {byte for byte, symbol in bytes_to_unicode().items() if symbol not in known}
    return sorted(missing - _NOT_IN_TEXT)
