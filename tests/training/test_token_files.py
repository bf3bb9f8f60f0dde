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

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data import packing as packing_module
from nxd_memopt.training.data.packed import files as token_files
from nxd_memopt.training.data.packed import log as token_log
from nxd_memopt.training.data.packed.files import create_directory, require_directory
from nxd_memopt.training.data.packed.log import TokenWriter
from nxd_memopt.training.data.sources import corpora
from nxd_memopt.training.data.tokenize import windows as tokens
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from tests.training import packed_tokens
from tests.training.packed_tokens import corpus_of, documents, open_split, rows_of, vocabulary
from tests.training.runs import END, LINES

CONFIG = DataConfig(seq_length=16, eval_sequences=4)


def write(parent: Path, sequences: int = 50, config: DataConfig = CONFIG, **changes: Any) -> Path:
    """Write the tokens of ``LINES``; return their directory."""
    opened = changes.pop("documents", documents(LINES))
    return packed_tokens.write(
        parent, config, corpus_of(opened, changes.get("seed", 0)), sequences=sequences, **changes
    )


def train_rows(directory: Path) -> list[list[int]]:
    return rows_of(directory, 16)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 20 rows, after calls of 5 documents."""
    monkeypatch.setattr(corpora, "WINDOW_SEQUENCES", 20)
    monkeypatch.setattr(tokens, "DOCUMENTS_PER_CALL", 5)


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    """The time and the bytes of each file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.usefixtures("small_windows")
def test_tokens_are_kept_while_they_are_enough(tmp_path: Path) -> None:
    directory = write(tmp_path, 50)
    before = contents(tmp_path)
    assert len(train_rows(directory)) == 60  # whole windows
    assert write(tmp_path, 60) == directory and contents(tmp_path) == before
    assert write(tmp_path, 61) == directory and len(train_rows(directory)) == 80
    entries = [json.loads(line) for line in (directory / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [entry["rows"] for entry in entries] == [20, 40, 60, 80]
    assert not any(entry["ended"] for entry in entries)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_going_on_writes_the_bytes_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str) -> None:
    """One window at a time, with a document of several windows, is as all at once: nothing lost, nothing twice."""
    monkeypatch.setattr(packing_module, "WINDOW_TOKENS", 700)
    texts = [*LINES, "long " * 400]
    config = DataConfig(seq_length=16, eval_sequences=4, packing=packing)  # pyright: ignore[reportArgumentType]
    at_once = write(tmp_path / "at_once", 10**6, config, documents=documents(texts))
    for sequences in range(1, 10**4, 20):
        directory = write(tmp_path / "slowly", sequences, config, documents=documents(texts))
        if TokenWriter(directory, "train", 16).log.last.ended:
            break
    for name in ("train.bin", "held_out.bin"):
        assert (directory / name).read_bytes() == (at_once / name).read_bytes()
    logs = [TokenWriter(each, "train", 16).log.last for each in (at_once, directory)]
    assert logs[0] == logs[1]
    ids = np.array(train_rows(directory)).ravel()
    ended = [part.index for part in documents(texts).train]
    # Each document ends once; the last one may be in the dropped rest.
    found = np.count_nonzero(ids == END)
    assert len(ended) - 1 <= found <= len(ended)


@pytest.mark.parametrize("documents_per_call", [1, 7, 100])
def test_a_text_with_an_exact_number_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents_per_call: int
) -> None:
    """The last one says that it is the last, whatever the calls of the tokenizer are."""
    monkeypatch.setattr(corpora, "WINDOW_SEQUENCES", 20)
    monkeypatch.setattr(tokens, "DOCUMENTS_PER_CALL", documents_per_call)
    config = DataConfig(seq_length=16, eval_sequences=0, held_out_every=0)
    texts = ["x" * 15] * 40  # a row each, with the end-of-text token
    log = TokenWriter(write(tmp_path, 10**6, config, documents=documents(texts, 0)), "train", 16).log
    assert [(entry.rows, entry.ended, entry.documents) for entry in log.entries] == [(20, False, 20), (40, True, 40)]


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("step", ["tokens", "state", "entry", "half an entry"])
def test_a_kill_at_any_point_of_a_write_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    expected = contents(write(tmp_path / "fresh", 10**6))
    directory = write(tmp_path / "killed", 50)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if step == "tokens":
            patch.setattr(token_log, "write_json", die)
        else:
            patch.setattr(TokenWriter, "_append", die)
        write(tmp_path / "killed", 10**6)
    if step == "entry":
        with (directory / "train.bin").open("ab") as file:
            file.write(b"half a window")
    if step == "half an entry":
        with (directory / "train.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"rows": 8')
    write(tmp_path / "killed", 10**6)
    found = contents(directory)
    assert {name: data for name, (_, data) in found.items()} == {name: data for name, (_, data) in expected.items()}


@pytest.mark.usefixtures("small_windows")
def test_a_pause_between_calls_of_the_tokenizer_repeats_the_window_only(tmp_path: Path) -> None:
    expected = train_rows(write(tmp_path / "fresh", 10**6))
    encoded: list[str] = []
    words = vocabulary()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(words, name)

        def encode(self, texts: list[str]) -> list[list[int]]:
            encoded.extend(texts)
            return words.encode(texts)

    for calls in range(3, 100, 7):
        left = iter(range(calls))
        arguments: Any = {"words": Counting(), "pauses": lambda _, left=left: next(left, None) is None}
        directory = write(tmp_path / "paused", 10**6, **arguments)
        if TokenWriter(directory, "train", 16).log.last.ended:
            break
    assert train_rows(directory) == expected
    assert len(encoded) < 3 * len(LINES)


def test_a_longer_run_starts_with_the_same_sequences(tmp_path: Path) -> None:
    longer = train_rows(write(tmp_path, 300))
    # More held-out sequences do not change the training file.
    wider = write(tmp_path, 20, DataConfig(seq_length=16, eval_sequences=8))
    assert train_rows(wider) == longer


def test_other_data_settings_and_seeds_have_directories_of_their_own(tmp_path: Path) -> None:
    first = write(tmp_path)
    before = contents(tmp_path)
    others = [
        write(tmp_path, seed=1),
        write(tmp_path, config=DataConfig(seq_length=32, eval_sequences=4)),
        write(tmp_path, words=Vocabulary(vocabulary().tokenizer, 300, END)),
        write(tmp_path, words=Vocabulary(vocabulary().tokenizer, 257, 0)),
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
    first = write(tmp_path, words=merging([("q", "x"), ("x", "z")]))
    assert write(tmp_path, words=merging([("q", "x"), ("x", "z")])) == first
    assert write(tmp_path, words=merging([("x", "z"), ("q", "x")])) != first


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

    first, second = (write(tmp_path, words=Vocabulary(Slow(tokens), 3, 0)) for tokens in (["e", "a"], ["e", "b"]))
    assert first != second


def test_the_padding_that_a_tokenizer_file_requests_is_no_other_tokenizer(tmp_path: Path) -> None:
    padded = vocabulary()
    padded.tokenizer.backend_tokenizer.enable_padding(length=8)
    assert write(tmp_path, words=padded) == write(tmp_path)


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
        file.write_bytes({"shortened": data[:-4], "lengthened": data + b"\0\0\0\n", "altered": altered}[damage])
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=rf"{file} .*delete {directory} to tokenize again"):
        write(tmp_path, 10**6)
        # Bytes are compared when they are read.
        split = name.removesuffix(".bin")
        open_split(directory, 16, split).rows(range(1))
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("small_windows")
def test_a_damaged_log_is_named_and_kept(tmp_path: Path) -> None:
    directory = write(tmp_path)
    log = directory / "train.jsonl"
    first, second, *_ = lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    for damaged in (
        [],
        [first],
        [first, *lines[2:]],
        [first, second.replace(": 40", ": 41"), *lines[2:]],
        [*lines, "{}\n"],
    ):
        log.write_text("".join(damaged), encoding="utf-8")
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=rf"{log} .*delete {directory} to tokenize again"):
            write(tmp_path, 10**6)
        assert contents(tmp_path) == before


