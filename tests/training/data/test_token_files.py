"""Tests the files of packed tokens: names, reuse, extension, and what interrupted or altered files lead to."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.data import packing as packing_module
from nxd_memopt.training.data.packed import sequences as token_files
from nxd_memopt.training.data.packed.fingerprint import tokens_fingerprint
from nxd_memopt.training.data.packed.sequences import WindowFiles
from nxd_memopt.training.data.sources import corpora
from nxd_memopt.training.data.tokenize import windows as tokens
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from tests.training import packed_tokens
from tests.training.packed_tokens import corpus_of, documents, rows_of, vocabulary, windows_of
from tests.training.runs import END, LINES

CONFIG = DataConfig(seq_length=16, eval_sequences=4)


def write(parent: Path, sequences: int = 50, config: DataConfig = CONFIG, **changes: Any) -> Path:
    """Write the tokens of ``LINES``; return their directory."""
    opened = changes.pop("documents", documents(LINES))
    return packed_tokens.write(
        parent, config, corpus_of(opened, changes.get("seed", 0)), sequences=sequences, **changes
    )


def train_rows(directory: Path) -> list[list[int]]:
    return rows_of(directory)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 20 rows, after calls of 5 documents."""
    monkeypatch.setattr(corpora, "WINDOW_SEQUENCES", 20)
    monkeypatch.setattr(tokens, "DOCUMENTS_PER_CALL", 5)


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    """The time and the bytes of each file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


@pytest.mark.usefixtures("small_windows")
def test_tokens_are_kept_while_they_are_enough(tmp_path: Path) -> None:
    directory = write(tmp_path, 50)
    before = contents(tmp_path)
    assert len(train_rows(directory)) == 60  # whole windows
    assert write(tmp_path, 60) == directory and contents(tmp_path) == before
    assert write(tmp_path, 61) == directory and len(train_rows(directory)) == 80
    windows = windows_of(directory)
    assert [windows.facts(number).rows for number in range(windows.count)] == [20, 40, 60, 80]
    assert not windows.last.ended


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_going_on_writes_the_bytes_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str) -> None:
    """One window at a time, with a document of several windows, is as all at once: nothing lost, nothing twice."""
    monkeypatch.setattr(packing_module, "WINDOW_TOKENS", 700)
    monkeypatch.setattr(tokens, "WINDOW_TOKENS", 200)  # of the first window of best fit; the next ones are larger
    texts = [*LINES, "long " * 400]
    config = DataConfig(seq_length=16, eval_sequences=4, packing=packing)  # pyright: ignore[reportArgumentType]
    at_once = write(tmp_path / "at_once", 10**6, config, documents=documents(texts))
    for sequences in range(1, 10**4, 20):
        directory = write(tmp_path / "slowly", sequences, config, documents=documents(texts))
        if windows_of(directory).last.ended:
            break
    assert files_of(directory) == files_of(at_once)
    ids = np.array(train_rows(directory)).ravel()
    ended = [part.index for part in documents(texts).train]
    # Each document ends once; the last one may be in the dropped rest.
    found = np.count_nonzero(ids == END)
    assert len(ended) - 1 <= found <= len(ended)


def test_best_fit_reads_as_much_held_out_text_as_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run waits for it before its first step."""
    monkeypatch.setattr(tokens, "DOCUMENTS_PER_CALL", 2)
    config = DataConfig(seq_length=24, eval_sequences=8, packing="best_fit")
    directory = write(tmp_path, 0, config, documents=documents(LINES, 2))
    held_out = windows_of(directory, "held_out").last
    assert held_out.rows == 16 and not held_out.ended
    assert held_out.documents < 20 < len(documents(LINES, 2).held_out) / 4


