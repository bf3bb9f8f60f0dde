"""Loads the tokenizer of a Hugging Face directory or a GGUF file, with what the GGUF file says about it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from nxd_memopt._optional import require_transformers
from nxd_memopt.checkpoint.files import find_gguf
from nxd_memopt.checkpoint.huggingface.gguf_metadata import read_gguf_metadata

# Special tokens by the name of their id in a GGUF file.
GGUF_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token",
    "tokenizer.ggml.eos_token_id": "eos_token",
    "tokenizer.ggml.padding_token_id": "pad_token",
    "tokenizer.ggml.unknown_token_id": "unk_token",
}
# tokenizer.ggml.pre of the tokenizers that split digits one by one, before GPT-2's splitting
# (llama.cpp, src/llama-vocab.cpp).
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
# Those of LLaMA 3: digits by three, and a character before letters belongs to them (same source).
LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = ("default", "gpt-2")


def load_tokenizer(name: str) -> Any:
    """Return the transformers tokenizer of a directory, a GGUF file's directory, or a hub name.

    Raises:
        ValueError: there is no tokenizer, it cannot be read, or it needs a package that is not
            installed.
    """
    path = Path(name)
    # transformers takes a name that is no directory for one on the hub.
    if not path.is_dir() and (path.is_absolute() or path.exists() or name.startswith(".")):
        problem = "is a file: pass its directory" if path.is_file() else "does not exist"
        raise ValueError(f"tokenizer directory {name} {problem}")
    # transformers reads a GGUF file's tokenizer only if the file is named.
    gguf = find_gguf(path)
    # Without a value transformers would ask at the terminal whether to run code of the directory.
    options: dict[str, Any] = {"trust_remote_code": False}
    metadata: dict[str, Any] = {}
    if gguf is not None and not any(path.glob("tokenizer*.json")):
        options["gguf_file"] = gguf.name
        metadata = read_gguf_metadata(gguf)  # raises for a file that is cut short
    auto_tokenizer = require_transformers("loading a tokenizer").AutoTokenizer
    # Errors are of many types: ImportError for a package such as sentencepiece, whose message has
    # several lines of instructions, and bare Exceptions of the Rust library for a damaged file.
    try:
        tokenizer = auto_tokenizer.from_pretrained(name, **options)
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        if path.is_dir() and gguf is None and not any(path.glob("*token*")):
            reason = "the directory has no tokenizer.json or other tokenizer files"
        elif isinstance(error, ImportError) and "gguf_file" in options:
            reason = f"{reason}: pip install 'nxd_memopt[gguf]'"
        raise ValueError(f"no tokenizer can be loaded from {name!r}: {reason}") from error
    if "gguf_file" in options:
        _set_what_gguf_says(tokenizer, metadata)
    return tokenizer


def _set_what_gguf_says(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Set special tokens, chat template and splitting of a converted tokenizer as in the file.

    transformers 5.17 gives LLaMA's converted tokenizer the begin-of-text token as end-of-text
    token and no padding token (``GGUFLlamaConverter``), splits text by GPT-2's rule, and decodes
    "▁" as a space.
    """
    from tokenizers import Regex, decoders, pre_tokenizers

    for entry, attribute in GGUF_TOKENS.items():
        if entry in metadata:
            setattr(tokenizer, attribute, tokenizer.convert_ids_to_tokens(metadata[entry]))
    if "tokenizer.chat_template" in metadata:
        tokenizer.chat_template = metadata["tokenizer.chat_template"]
    # "gpt2" is byte-level BPE: each byte is a letter of its own, and there is no "▁".
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    # Removes spaces before punctuation from decoded text; transformers warns of it for BPE.
    tokenizer.clean_up_tokenization_spaces = False
    rule = metadata.get("tokenizer.ggml.pre", "default")
    if rule in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif rule in LLAMA3:
        words = pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    elif rule not in GPT2 and metadata.get("general.architecture") == "llama":
        warnings.warn(
            f"the GGUF file splits text by rule {rule!r}, and its tokenizer is read with GPT-2's: set model.tokenizer "
            "to a directory with the model's own",
            stacklevel=3,
        )