def test_a_directory_of_another_format_or_fingerprint_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path)
    with pytest.raises(ValueError, match=r"index.json has fingerprint [0-9a-f]{64}, this run's is abc: delete"):
        require_directory(directory, "abc")
    index = json.loads((directory / "index.json").read_text(encoding="utf-8"))
    del index["checksum"]
    token_files.write_json(directory / "index.json", index | {"version": 99})
    with pytest.raises(ValueError, match=rf"version 99, not .*version {token_files.FORMAT_VERSION}: delete"):
        write(tmp_path)
    with pytest.raises(ValueError, match="is not visible here"):
        require_directory(tmp_path / "absent", "abc")


def test_a_full_disk_while_tokenizing_is_one_error(tmp_path: Path) -> None:
    expected = train_rows(write(tmp_path / "fresh"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"could not write the tokens to .*File too large.*free disk space"):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert train_rows(write(tmp_path)) == expected


def test_an_error_of_the_data_is_not_one_of_the_tokens(tmp_path: Path) -> None:
    opened = documents(LINES)
    missing = tmp_path / "absent.txt"
    broken = type(opened)(lambda _: missing.read_text(encoding="utf-8"), opened.train, opened.held_out, "test")
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        write(tmp_path / "tokens", documents=broken)


def test_a_kill_while_the_index_is_written_is_no_obstacle(tmp_path: Path) -> None:
    directory = tmp_path / "tokens"
    directory.mkdir()
    (directory / "index.json.incomplete").write_text('{"form')
    create_directory(directory, "f")
    assert [path.name for path in directory.iterdir()] == ["index.json"]