@pytest.mark.parametrize("documents_per_call", [1, 100])
def test_a_text_with_an_exact_number_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents_per_call: int
) -> None:
    """The last one says that it is the last, whatever the calls of the tokenizer are."""
    monkeypatch.setattr(corpora, "WINDOW_SEQUENCES", 20)
    monkeypatch.setattr(tokens, "DOCUMENTS_PER_CALL", documents_per_call)
    config = DataConfig(seq_length=16, eval_sequences=0, held_out_every=0)
    texts = ["x" * 15] * 40  # a row each, with the end-of-text token
    windows = windows_of(write(tmp_path, 10**6, config, documents=documents(texts, 0)))
    found = [windows.facts(number) for number in range(windows.count)]
    assert [(facts.rows, facts.ended, facts.documents) for facts in found] == [(20, False, 20), (40, True, 40)]


@pytest.mark.usefixtures("small_windows")
def test_a_kill_within_a_write_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL leaves an incomplete file under another name, which is no window and is replaced."""
    expected = files_of(write(tmp_path / "fresh", 10**6))
    directory = write(tmp_path / "killed", 50)

    def die(path: Path) -> None:
        path.with_name(f"kept.{path.name}").write_bytes(path.read_bytes()[:-100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(token_files, "flush_to_disk", die)
        write(tmp_path / "killed", 10**6)
    (incomplete,) = directory.glob("kept.*")
    incomplete.rename(incomplete.with_name(incomplete.name.removeprefix("kept.")))
    assert incomplete.name == "kept.incomplete.train.000003.safetensors" and len(train_rows(directory)) == 60
    write(tmp_path / "killed", 10**6)
    assert files_of(directory) == expected


@pytest.mark.usefixtures("small_windows")
def test_a_pause_between_calls_of_the_tokenizer_loses_and_repeats_nothing(tmp_path: Path) -> None:
    expected = train_rows(write(tmp_path / "fresh", 10**6))
    for calls in range(3, 100, 7):
        left = iter(range(calls))
        directory = write(tmp_path / "paused", 10**6, pauses=lambda _, left=left: next(left, None) is None)
        if windows_of(directory).last.ended:
            break
    assert train_rows(directory) == expected


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


class Slow:
    """A tokenizer in Python, of which the vocabulary alone is known."""

    special_tokens_map: ClassVar[dict[str, str]] = {}

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1 for _ in text] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}


def test_each_tokenizer_has_tokens_of_its_own() -> None:
    """Another order of two merges, which no short text shows; other words of a slow tokenizer; not the padding."""

    def of(words: Vocabulary) -> str:
        return tokens_fingerprint(CONFIG, "text", words, 0)

    merges = [("q", "x"), ("x", "z")]
    assert of(merging(merges)) == of(merging(merges)) != of(merging(merges[::-1]))
    assert of(Vocabulary(Slow(["e", "a"]), 3, 0)) != of(Vocabulary(Slow(["e", "b"]), 3, 0))
    padded = vocabulary()
    padded.tokenizer.backend_tokenizer.enable_padding(length=8)
    assert of(padded) == of(vocabulary())


@pytest.mark.parametrize("damage", ["absent", "shortened", "lengthened", "altered", "altered facts", "foreign"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    directory = write(tmp_path)
    windows = WindowFiles(directory, "train", windows_of(directory).last.fingerprint)
    windows.count = windows.written()
    file = windows.path(0)
    data = file.read_bytes()
    damaged = {
        "absent": b"",
        "shortened": data[:-4],
        "lengthened": data + b"\0\0\0\n",
        "altered": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "altered facts": data.replace(b'\\"documents\\": ', b'\\"documents\\": 1', 1)[: len(data)],
        "foreign": b"text",
    }
    file.write_bytes(damaged[damage])
    if damage == "absent":
        file.unlink()
    with pytest.raises(ValueError, match=rf"{file} .*delete {directory} to tokenize again"):
        windows.row(0)


def test_tokens_of_another_fingerprint_are_named(tmp_path: Path) -> None:
    windows = WindowFiles(write(tmp_path), "train", "abc")
    windows.count = 1
    with pytest.raises(ValueError, match=r"safetensors has fingerprint [0-9a-f]{64}, this run's is abc: delete"):
        windows.row(0)


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
    texts: Any = SimpleNamespace(read=lambda _: missing.read_text(encoding="utf-8"), place=lambda _: None)
    broken = type(opened)(texts, opened.train, opened.held_out, "test")
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        write(tmp_path / "tokens", documents=broken)
