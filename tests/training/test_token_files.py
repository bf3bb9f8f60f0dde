"""Tests the files of packed tokens: names, reuse, extension, and what interrupted or altered files lead to."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nxd_memopt.training import token_files
from nxd_memopt.training.config import DataConfig
from nxd_memopt.training.token_files import require_intact, write_tokens
from nxd_memopt.training.vocabulary import Vocabulary
from tests.training.runs import END, LINES
from tests.training.test_documents import documents, vocabulary

CONFIG = DataConfig(seq_length=16, eval_sequences=4)


def write(parent: Path, sequences: int = 50, config: DataConfig = CONFIG, **changes: Any) -> Path:
    """Write the tokens of ``LINES``; return their directory."""
    arguments: dict[str, Any] = {"documents": documents(LINES), "vocabulary": vocabulary(), "seed": 0, **changes}
    fingerprint = write_tokens(parent, config, train_sequences=sequences, **arguments)
    return parent / fingerprint[:16]


def train_rows(directory: Path) -> list[list[int]]:
    return np.fromfile(directory / "train.bin", dtype=np.int32).reshape(-1, 16).tolist()


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    """The time and the bytes of each file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_tokens_are_kept_while_they_are_enough(tmp_path: Path) -> None:
    directory = write(tmp_path, 50)
    before = contents(tmp_path)
    assert write(tmp_path, 20) == directory and contents(tmp_path) == before
    assert write(tmp_path, 60) == directory and len(train_rows(directory)) == 60
    index = json.loads((directory / "index.json").read_text(encoding="utf-8"))
    assert index["wanted"] == {"train": 60, "held_out": 4}
    assert index["files"]["train.bin"]["rows"] == 60 and index["files"]["train.bin"]["bytes"] == 60 * 16 * 4


def test_a_longer_run_starts_with_the_same_sequences(tmp_path: Path) -> None:
    short = train_rows(write(tmp_path, 10))
    longer = train_rows(write(tmp_path, 300))
    assert longer[:10] == short and len(longer) == 300
    # More held-out sequences do not shorten the training file.
    wider = write(tmp_path, 20, DataConfig(seq_length=16, eval_sequences=8))
    assert train_rows(wider) == longer


def test_other_data_settings_and_seeds_have_directories_of_their_own(tmp_path: Path) -> None:
    first = write(tmp_path)
    before = contents(tmp_path)
    others = [
        write(tmp_path, seed=1),
        write(tmp_path, config=DataConfig(seq_length=32, eval_sequences=4)),
        write(tmp_path, vocabulary=Vocabulary(vocabulary().tokenizer, 300, END)),
        write(tmp_path, vocabulary=Vocabulary(vocabulary().tokenizer, 257, 0)),
    ]
    assert len({first, *others}) == 5
    assert {name: value for name, value in contents(tmp_path).items() if name in before} == before


def merging(merges: list[tuple[str, str]]) -> Vocabulary:
    """A tokenizer whose merges differ for texts with q, x and z only."""
    tokens = ["<end>", *"abcdefghijklmnopqrstuvwxyz 0123456789", "qx", "xz"]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, unk_token="<end>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="<end>")
    return Vocabulary(tokenizer, len(tokens), 0)


def test_one_other_merge_rule_is_another_tokenizer(tmp_path: Path) -> None:
    """The merge does not occur in any short sample text."""
    first = write(tmp_path, vocabulary=merging([("q", "x"), ("x", "z")]))
    assert write(tmp_path, vocabulary=merging([("q", "x"), ("x", "z")])) == first
    assert write(tmp_path, vocabulary=merging([("x", "z"), ("q", "x")])) != first


def test_a_slow_tokenizer_is_known_by_its_vocabulary(tmp_path: Path) -> None:
    class Slow:
        def __init__(self, tokens: list[str]) -> None:
            self.tokens = tokens
            self.special_tokens_map: dict[str, str] = {}

        def __len__(self) -> int:
            return len(self.tokens)

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[1 for _ in text] for text in texts]}

        def get_vocab(self) -> dict[str, int]:
            return {token: i for i, token in enumerate(self.tokens)}

    first, second = (write(tmp_path, vocabulary=Vocabulary(Slow(tokens), 3, 0)) for tokens in (["e", "a"], ["e", "b"]))
    assert first != second


