"""Copies the files next to a model's weights: tokenizer, chat template and generation config."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nxd_memopt.checkpoint.directories import copy_entry
from nxd_memopt.checkpoint.files import find_gguf
from nxd_memopt.checkpoint.huggingface.gguf_metadata import read_gguf_metadata
from nxd_memopt.checkpoint.huggingface.tokenizers import load_tokenizer

TEMPLATES = "additional_chat_templates"
"""Directory in which transformers stores the chat templates other than the default one."""

NAMES = {
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    TEMPLATES,
}


def is_companion(path: Path) -> bool:
    """Return whether ``path`` belongs to the tokenizer or says how to generate text."""
    return path.name in NAMES or path.suffix == ".jinja"


def copy_companions(source: Path, target: Path) -> bool:
    """Copy the companion files of the directory ``source`` to the directory ``target``.

    Return whether there are any.
    """
    found = [path for path in sorted(source.iterdir()) if is_companion(path)]
    for path in found:
        copy_entry(path, target / path.name)
    return bool(found)


@contextmanager
def companions_of(source: Path) -> Iterator[Path]:
    """Yield a directory with the companion files of a Hugging Face directory or a GGUF file.

    The tokenizer in a GGUF file is converted to a temporary directory.

    Raises:
        ValueError: the GGUF file has no tokenizer that transformers can convert.
    """
    gguf = find_gguf(source)
    has_tokenizer = gguf is not None and "tokenizer.ggml.model" in read_gguf_metadata(gguf)
    if not has_tokenizer or any(source.glob("tokenizer*.json")):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="nxd_memopt_tokenizer_") as directory:
        load_tokenizer(str(source)).save_pretrained(directory)
        yield Path(directory)
