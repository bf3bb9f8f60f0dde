"""Writes the packed tokens of a run once, in one process, to files that every rank reads and checks."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nxd_memopt.checkpoint.directories import (
    flush_to_disk,
    incomplete_path,
    remove_directory,
    replace_directory,
    restore_interrupted,
)
from nxd_memopt.checkpoint.index import read_checked_json, write_json
from nxd_memopt.training.config import DataConfig, TrainConfig
from nxd_memopt.training.documents import Documents
from nxd_memopt.training.packing import NOT_TRAINED, Tokens, documents_per_row
from nxd_memopt.training.tokens import SPLITS, TokenFile, packed_windows
from nxd_memopt.training.vocabulary import Vocabulary

FORMAT = "nxd_memopt packed tokens"
FORMAT_VERSION = 3
INDEX = "index.json"
CHUNK_BYTES = 2**24  # 16 MiB: memory of a check or a comparison of files
# Code, digits and letters outside of ASCII: what tokenizers treat differently.
SAMPLE = "def f(x):\n    return x + 1  # 0123456789 äöü\n"


def directory_of(parent: Path, fingerprint: str) -> Path:
    """Return the directory below ``parent`` of the packed tokens with ``fingerprint``."""
    return parent / fingerprint[:16]


def write_tokens(
    parent: Path,
    config: DataConfig,
    *,
    documents: Documents,
    vocabulary: Vocabulary,
    train_sequences: int,
    seed: int,
) -> str:
    """Tokenize and pack documents, until ``train_sequences`` or the text's end; return the fingerprint.

    The files are in a subdirectory of ``parent`` named by the fingerprint of text, tokenizer and
    options. It appears when all of them are complete. Files of an earlier run with the same
    fingerprint are reused if they have enough sequences, and replaced by longer ones otherwise. A
    longer file starts with the sequences of the shorter one, so a run that is extended continues
    in the same order. Directories of other fingerprints are left alone.

    Args:
        parent: directory of the token directories; no other process writes to it.
        config: S, the number of held-out sequences and the text column.
        documents: training and held-out text.
        vocabulary: tokenizer, checked against the model.
        train_sequences: sequences of S tokens that training reads.
        seed: seed of the order of documents and sequences.

    Raises:
        ValueError: a split has fewer than S tokens, or the files of an earlier run are damaged, or
            are no beginning of the new ones.
        OSError: the files cannot be written, for example because the disk is full.
    """
    fingerprint = _fingerprint(config, documents, vocabulary, seed)
    target = directory_of(parent, fingerprint)
    _restore_interrupted(parent)
    wanted = {"train": train_sequences, "held_out": config.eval_sequences}
    if target.exists():
        index = require_intact(target, fingerprint)
        # The requested numbers are compared, not the sequences in the files: a text that ended
        # early has fewer, and tokenizing it again would not give more.
        if all(index["wanted"][name] >= wanted[name] for name in SPLITS):
            return fingerprint
        wanted = {name: max(wanted[name], index["wanted"][name]) for name in SPLITS}

    incomplete = incomplete_path(target)
    incomplete.mkdir(parents=True)
    try:
        files: dict[str, Any] = {}
        for name, parts in (("train", documents.train), ("held_out", documents.held_out)):
            if wanted[name]:
                windows = packed_windows(documents, parts, vocabulary, config, seed)
                files[f"{name}.bin"] = _write_split(incomplete / f"{name}.bin", windows, wanted[name])
        content = {"format": FORMAT, "version": FORMAT_VERSION, "fingerprint": fingerprint}
        write_json(incomplete / INDEX, content | {"wanted": wanted, "files": files})
        if target.exists():
            _require_same_beginning(target, incomplete)
        replace_directory(incomplete, target)
    except OSError as error:
        # An error in writing names no file, or one of ours; the others are of reading the data.
        if error.filename is not None and parent not in Path(error.filename).parents:
            raise
        raise OSError(
            f"could not write the tokens to {incomplete}: {error}: free disk space or choose another trainer.output_dir"
        ) from error
    finally:
        remove_directory(incomplete)
    return fingerprint


def token_paths(directory: Path, index: Mapping[str, Any]) -> dict[str, Path]:
    """Return the file of each split that the index of ``directory`` lists."""
    return {name: directory / f"{name}.bin" for name in SPLITS if f"{name}.bin" in index["files"]}


def require_intact(directory: Path, fingerprint: str, *, contents: bool = True) -> dict[str, Any]:
    """Check the files of ``directory`` and return its index.

    Args:
        directory: directory of packed tokens.
        fingerprint: fingerprint that it must have.
        contents: also compare the CRC-32 of the files, which reads all of their bytes (1 s per GB).

    Raises:
        ValueError: the directory is not visible on this host, or a file is missing, has another
            length or other bytes than when it was written, or has another fingerprint.
    """
    path = directory / INDEX
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, and the tokens are in a directory of this name: delete it")
    if not directory.is_dir():
        raise ValueError(f"{directory}, written by rank 0, is not visible here: use an output_dir that all hosts share")
    remedy = f"delete {directory} to tokenize again"
    try:
        index = read_checked_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; or {remedy}") from error
    if (index.get("format"), index.get("version")) != (FORMAT, FORMAT_VERSION):
        found = f"{index.get('format')!r}, version {index.get('version')!r}"
        raise ValueError(f"{path} has format {found}, not {FORMAT!r}, version {FORMAT_VERSION}: {remedy}")
    if index["fingerprint"] != fingerprint:
        raise ValueError(f"{path} has fingerprint {index['fingerprint']}, this run's is {fingerprint}: {remedy}")
    for name, recorded in index["files"].items():
        file = directory / name
        size = file.stat().st_size if file.is_file() else None
        if size != recorded["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"{file} {found}, {recorded['bytes']} were written: {remedy}")
        if contents and _crc32(file) != recorded["crc32"]:
            raise ValueError(f"{file} was altered, its CRC-32 is not the recorded {recorded['crc32']}: {remedy}")
    return index


def open_tokens(config: TrainConfig, fingerprint: str, split: str) -> TokenFile:
    """Return the packed sequences of ``split``, ``"train"`` or ``"held_out"``."""
    directory = directory_of(config.trainer.tokens_directory, fingerprint)
    recorded = require_intact(directory, fingerprint, contents=False)["files"][f"{split}.bin"]
    return TokenFile(
        directory / f"{split}.bin",
        config.data.seq_length,
        documents_per_row=recorded["most_documents"],
        seed=config.trainer.seed,
    )


def describe_rows(config: TrainConfig, fingerprint: str) -> list[str]:
    """Return the start report's lines about the rows of training."""
    directory = directory_of(config.trainer.tokens_directory, fingerprint)
    index = require_intact(directory, fingerprint, contents=False)
    recorded = index["files"].get("train.bin")
    if recorded is None:
        return []
    share = recorded["not_trained"] / max(recorded["rows"] * config.data.seq_length, 1)
    documents = f"at most {recorded['most_documents']} documents in a row"
    lines = [f"packing {config.data.packing}: {documents}, {share:.2%} of the tokens are padding or not trained"]
    read = config.trainer.max_steps * config.data.global_batch_size
    if read > recorded["rows"]:
        epochs = read / recorded["rows"]
        lines.append(
            f"data: the text has {recorded['rows']:,} sequences, of which {config.trainer.max_steps:,} steps read "
            f"{read:,}: {epochs:.1f} epochs"
        )
    return lines