def test_the_padding_that_a_tokenizer_file_requests_is_no_other_tokenizer(tmp_path: Path) -> None:
    padded = vocabulary()
    padded.tokenizer.backend_tokenizer.enable_padding(length=8)
    assert write(tmp_path, vocabulary=padded) == write(tmp_path)


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin", "index.json"])
@pytest.mark.parametrize("damage", ["shortened", "lengthened", "altered", "absent"])
def test_damaged_files_are_named_and_kept(tmp_path: Path, name: str, damage: str) -> None:
    directory = write(tmp_path)
    file = directory / name
    data = file.read_bytes()
    altered = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes({"shortened": data[:-4], "lengthened": data + b"\0\0\0\0", "altered": altered}[damage])
    before = contents(tmp_path)
    for sequences in (20, 50, 60):
        with pytest.raises(ValueError, match=rf"{file} .*delete {directory} to tokenize again"):
            write(tmp_path, sequences)
    assert contents(tmp_path) == before


def test_a_directory_of_another_format_or_fingerprint_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path)
    with pytest.raises(ValueError, match=r"index.json has fingerprint [0-9a-f]{64}, this run's is abc: delete"):
        require_intact(directory, "abc")
    index = json.loads((directory / "index.json").read_text(encoding="utf-8"))
    del index["checksum"]
    token_files.write_json(directory / "index.json", index | {"version": 99})
    with pytest.raises(ValueError, match=rf"version 99, not .*version {token_files.FORMAT_VERSION}: delete"):
        write(tmp_path)
    with pytest.raises(ValueError, match="is not visible here"):
        require_intact(tmp_path / "absent", "abc")


def test_tokens_that_do_not_continue_the_old_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another version of the tokenizer's library."""
    directory = write(tmp_path, 20)
    before = contents(tmp_path)
    encode = Vocabulary.encode

    def changed(self: Vocabulary, texts: list[str]) -> list[list[int]]:
        if len(texts) == 1:  # the sample of the fingerprint
            return encode(self, texts)
        return [[1, *ids] for ids in encode(self, texts)]

    monkeypatch.setattr(Vocabulary, "encode", changed)
    with pytest.raises(ValueError, match=rf"does not start with the sequences of {directory}/held_out.bin"):
        write(tmp_path, 60)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("longer", [False, True])
def test_an_interrupted_tokenization_leaves_nothing_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longer: bool
) -> None:
    if longer:
        write(tmp_path, 20)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        # As after SIGKILL: nothing is removed.
        patch.setattr(token_files, "remove_directory", lambda _: None)
        patch.setattr(token_files, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path)
    (remainder,) = set(tmp_path.iterdir()) - {tmp_path / name.split("/")[0] for name in before}
    assert (remainder / "train.bin").is_file()
    expected = contents(write(tmp_path / "fresh"))
    directory = write(tmp_path)
    assert not remainder.exists()
    assert {name: data for name, (_, data) in contents(directory).items()} == {
        name: data for name, (_, data) in expected.items()
    }


def test_a_kill_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    directory = write(tmp_path)
    before = contents(tmp_path)
    directory.rename(directory.with_name(f".{directory.name}.replaced"))
    write(tmp_path)
    assert contents(tmp_path) == before


def test_a_full_disk_while_tokenizing_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"could not write the tokens to .*File too large.*free disk space"):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_data_is_not_one_of_the_tokens(tmp_path: Path) -> None:
    opened = documents(LINES)
    missing = tmp_path / "absent.txt"
    broken = type(opened)(lambda _: missing.read_text(encoding="utf-8"), opened.train, opened.held_out, "test")
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        write(tmp_path / "tokens", documents=broken)
