"""Turns documents into tokens, in the order of the documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data.sources.corpora import Document
from nxd_memopt.training.data.tokenize.chat import ConversationEncoder, Encoded
from nxd_memopt.training.data.tokenize.long_texts import LONG_CHARACTERS, long_text_ids
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary


class DocumentEncoder:
    """Returns the tokens of a document as a function of this document alone.

    Args:
        vocabulary: tokenizer.
        config: what a document is.
    """

    def __init__(self, vocabulary: Vocabulary, config: DataConfig) -> None:
        self._vocabulary = vocabulary
        self._conversations = ConversationEncoder(vocabulary, config) if config.has_conversations else None

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Return the token ids of documents, none for those without any text.

        Raises:
            ValueError: a token is outside of the vocabulary.
        """
        if self._conversations is not None:
            return self._conversations.encode([text for text in documents if isinstance(text, str)])
        documents = [self._if_long(document) for document in documents]
        # Empty documents are left out: each would add nothing but an end-of-text token.
        texts = [text for text in documents if isinstance(text, str) and text.strip()]
        # One call for all texts: a fast tokenizer encodes them in parallel.
        ids = iter(self._vocabulary.encode(texts) if texts else [])
        encoded: list[Encoded] = []
        for document in documents:
            if not isinstance(document, str):
                encoded.append(Encoded(self._vocabulary.terminated(document)))
            else:
                encoded.append(Encoded(np.asarray(next(ids) if document.strip() else [], dtype=np.int32)))
        return encoded

    def _if_long(self, document: Document) -> Document:
        """Return the ids of a text that is too long to be tokenized at once, and any other document as it is."""
        if not isinstance(document, str) or len(document) <= LONG_CHARACTERS or document.isspace():
            return document
        return long_text_ids(self._vocabulary.tokenizer, document)