def _fingerprint(config: DataConfig, documents: Documents, vocabulary: Vocabulary, seed: int) -> str:
    """Return a hash of everything that the packed tokens depend on."""
    text = [documents.fingerprint, config.text_column, config.seq_length, config.packing, seed]
    facts = [FORMAT_VERSION, *text, vocabulary.size, vocabulary.end_of_text, _tokenizer_facts(vocabulary)]
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
        facts.append(hashlib.sha256(backend.to_str().encode()).hexdigest())
    else:
        vocabulary_text = json.dumps(sorted(tokenizer.get_vocab().items()))
        facts.append(hashlib.sha256(vocabulary_text.encode()).hexdigest())
    return facts


def _write_split(path: Path, windows: Iterator[Tokens], wanted: int) -> dict[str, int]:
    """Write at most ``wanted`` sequences of ``windows`` to ``path``; return what the index records.

    It records the largest number of documents in a row too, which gives the length of document
    bounds, and the number of tokens that are not trained, such as padding.
    """
    rows = 0
    crc32 = 0
    most_documents = 0
    not_trained = 0
    with path.open("wb") as file:
        for window in windows:
            written = np.ascontiguousarray(window[: wanted - rows])
            data = written.tobytes()
            file.write(data)
            crc32 = zlib.crc32(data, crc32)
            rows += len(written)
            most_documents = max(most_documents, documents_per_row(written))
            not_trained += int(np.count_nonzero(written & NOT_TRAINED))
            if rows == wanted:
                break
    flush_to_disk(path)
    return {
        "rows": rows,
        "bytes": path.stat().st_size,
        "crc32": crc32,
        "most_documents": most_documents,
        "not_trained": not_trained,
    }


def _crc32(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _require_same_beginning(old: Path, new: Path) -> None:
    """Raise ``ValueError`` unless each file in ``new`` starts with the bytes of the one in ``old``."""
    for path in sorted(old.glob("*.bin")):
        with path.open("rb") as shorter, (new / path.name).open("rb") as longer:
            while chunk := shorter.read(CHUNK_BYTES):
                if longer.read(len(chunk)) != chunk:
                    raise ValueError(
                        f"the text tokenized again does not start with the sequences of {path}, although text, "
                        "tokenizer and options are the same: install the version of the tokenizer's library that "
                        f"wrote it, or delete {old} and start a new run in another trainer.output_dir"
                    )


def _restore_interrupted(parent: Path) -> None:
    """Remove what interrupted runs left in ``parent``; keep the complete version of each directory."""
    for suffix in ("incomplete", "replaced"):
        for path in parent.glob(f".*.{suffix}"):
            restore_interrupted(path.with_name(path.name[1 : -len(suffix) - 1]))
